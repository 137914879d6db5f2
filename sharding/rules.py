"""Logical axis → mesh axis: one table, so that a layout is data and models never name a mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpaged.sharding.mesh import MODEL_AXIS

Rules = Mapping[str, str | None]

# Heads are split by KV head (a KV head's query heads stay with it); the embedding is whole on every device.
TENSOR_PARALLEL: Rules = MappingProxyType({"kv_heads": MODEL_AXIS, "mlp": MODEL_AXIS, "vocab": None, "embed": None})

CACHE_AXES = (None, "kv_heads", None, None)  # of one layer's keys or values [N, K, B, H]


def sharding_of(
    axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules, mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """The layout of an array with these logical axes.

    Raises: ValueError when a split dimension does not divide among the devices.
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = None if axis is None else rules[axis]
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ValueError(
                f"tensor parallelism: {axis} = {size} does not divide among {mesh.shape[mesh_axis]} devices; "
                "choose a tensor_parallel_size that divides it"
            )
        spec.append(mesh_axis)
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())
