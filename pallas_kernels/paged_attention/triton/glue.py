"""From the op's arguments to kernel launches: each phase's items, then its merges, into one output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.lowering import launch
from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.triton.kernel import KernelConfig, attend
from jaxpaged.pallas_kernels.paged_attention.triton.merge import merge
from jaxpaged.pallas_kernels.paged_attention.worklist import WorkList

MERGE_WARPS = 1


def paged_attention_triton(
    q: Float[Array, "T K G H"],
    k_cache: Array,  # [N, K, B, H]
    v_cache: Array,
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
    *,
    interpret: bool,
) -> Float[Array, "T K G H"]:
    """The op by the batch's work lists; every token, padding included, belongs to an item of one of them."""
    assert batch.work is not None, "limits.obstacle refuses this"
    out = None
    for work in (batch.work.decode, batch.work.prefill):
        if work is not None:
            out = _phase(out, q, k_cache, v_cache, batch, spec, extras, work, interpret)
    assert out is not None
    return out


def _phase(
    out: Array | None,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
    work: WorkList,
    interpret: bool,
) -> Array:
    """The output with the tokens of one list filled in."""
    num_heads, groups, head_dim = q.shape[1:]
    tile, width = work.tile, work.max_partials
    config = KernelConfig(spec=spec, tile=tile, groups=groups, block_size=k_cache.shape[2], head_dim=head_dim)
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if width:
        rows = (width, num_heads, tile.query_rows)
        outputs += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*rows, head_dim), rows, rows)]
    options = (extras.sinks, extras.alibi_slopes, extras.k_scale, extras.v_scale)
    args = (q, k_cache, v_cache, batch.block_tables, work.items, *options)
    out, *partials = launch(
        partial(attend, config=config),
        *args,
        out,
        name="paged_attention",
        grid=(num_heads, work.items.shape[0]),
        outputs=outputs,
        aliases={} if out is None else {sum(arg is not None for arg in args): 0},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )
    return merge_splits(out, partials, work, interpret=interpret) if width else out


def merge_splits(
    out: Float[Array, "T K G H"], partials: Sequence[Array], work: WorkList, *, interpret: bool
) -> Float[Array, "T K G H"]:
    """out with the queries of the list's split blocks, from what their items left.

    partials: weighted sums [max_partials, K, M, H], maxima in powers of two and sums of weights [max_partials, K, M],
    all float32; row t·G + g of a block is head g of its query t.
    """
    num_heads, groups, head_dim = out.shape[1:]
    (merged,) = launch(
        partial(merge, groups=groups, head_dim=head_dim),
        work.merges,
        *partials,
        out,
        name="paged_attention_merge",
        grid=(work.tile.query_rows, num_heads, work.merges.shape[0]),
        outputs=[jax.ShapeDtypeStruct(out.shape, out.dtype)],
        aliases={4: 0},
        num_warps=MERGE_WARPS,
        num_stages=2,
        interpret=interpret,
    )
    return merged
