"""Batches for timing paged attention: equal rows over a pool in random order, made on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels import (
    AttentionBatch,
    AttentionSpec,
    GpuTile,
    TileConfig,
    WorkConfig,
    current_target,
    gpu_work_config,
    hopper_work_config,
    paged_attention,
    plan_attention,
)
from scripts.gpu_check.context import waves
from scripts.gpu_check.sizes import Sizes

# Only the XLA implementation reads these.
XLA_TILES = TileConfig(decode_lanes=32, decode_kv=64, prefill_queries=64, prefill_kv=128)
DRY_TILE = GpuTile(query_rows=16, kv=16, num_warps=4, num_stages=2, occupancy=1)
DRY_MULTIPROCESSORS = 4
KERNELS = ("triton", "mosaic")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A batch of `rows` rows with `new` queries each, after `context - new` cached tokens."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    batch: AttentionBatch
    spec: AttentionSpec

    def step(self, implementation: str, *, interpret: bool) -> Callable[..., jax.Array]:
        """(q, k, v, batch) → the op's output, which can be the next step's q."""
        return partial(_call, spec=self.spec, implementation=implementation, interpret=interpret)

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.k, self.v, self.batch

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one step reads at least once."""
        per_token = 2 * self.k.shape[1] * self.k.shape[3] * self.k.dtype.itemsize
        return int(np.sum(np.asarray(self.batch.kv_lens))) * per_token


def _call(q, k, v, batch, *, spec: AttentionSpec, implementation: str, interpret: bool):
    return paged_attention(q, k, v, batch, spec, implementation=implementation, interpret=interpret)


def work_config(
    kernel: str,
    *,
    heads: tuple[int, int, int],
    block_size: int,
    cache_dtype: str,
) -> WorkConfig:
    """The kernel's own tiles for this GPU; on CPU small ones. heads: K, G, H."""
    num_heads, groups, head_dim = heads
    target = current_target()
    if target.num_cores is None:
        return WorkConfig(
            groups=groups,
            num_kv_heads=num_heads,
            num_sms=DRY_MULTIPROCESSORS,
            decode=DRY_TILE,
            prefill=DRY_TILE,
        )
    choose = hopper_work_config if kernel == "mosaic" else gpu_work_config
    return choose(
        target,
        groups=groups,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        block_size=block_size,
        cache_dtype=jnp.dtype(cache_dtype),
    )


def make(
    sizes: Sizes,
    kernel: str,
    *,
    rows: int,
    new: int,
    context: int,
    block_size: int,
    decode: GpuTile | None = None,
    both_lists: bool = False,
) -> Timed:
    """The batch, its pool filled with waves; decode: instead of the table's tile.

    both_lists: single queries, too, have the list for rows of many queries, as in the engine's programs.

    Raises: ValueError when the pool does not fit into free memory.
    """
    num_heads, groups, head_dim = sizes.heads
    blocks = -(-context // block_size)
    shape = (rows * blocks + 1, num_heads, block_size, head_dim)
    check_memory(2 * int(np.prod(shape)) * jnp.dtype(sizes.dtype).itemsize)
    order = np.random.default_rng(0).permutation(rows * blocks).astype(np.int32) + 1
    work = work_config(kernel, heads=sizes.heads, block_size=block_size, cache_dtype=sizes.dtype)
    if new == 1 and not both_lists:
        work = replace(work, prefill=None)
    if decode is not None:
        work = replace(work, decode=decode)
    batch = plan_attention(
        block_tables=order.reshape(rows, blocks),
        kv_lens=np.full(rows, context, np.int32),
        query_starts=np.arange(rows + 1, dtype=np.int32) * new,
        num_rows=rows,
        num_tokens=rows * new,
        tiles=XLA_TILES,
        work=work,
    )
    return Timed(
        q=waves((rows * new, num_heads, groups, head_dim), sizes.dtype),
        k=waves(shape, sizes.dtype),
        v=waves(shape, sizes.dtype),
        batch=jax.tree.map(jnp.asarray, batch),
        spec=AttentionSpec(scale=head_dim**-0.5, window=None, soft_cap=None),
    )


def check_memory(wanted: int) -> None:
    """Raises: ValueError when the device has less than this many bytes free, with a tenth for everything else."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats and wanted > 0.9 * stats["bytes_limit"] - stats["bytes_in_use"]:
        raise ValueError(f"wanted {wanted / 2**30:.1f} GiB of the device's memory, which does not have it")
