"""Tiles for the Hopper kernel. Chosen by what fits registers and shared memory; none of them has been timed."""

from __future__ import annotations

from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import HEAD_DIMS, ROWS
from jaxpaged.pallas_kernels.paged_attention.worklist import GpuTile


def hopper_tiles(*, groups: int, head_dim: int) -> tuple[GpuTile, GpuTile]:
    """(decode, prefill) for G query heads per KV head of width H.

    Decode: one warpgroup that feeds itself, several programs on an SM so that one loads while another computes.
    Prefill: two warpgroups and a loader where queries fill 128 rows without a gap, else one and a loader.

    Raises: ValueError for a width that the kernel does not have.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: wanted one of {HEAD_DIMS}, got {head_dim}")
    return _decode(head_dim), _prefill(head_dim, whole=ROWS % groups == 0)


def _decode(head_dim: int) -> GpuTile:
    stages, occupancy = {64: (3, 3), 128: (2, 2), 256: (2, 1)}[head_dim]
    return GpuTile(query_rows=ROWS, kv=64, num_warps=4, num_stages=stages, occupancy=occupancy)


def _prefill(head_dim: int, *, whole: bool) -> GpuTile:
    if head_dim == 256 or not whole:
        stages = 2 if head_dim == 256 else 3
        return GpuTile(query_rows=ROWS, kv=64, num_warps=8, num_stages=stages, occupancy=1)
    return GpuTile(query_rows=2 * ROWS, kv=128, num_warps=12, num_stages=2, occupancy=1)
