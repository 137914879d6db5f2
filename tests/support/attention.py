"""Random ragged batches for paged attention, poisoned wherever no implementation may look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels import (
    AttentionBatch,
    AttentionExtras,
    AttentionSpec,
    GpuTile,
    TileConfig,
    WorkConfig,
    paged_attention,
    plan_attention,
)

POISON = 100.0  # far above the values, small enough for scaled float16
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch: each row has counts[r] queries, the last of its lens[r] tokens."""

    counts: Sequence[int]
    lens: Sequence[int]
    kv_heads: int = 2
    groups: int = 4
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: dtype
    padding: int = 3  # tokens after the last row's
    padding_rows: int = 2
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    poison_values: bool = True  # where nothing was written values are NaN; else POISON, as write_kv leaves no NaN
    seed: int = 0
    decode: GpuTile = field(default_factory=lambda: gpu_tile())
    prefill: GpuTile | None = field(default_factory=lambda: gpu_tile(query_rows=32))
    num_sms: int = 4
    tiles: TileConfig = field(
        default_factory=lambda: TileConfig(decode_lanes=4, decode_kv=16, prefill_queries=16, prefill_kv=32)
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arrays of a Shape. num_live: tokens whose output means something."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    batch: AttentionBatch
    spec: AttentionSpec
    extras: AttentionExtras
    num_live: int


def gpu_tile(*, query_rows: int = 16, kv: int = 32, occupancy: int = 1) -> GpuTile:
    return GpuTile(query_rows=query_rows, kv=kv, num_warps=4, num_stages=2, occupancy=occupancy)


def suited(shape: Shape, implementation: str) -> Shape:
    """The shape as the implementation wants it.

    "numba" computes in float32 alone; "tiled" takes rows of one query first, and finite values.
    """
    if implementation == "numba":
        return replace(shape, dtype="float32", cache_dtype=None)
    if implementation != "tiled":
        return shape
    rows = sorted(zip(shape.counts, shape.lens, strict=True), key=lambda row: row[0] != 1)
    counts, lens = zip(*rows, strict=True)
    return replace(shape, counts=counts, lens=lens, poison_values=False)


def make_case(shape: Shape) -> Case:
    """Physical blocks in random order; the trash block, unused blocks and slots, padding queries are NaN."""
    rng = np.random.default_rng(shape.seed)
    needed = [-(-n // shape.block_size) for n in shape.lens]
    ids = rng.permutation(np.arange(1, sum(needed) + 4)).astype(np.int32)
    rows = len(shape.counts) + shape.padding_rows
    tables = np.full((rows, max(needed) + 1), ids[-1], np.int32)  # a block that nobody owns
    for row, end in enumerate(np.cumsum(needed)):
        tables[row, : needed[row]] = ids[end - needed[row] : end]
    starts = np.concatenate([[0], np.cumsum(shape.counts), np.full(shape.padding_rows, sum(shape.counts))])
    kv_lens = np.array([*shape.lens, *[0] * shape.padding_rows], np.int32)
    written = np.zeros((len(ids) + 1, shape.block_size), np.bool_)
    for row, length in enumerate(shape.lens):
        position = np.arange(length)
        written[tables[row, position // shape.block_size], position % shape.block_size] = True
    k, k_scale = _cache(rng, shape, written, np.nan)
    v, v_scale = _cache(rng, shape, written, np.nan if shape.poison_values else POISON)
    live = int(starts[-1])
    q = rng.standard_normal((live + shape.padding, shape.kv_heads, shape.groups, shape.head_dim), np.float32)
    q[live:] = np.nan
    heads = (shape.kv_heads, shape.groups)
    batch = plan_attention(
        block_tables=tables,
        kv_lens=kv_lens,
        query_starts=starts.astype(np.int32),
        num_rows=len(shape.counts),
        num_tokens=len(q),
        tiles=shape.tiles,
        work=work_config(shape),
    )
    extras = AttentionExtras(
        sinks=jnp.asarray(rng.standard_normal(heads, np.float32)) if shape.sinks else None,
        alibi_slopes=jnp.asarray(rng.uniform(0.01, 0.5, heads).astype(np.float32)) if shape.alibi else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return Case(
        q=jnp.asarray(q, shape.dtype),
        k=k,
        v=v,
        batch=jax.tree.map(jnp.asarray, batch),
        spec=AttentionSpec(scale=shape.head_dim**-0.5, window=shape.window, soft_cap=shape.soft_cap),
        extras=extras,
        num_live=live,
    )


def work_config(shape: Shape) -> WorkConfig:
    return WorkConfig(
        groups=shape.groups,
        num_kv_heads=shape.kv_heads,
        num_sms=shape.num_sms,
        decode=shape.decode,
        prefill=shape.prefill,
    )


def _cache(
    rng: np.random.Generator, shape: Shape, written: np.ndarray, poison: float
) -> tuple[jax.Array, jax.Array | None]:
    """[N, K, B, H] and its scales [N, K, B], if it has any; poison where nothing was written."""
    blocks, block_size = written.shape
    values = rng.standard_normal((blocks, shape.kv_heads, block_size, shape.head_dim), np.float32)
    there = np.broadcast_to(written[:, None, :], values.shape[:3])
    largest = LARGEST.get(shape.cache_dtype or "")
    if largest is None:
        return jnp.asarray(np.where(there[..., None], values, poison), shape.dtype), None
    scale = np.abs(values).max(-1) / largest
    stored = values / scale[..., None]
    if shape.cache_dtype == "int8":
        stored = np.where(there[..., None], np.round(stored), 127)
    else:
        stored = np.where(there[..., None], stored, poison if np.isnan(poison) else largest)
    return jnp.asarray(stored).astype(shape.cache_dtype), jnp.asarray(np.where(there, scale, poison))


def run(case: Case, implementation: str) -> np.ndarray:
    """The live tokens' output in float32; GPU kernels in the interpreter."""
    call = partial(paged_attention, spec=case.spec, implementation=implementation, interpret=implementation == "triton")
    out: Any = jax.jit(call)(case.q, case.k, case.v, case.batch, extras=case.extras)
    return np.asarray(out, np.float32)[: case.num_live]


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference in shares of the largest wanted value. NaN counts as infinite."""
    difference = float(np.abs(got - want).max() / np.abs(want).max())
    return difference if np.isfinite(difference) else float("inf")
