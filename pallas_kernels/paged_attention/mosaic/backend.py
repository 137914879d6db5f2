"""paged_attention through the Hopper kernel: a launch per work list, then the merge of what was split."""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import ROWS, geometry
from jaxpaged.pallas_kernels.paged_attention.mosaic.kernel import attention_kernel
from jaxpaged.pallas_kernels.paged_attention.mosaic.softmax import LOG2E
from jaxpaged.pallas_kernels.paged_attention.worklist import Merge, WorkList


def paged_attention_mosaic(
    q: Float[Array, "T K G H"],
    k_cache: Float[Array, "N K B H"],
    v_cache: Float[Array, "N K B H"],
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
    *,
    interpret: bool | plgpu.InterpretGPUParams,
) -> Float[Array, "T K G H"]:
    """Decode rows, then the others, each over its own list; both write into one output, which they cover whole.

    Whole blocks are copied and a masked weight is 0, so the values of every block that a table names must be finite,
    also beyond a row's length: the pool begins as zeros and write_kv keeps it so. Keys there may be anything.
    """
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k_cache))
    q_shape, cache_shape = shapes
    call = AttentionCall(
        q=q_shape, cache=cache_shape, batch=batch, spec=spec, extras=extras, interpret=bool(interpret)
    )
    out = jax.new_ref(jax.lax.empty(q.shape, q.dtype))
    shared = (batch.block_tables, batch.kv_lens, batch.query_starts, *_per_row(extras, q.shape[2]))
    for work in (batch.work.decode, batch.work.prefill):
        if work is not None:
            _run(q, k_cache, v_cache, shared, out, work, call, interpret)
    return jax.freeze(out)


def _per_row(extras: AttentionExtras, groups: int) -> tuple[Array | None, Array | None]:
    """Sinks and ALiBi slopes [K, 64]: a value for each row of a tile, in units of log2."""
    repeats = -(-ROWS // groups)

    def expand(values):
        return None if values is None else jnp.tile(values.astype(jnp.float32) * LOG2E, (1, repeats))[:, :ROWS]

    return expand(extras.sinks), expand(extras.alibi_slopes)


def _run(q, k_cache, v_cache, shared, out, work: WorkList, call: AttentionCall, interpret) -> None:
    """One list's items, and the merge of its split blocks into out."""
    if interpret and not isinstance(interpret, plgpu.InterpretGPUParams):
        interpret = plgpu.InterpretGPUParams()
    partials = _partial_buffers(work, q)
    operands = (q, k_cache, v_cache, work.items, *shared, out, *partials)
    attention_kernel(
        operands, sizes=geometry(call, work.tile), spec=call.spec, max_partials=work.max_partials, interpret=interpret
    )
    if work.max_partials:
        acc, top, total = (jax.freeze(x) for x in partials)
        out[...] = _merge(out[...], acc, top, total, work, shared[3])


def _partial_buffers(work: WorkList, q: Array) -> tuple:
    if not work.max_partials:
        return None, None, None
    shape = (work.max_partials, q.shape[1], work.tile.query_rows)
    return tuple(
        jax.new_ref(jax.lax.empty(s, jnp.float32)) for s in ((*shape, q.shape[3]), shape, shape)
    )


def _merge(out: Array, acc: Array, top: Array, total: Array, work: WorkList, sinks: Array | None) -> Array:
    """out with the split blocks' queries: provisional."""
    num_tokens, num_kv_heads, groups, head_dim = out.shape
    first, count = work.merges[:, Merge.FIRST, None], work.merges[:, Merge.COUNT, None]
    index = jnp.arange(acc.shape[0])[None]
    mine = (index >= first) & (index < first + count)  # [X, W']
    tops = jnp.where(mine[:, :, None, None], top[None], -1e30)
    most = tops.max(1)  # [X, K, M]
    weights = jnp.where(mine[:, :, None, None], jnp.exp2(tops - most[:, None]), 0.0)
    totals = jnp.where(mine[:, :, None, None], weights * total[None], 0.0).sum(1)
    held = jnp.where(mine.any(0)[:, None, None, None], acc, 0.0)
    sums = jnp.einsum("xwkm,wkmh->xkmh", weights, held)
    result = sums / jnp.maximum(totals, 1e-30)[..., None]
    queries = work.tile.query_rows // groups
    tokens = work.merges[:, Merge.QUERY_START, None] + jnp.arange(queries)[None]
    tokens = jnp.where(tokens < work.merges[:, Merge.QUERY_END, None], tokens, num_tokens)
    rows = result[:, :, : queries * groups].reshape(len(work.merges), num_kv_heads, queries, groups, head_dim)
    return out.at[tokens].set(rows.transpose(0, 2, 1, 3, 4).astype(out.dtype), mode="drop")
