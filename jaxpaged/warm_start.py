"""The persistent compilation cache, and whether it holds all programs of an engine already."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import jax

from jaxpaged.demo import cache_directory


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


class WarmStart:
    """A mark in the cache's folder: an engine of just this shape has compiled all its programs there.

    With the mark the engine may take requests at once: reading a program takes a second or two, and the ones a
    request needs first are waited for alone. Should the cache have lost one, it is compiled at that point: slower,
    never wrong.
    """

    def __init__(self, directory: Path, *shape: Any) -> None:
        """shape: all that the programs depend on besides the versions and XLA's flags, by its repr."""
        versions = [importlib.metadata.version(name) for name in ("jaxpaged", "jax", "jaxlib", "flax")]
        text = repr((versions, os.environ.get("XLA_FLAGS", ""), shape))
        self._mark = directory / f"complete-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        self.ready = self._mark.exists()  # read once: what start-up decides must not change half way

    def remember(self) -> None:
        """Every program is in the cache now."""
        self._mark.touch()
