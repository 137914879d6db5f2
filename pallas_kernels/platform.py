"""The device that the code being traced is for, and which implementation of an op it gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

# For devices known by description alone; a device that is there says it itself. Longer names first.
_CAPABILITIES = (
    (r"GB300|B300", (10, 3)),
    (r"GB200|B200", (10, 0)),
    (r"H100|H200|GH200|H20", (9, 0)),
    (r"L40S?|L4|RTX 4090", (8, 9)),
    (r"A100|A30|A800", (8, 0)),
    (r"A10G?|A40", (8, 6)),
    (r"T4", (7, 5)),
)


@dataclass(frozen=True, kw_only=True)
class DeviceTarget:
    """What kernels are chosen by."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str  # the device's name, such as "NVIDIA H200"
    capability: tuple[int, int] | None  # CUDA compute capability; None off NVIDIA GPUs and for unknown ones
    num_cores: int | None  # a GPU's multiprocessors

    def __str__(self) -> str:
        capability = (
            "" if self.capability is None else f", compute capability {self.capability[0]}.{self.capability[1]}"
        )
        return f"{self.kind} ({self.platform}{capability})"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An implementation that was considered, and why it does not fit; None: it does."""

    name: str
    obstacle: str | None


def current_target() -> DeviceTarget:
    """The abstract mesh's device where one is set (compiling for a device that is absent), else JAX's default."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return DeviceTarget(
            platform="gpu" if described.platform == "cuda" else described.platform,
            kind=described.device_kind,
            capability=_described(described.device_kind),
            num_cores=described.num_cores,
        )
    return target_of(jax.devices()[0])


def target_of(device: Any) -> DeviceTarget:
    """A jax.Device, as what kernels are chosen by."""
    if device.platform != "gpu":
        return DeviceTarget(platform=device.platform, kind=device.device_kind, capability=None, num_cores=None)
    return DeviceTarget(
        platform="gpu",
        kind=device.device_kind,
        capability=_parsed(device.compute_capability),
        num_cores=device.core_count,
    )


def _described(kind: str) -> tuple[int, int] | None:
    return next((found for pattern, found in _CAPABILITIES if re.search(rf"\b({pattern})\b", kind)), None)


def _parsed(capability: str) -> tuple[int, int] | None:
    """ "9.0" gives (9, 0); other makers' names such as "gfx942" None."""
    parts = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return None if parts is None else (int(parts[1]), int(parts[2]))


def first_fitting(op: str, target: DeviceTarget, candidates: Sequence[Candidate]) -> str:
    """The first candidate without an obstacle.

    Raises: ValueError that gives each candidate's obstacle.
    """
    for candidate in candidates:
        if candidate.obstacle is None:
            return candidate.name
    reasons = "; ".join(f"{c.name}: {c.obstacle}" for c in candidates)
    raise ValueError(f"{op}: no implementation that was asked for fits {target}. {reasons}")
