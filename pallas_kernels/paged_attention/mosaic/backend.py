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
from jaxpaged.pallas_kernels.paged_attention.triton.glue import merge_splits
from jaxpaged.pallas_kernels.paged_attention.worklist import WorkList


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
    assert batch.work is not None, "mosaic_obstacle refuses this"
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k_cache)]
    call = AttentionCall(q=shapes[0], cache=shapes[1], batch=batch, spec=spec, extras=extras, interpret=bool(interpret))
    arrays = (q, k_cache, v_cache)
    rows = (batch.block_tables, batch.kv_lens, batch.query_starts, *_per_row(extras, q.shape[2]))
    out = jax.lax.empty(q.shape, q.dtype)
    for work in (batch.work.decode, batch.work.prefill):
        if work is not None:
            out = _phase(out, arrays, rows, work, call, interpret)
    return out


def _per_row(extras: AttentionExtras, groups: int) -> tuple[Array | None, Array | None]:
    """Sinks and ALiBi slopes [K, 64]: a value for each row of a tile, in units of log2."""
    repeats = -(-ROWS // groups)

    def expand(values):
        return None if values is None else jnp.tile(values.astype(jnp.float32) * LOG2E, (1, repeats))[:, :ROWS]

    return expand(extras.sinks), expand(extras.alibi_slopes)


def _phase(out: Array, arrays: tuple, rows: tuple, work: WorkList, call: AttentionCall, interpret) -> Array:
    """out with one list's queries: its items, then the merge of its split blocks."""
    simulator = interpret if isinstance(interpret, plgpu.InterpretGPUParams) else None
    if interpret and simulator is None:
        simulator = plgpu.InterpretGPUParams()
    target, partials = jax.new_ref(out), _partial_buffers(work, out)
    attention_kernel(
        (*arrays, work.items, *rows, target, *partials),
        sizes=geometry(call, work.tile),
        spec=call.spec,
        max_partials=work.max_partials,
        interpret=simulator,
    )
    out = jax.freeze(target)
    if not work.max_partials:
        return out
    return merge_splits(out, [jax.freeze(x) for x in partials], work, interpret=bool(interpret))


def _partial_buffers(work: WorkList, out: Array) -> tuple:
    """Weighted sums, maxima and sums of weights of the split blocks' items; None each where nothing is ever split."""
    if not work.max_partials:
        return None, None, None
    shape = (work.max_partials, out.shape[1], work.tile.query_rows)
    return tuple(jax.new_ref(jax.lax.empty(s, jnp.float32)) for s in ((*shape, out.shape[3]), shape, shape))
