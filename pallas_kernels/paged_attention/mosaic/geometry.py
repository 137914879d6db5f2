"""The static sizes of one Hopper attention kernel, the shared memory they take, and what it cannot serve."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.paged_attention.worklist import GpuTile
from jaxpaged.pallas_kernels.platform import DeviceTarget

ROWS = 64  # rows of a wgmma, and so of a warpgroup's tile
WARPS = 4  # warps of a warpgroup
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
KV_TILES = (64, 128)
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on sm_90
SHARED_MEMORY_OF_SM = 228 * 1024
RESERVED = 1024  # bytes of shared memory that CUDA takes for each program
BARRIER = 8  # bytes
REDUCTION = 2048  # bytes that Mosaic keeps for reductions across warps


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one kernel. The tile of a program is `warpgroups` tiles of 64 rows, each with whole queries."""

    groups: int  # G
    head_dim: int  # H
    block_size: int  # B
    table_width: int  # P
    dtype: jnp.dtype
    kv: int  # keys per iteration
    stages: int  # slots of the ring, each with kv keys and values
    warpgroups: int  # that compute
    loader: bool  # whether one more warpgroup does nothing but load

    @property
    def queries(self) -> int:
        """Queries of a warpgroup: those whose G heads fit its rows."""
        return ROWS // self.groups

    @property
    def piece(self) -> int:
        """Keys that one copy brings: a block, or the part of it that fits the tile."""
        return min(self.block_size, self.kv)

    @property
    def pieces(self) -> int:
        """Copies that fill a slot's keys, and as many its values."""
        return self.kv // self.piece

    @property
    def threads(self) -> int:
        """Warpgroups of a program."""
        return self.warpgroups + self.loader

    def shared_memory(self) -> int:
        """Bytes of a program: queries twice (as they come and as wgmma reads them; the result takes the former)."""
        row = self.head_dim * jnp.dtype(self.dtype).itemsize
        queries = 2 * self.warpgroups * ROWS * row
        ring = 2 * self.stages * self.kv * row
        barriers = self.warpgroups + (4 if self.loader else 2) * self.stages
        return queries + ring + BARRIER * barriers + REDUCTION

    def sm_shared_memory(self) -> int:
        """Bytes that a program takes of its SM's."""
        return self.shared_memory() + RESERVED


def geometry(call: AttentionCall, tile: GpuTile) -> Geometry:
    """The sizes of the kernel that serves one phase of a call with its tile."""
    warpgroups = tile.query_rows // ROWS
    return Geometry(
        groups=call.q.shape[2],
        head_dim=call.q.shape[3],
        block_size=call.cache.shape[2],
        table_width=call.batch.block_tables.shape[1],
        dtype=jnp.dtype(call.q.dtype),
        kv=tile.kv,
        stages=tile.num_stages,
        warpgroups=warpgroups,
        loader=tile.num_warps > warpgroups * WARPS,
    )


def mosaic_obstacle(target: DeviceTarget, call: AttentionCall) -> str | None:
    """Why the Hopper kernel cannot serve a call; None: it can."""
    if not call.interpret and target.capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    groups, head_dim = call.q.shape[2:]
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, it has {HEAD_DIMS}"
    if groups > ROWS:
        return f"{groups} query heads share a KV head, a tile has {ROWS} rows"
    if call.cache.shape[2] not in BLOCK_SIZES:
        return f"block size is {call.cache.shape[2]}, it has {BLOCK_SIZES}"
    if call.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {call.q.dtype}, it has bfloat16 and float16"
    if call.cache.dtype != call.q.dtype:
        return f"the cache is {call.cache.dtype} and the queries {call.q.dtype}; quantised caches are not for it"
    if call.extras.k_scale is not None or call.extras.v_scale is not None:
        return "scaled caches are not for it"
    if call.spec.scale <= 0:
        return f"the scale is {call.spec.scale}, it needs one above 0"
    if call.batch.work is None:
        return "the batch has no work list (plan_attention's work)"
    lists = (call.batch.work.decode, call.batch.work.prefill)
    return next((found for work in lists if work is not None and (found := _tile_obstacle(call, work.tile))), None)


def _tile_obstacle(call: AttentionCall, tile: GpuTile) -> str | None:
    if tile.query_rows not in (ROWS, 2 * ROWS):
        return f"query_rows is {tile.query_rows}, it has {ROWS} and {2 * ROWS}"
    sizes = geometry(call, tile)
    if sizes.warpgroups > 1 and ROWS % sizes.groups:
        return f"query_rows {tile.query_rows} needs a divisor of {ROWS} as heads per KV head, not {sizes.groups}"
    if tile.kv not in KV_TILES:
        return f"kv is {tile.kv}, it has {KV_TILES}"
    if tile.num_warps != sizes.threads * WARPS or (sizes.warpgroups > 1 and not sizes.loader):
        return f"num_warps is {tile.num_warps}; 64 rows take 4 (self-fed) or 8, 128 rows 12"
    if tile.num_stages < 1 or sizes.shared_memory() > SHARED_MEMORY:
        return f"{sizes.shared_memory()} bytes of shared memory, a program has {SHARED_MEMORY}"
    return None
