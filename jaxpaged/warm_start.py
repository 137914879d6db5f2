"""The persistent compilation cache, and whether it holds all programs of an engine already."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxpaged.demo import cache_directory

ASKED = "/jax/compilation_cache/compile_requests_use_cache"
FOUND = "/jax/compilation_cache/cache_hits"


def use_compilation_cache(directory: str | None) -> Path:
    """Turn JAX's persistent cache on and return its place; one that the process has chosen itself is kept."""
    if directory is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    path = Path(directory) if directory else cache_directory() / "xla"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path


def processor_name(device: Any) -> str:
    """Of a jax.Device, as precisely as compiled code depends on it: for CPUs the model and its abilities."""
    cpuinfo = Path("/proc/cpuinfo")
    if device.platform != "cpu" or not cpuinfo.exists():
        return f"{device.device_kind} {platform.processor()}"
    fields = dict(line.split(":", 1) for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return " ".join(named.get(name, "") for name in ("model name", "flags", "Features"))


class CacheWatch:
    """What the persistent cache was asked for by one thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.num_misses = 0

    def listen(self, event: str, **_: Any) -> None:
        """A listener of jax.monitoring."""
        if threading.get_ident() == self._thread:
            self.num_misses += (event == ASKED) - (event == FOUND)


@contextmanager
def watch_cache() -> Iterator[CacheWatch]:
    """Counts the programs that this thread compiles within the block because the cache does not hold them."""
    watch = CacheWatch()
    jax.monitoring.register_event_listener(watch.listen)
    try:
        yield watch
    finally:
        jax.monitoring.unregister_event_listener(watch.listen)


class WarmStart:
    """A mark in the cache's folder: an engine of just this shape has compiled all its programs there.

    With the mark the engine may take requests at once: reading a program takes a second or two, and the ones a
    request needs first are waited for alone. Should the cache have lost one, it is compiled at that point: slower,
    never wrong, and counted.
    """

    def __init__(self, directory: Path, *shape: Any) -> None:
        """shape: all that the programs depend on besides versions and XLA's flags, by its repr; the processor, too."""
        versions = [importlib.metadata.version(name) for name in ("jaxpaged", "jax", "jaxlib", "flax")]
        text = repr((versions, os.environ.get("XLA_FLAGS", ""), shape))
        self._mark = directory / f"complete-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        self.ready = self._mark.exists()  # read once: what start-up decides must not change half way

    def remember(self) -> None:
        """Every program is in the cache now."""
        self._mark.touch()
