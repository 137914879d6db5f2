"""Which device and which software this is."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "transformers")


def describe() -> dict[str, Any]:
    """Device, its memory and multiprocessors, versions."""
    device = jax.devices()[0]
    facts: dict[str, Any] = {"device": device.device_kind, "platform": device.platform}
    if device.platform == "gpu":
        facts |= {"multiprocessors": device.core_count, "capability": device.compute_capability}
        facts["memory_gib"] = device.memory_stats()["bytes_limit"] / (1 << 30)
    return facts | {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
