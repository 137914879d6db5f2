"""The kernel: one program per work item and KV head.

A program reads its item, brings the item's queries into shared memory, and walks the item's keys with an online
softmax. An item that has all keys of its queries writes the output, one of several writes a partial result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import ROWS, Geometry
from jaxpaged.pallas_kernels.paged_attention.mosaic.products import add_product, multiply, untyped
from jaxpaged.pallas_kernels.paged_attention.mosaic.ring import Ref, Ring, Span
from jaxpaged.pallas_kernels.paged_attention.mosaic.softmax import (
    Rows,
    Running,
    first_state,
    mean,
    row_queries,
    weigh,
)
from jaxpaged.pallas_kernels.paged_attention.worklist import Item

LOADER_REGISTERS = 40  # per thread; what the loader gives back, the others take
COMPUTE_REGISTERS = 232


class Operands(NamedTuple):
    """The kernel's references in global memory."""

    q: Ref  # [T, K, G, H]
    k_cache: Ref  # [N, K, B, H]
    v_cache: Ref
    items: Ref  # [W, 7], see worklist.Item
    tables: Ref  # [R, P]
    kv_lens: Ref  # [R]
    query_starts: Ref  # [R + 1]
    sinks: Ref  # [K, 64] float32, one per row of a tile, times log2(e); None: no sinks
    slopes: Ref  # the same for ALiBi
    out: Ref  # [T, K, G, H], written in place
    acc: Ref  # [W', K, M, H] float32, partial results in place; None: nothing is split
    top: Ref  # [W', K, M]
    total: Ref


class Scratch(NamedTuple):
    """A program's shared memory and barriers."""

    staged: Ref  # [warpgroups, 64, H], rows in order: queries as they come, results as they go
    queries: Ref  # the same, as wgmma reads it
    keys: Ref  # [stages, kv, H]
    values: Ref
    queries_full: Ref  # [warpgroups]
    keys_full: Ref  # [stages]
    values_full: Ref
    keys_free: Ref  # [stages]; None: self-fed
    values_free: Ref


@dataclass(frozen=True, kw_only=True)
class Work:
    """One warpgroup's part of an item, in scalars."""

    item: jax.Array
    head: jax.Array
    start: jax.Array  # first query of the warpgroup, an index into T
    count: jax.Array  # its queries, 0 … queries
    position: jax.Array  # of its first query
    kv_end: jax.Array
    holds_sinks: jax.Array  # whether the item has its queries' first keys, and so counts their sinks
    span: Span


def attention_kernel(operands: tuple, *, sizes: Geometry, spec: AttentionSpec, max_partials: int, interpret) -> None:
    """Run the kernel on Operands' fields (None where absent); out, acc, top and total are written in place."""
    present = [x is not None for x in operands]

    def body(*refs, **scratch):
        given = iter(refs)
        fields = [next(given) if there else None for there in present]
        _program(Operands(*fields), Scratch(**_absent(scratch)), sizes, spec, max_partials, bool(interpret))

    num_items, num_kv_heads = operands[3].shape[0], operands[0].shape[1]
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=_scratch_types(sizes),
        grid=(num_items, num_kv_heads),
        grid_names=("item", "head"),
        num_threads=sizes.threads,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_hopper",
        **({"interpret": interpret} if interpret else {}),
    )(*[x for x in operands if x is not None])


def _absent(scratch: dict) -> dict:
    return {"keys_free": None, "values_free": None} | scratch


def _scratch_types(sizes: Geometry) -> dict:
    wgmma_tiles = (untyped.TilingTransform((8, 64)), untyped.SwizzleTransform(128))
    tile, ring = (sizes.warpgroups, ROWS, sizes.head_dim), (sizes.stages, sizes.kv, sizes.head_dim)
    full = plgpu.Barrier(num_arrivals=sizes.pieces, num_barriers=sizes.stages)
    free = plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.stages)
    types = {
        "staged": plgpu.SMEM(tile, sizes.dtype),
        "queries": plgpu.SMEM(tile, sizes.dtype, transforms=wgmma_tiles),
        "keys": plgpu.SMEM(ring, sizes.dtype, transforms=wgmma_tiles),
        "values": plgpu.SMEM(ring, sizes.dtype, transforms=wgmma_tiles),
        "queries_full": plgpu.Barrier(num_arrivals=sizes.queries, num_barriers=sizes.warpgroups),
        "keys_full": full,
        "values_full": full,
    }
    return types | ({"keys_free": free, "values_free": free} if sizes.loader else {})


def _program(refs: Operands, scratch: Scratch, sizes: Geometry, spec, max_partials: int, interpret: bool) -> None:
    item, head = lax.axis_index("item"), lax.axis_index("head")
    warpgroup = lax.axis_index("warpgroup")
    ring = Ring(
        sizes=sizes,
        head=head,
        tables=refs.tables,
        k_cache=refs.k_cache,
        v_cache=refs.v_cache,
        keys=scratch.keys,
        values=scratch.values,
        keys_full=scratch.keys_full,
        values_full=scratch.values_full,
        keys_free=scratch.keys_free,
        values_free=scratch.values_free,
    )

    @pl.when(refs.items[item, Item.QUERY_START] < refs.items[item, Item.QUERY_END])
    def _busy():
        def compute():
            if sizes.loader:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            work = _work(refs, item, head, warpgroup, sizes, spec)
            state = _attend(refs, scratch, ring, work, warpgroup, spec, interpret)
            _finish(refs, scratch, state, work, warpgroup, sizes, max_partials)

        if not sizes.loader:
            compute()
            return
        pl.when(warpgroup < sizes.warpgroups)(compute)

        @pl.when(warpgroup == sizes.warpgroups)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            ring.load(_work(refs, item, head, jnp.int32(0), sizes, spec).span)


def _work(refs: Operands, item, head, warpgroup, sizes: Geometry, spec: AttentionSpec) -> Work:
    """The item's scalars. A window moves the first key to the first that the item's first query sees."""
    row, query_end = refs.items[item, Item.ROW], refs.items[item, Item.QUERY_END]
    first_query = refs.items[item, Item.QUERY_START]
    kv_start, kv_end = refs.items[item, Item.KV_START], refs.items[item, Item.KV_END]
    start = first_query + warpgroup * sizes.queries
    shift = refs.kv_lens[row] - refs.query_starts[row + 1]  # from a query's index to its position
    low = kv_start
    if spec.window is not None:
        low = jnp.maximum(low, first_query + shift - (spec.window - 1))
    first = lax.div(low, jnp.int32(sizes.kv))
    steps = lax.div(kv_end + (sizes.kv - 1), jnp.int32(sizes.kv)) - first
    return Work(
        item=item,
        head=head,
        start=start,
        count=jnp.clip(query_end - start, 0, sizes.queries),
        position=start + shift,
        kv_end=kv_end,
        holds_sinks=kv_start == 0,
        span=Span(row=row, first=first, steps=jnp.maximum(steps, 0)),
    )


def _attend(refs, scratch, ring: Ring, work: Work, warpgroup, spec: AttentionSpec, interpret: bool) -> Running:
    """The warpgroup's rows against the item's keys."""
    sizes, span = ring.sizes, work.span
    blocks = () if sizes.loader else ring.begin(span)
    _bring_queries(refs, scratch, work, warpgroup, sizes)
    position = work.position + row_queries(sizes.groups)
    slope = None if refs.slopes is None else _row_values(refs.slopes, work.head)
    rows = Rows(position=position, limit=jnp.minimum(position + 1, work.kv_end), slope=slope)
    step = partial(_step, scratch.queries.at[warpgroup], ring, span, rows, spec, interpret)
    sinks = None if refs.sinks is None else _row_values(refs.sinks, work.head)
    carry = (first_state(sizes.head_dim, sinks, work.holds_sinks), blocks)
    unmasked = jnp.int32(0)
    if spec.window is None:  # tiles that the first query sees whole, and so all do
        whole = lax.div(jnp.minimum(work.position + 1, work.kv_end), jnp.int32(sizes.kv)) - span.first
        unmasked = jnp.clip(whole, 0, span.steps)
        carry = lax.fori_loop(jnp.int32(0), unmasked, partial(step, masked=False), carry)
    state, _ = lax.fori_loop(unmasked, span.steps, partial(step, masked=True), carry)
    return state


def _row_values(values: Ref, head: jax.Array) -> jax.Array:
    return plgpu.load(values.at[head], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _bring_queries(refs: Operands, scratch: Scratch, work: Work, warpgroup, sizes: Geometry) -> None:
    """The warpgroup's queries, one after the other, into its rows; rows without a query hold anything.

    TMA cannot both put G rows at any offset and lay them out for wgmma: the second step is done in registers.
    """
    staged, full = scratch.staged.at[warpgroup], scratch.queries_full.at[warpgroup]

    @pl.loop(0, sizes.queries)
    def _query(t):
        def copy():
            source = refs.q.at[work.start + t, work.head]
            plgpu.copy_gmem_to_smem(source, staged.at[pl.ds(t * sizes.groups, sizes.groups)], full)

        lax.cond(t < work.count, copy, lambda: plgpu.barrier_arrive(full))

    plgpu.barrier_wait(full)
    scratch.queries[warpgroup] = plgpu.load(staged, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()


def _step(queries, ring: Ring, span: Span, rows: Rows, spec, interpret: bool, step, carry, *, masked: bool):
    """One tile of keys. Self-fed, each half of the slot is filled again as soon as it has been read."""
    state, blocks = carry
    sizes, slot = ring.sizes, ring.slot(step)
    refill = step + sizes.stages
    plgpu.barrier_wait(ring.keys_full.at[slot])
    products = multiply(queries, ring.keys.at[slot].T, sizes.kv)
    following = ()
    if sizes.loader:
        plgpu.barrier_arrive(ring.keys_free.at[slot])
    else:
        pl.when(refill < span.steps)(lambda: ring.copy_keys(span, refill, blocks))
        following = ring.blocks(span, refill + 1)
    first_key = (span.first + step) * sizes.kv
    weights, state = weigh(products, state, rows, first_key, spec, masked=masked)
    plgpu.barrier_wait(ring.values_full.at[slot])
    state = state._replace(acc=add_product(state.acc, weights.astype(sizes.dtype), ring.values.at[slot], interpret))
    if sizes.loader:
        plgpu.barrier_arrive(ring.values_free.at[slot])
    else:
        pl.when(refill < span.steps)(lambda: ring.copy_values(span, refill, blocks))
    return state, following


def _finish(refs: Operands, scratch, state: Running, work: Work, warpgroup, sizes: Geometry, max_partials: int) -> None:
    """Write the result: the mean of the queries that are there, or the whole state as a partial result."""

    def write_output():
        staged = scratch.staged.at[warpgroup]
        staged[...] = mean(state).astype(sizes.dtype)
        plgpu.commit_smem()

        @pl.loop(0, work.count)
        def _query(t):
            source = staged.at[pl.ds(t * sizes.groups, sizes.groups)]
            plgpu.copy_smem_to_gmem(source, refs.out.at[work.start + t, work.head])

        plgpu.wait_smem_to_gmem(0)

    if not max_partials:
        write_output()
        return
    direct = refs.items[work.item, Item.DIRECT] != 0
    pl.when(direct)(write_output)

    @pl.when(jnp.logical_not(direct))
    def _write_partial():
        index, rows = refs.items[work.item, Item.PARTIAL], pl.ds(warpgroup * ROWS, ROWS)
        refs.acc[index, work.head, rows] = state.acc
        refs.top[index, work.head, rows] = state.top
        refs.total[index, work.head, rows] = state.total
