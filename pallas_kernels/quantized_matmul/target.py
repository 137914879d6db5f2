"""Which device a program is being traced for: the abstract mesh's when there is one, else the first real one."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device as far as choices of implementation and tiles depend on it."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str  # the device's name, for example "NVIDIA H200"
    num_cores: int  # multiprocessors of a GPU; 1 elsewhere


def current_target() -> Target:
    """Called while tracing. A mesh of absent devices, set by jax.sharding.use_abstract_mesh, comes first."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return _target(abstract.platform, abstract.device_kind, abstract.num_cores)
    device = jax.devices()[0]
    cores = device.core_count if device.platform == "gpu" else 1
    return _target(device.platform, device.device_kind, cores)


def _target(platform: str, kind: str, num_cores: int | None) -> Target:
    return Target(platform="gpu" if platform in ("cuda", "gpu") else platform, kind=kind, num_cores=num_cores or 1)
