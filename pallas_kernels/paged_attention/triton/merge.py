"""Merging the partial results of split query blocks into the output, in a fixed order."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import load, store
from jaxpaged.pallas_kernels.paged_attention.triton.kernel import FLOOR
from jaxpaged.pallas_kernels.paged_attention.worklist import Merge

TOGETHER = 8  # partial results read at a time


def merge(
    merges_ref,  # [X, 4]
    partials_ref,  # [max_partials, K, M, H] float32
    tops_ref,  # [max_partials, K, M] float32, scores in powers of two
    totals_ref,
    _,  # the output of attend, of which out_ref is the same memory
    out_ref,  # [T, K, G, H]
    *,
    groups: int,
    head_dim: int,
):
    """Program (m, k, x): row m of split block x for KV head k. Each sum is scaled to the highest of all maxima."""
    m, head, x = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    token = merges_ref[x, Merge.QUERY_START] + m // groups

    @pl.when(token < merges_ref[x, Merge.QUERY_END])
    def _():
        first, count = merges_ref[x, Merge.FIRST], merges_ref[x, Merge.COUNT]
        width = pl.next_power_of_2(head_dim)
        column = jnp.arange(width, dtype=jnp.int32)
        real = column < head_dim

        def step(i, carry):
            top, total, sums = carry
            index = i * TOGETHER + jnp.arange(TOGETHER, dtype=jnp.int32)
            there = index < count
            tops = load(tops_ref.at[first + index, head, m], mask=there, other=FLOOR)
            new_top = jnp.maximum(top, tops.max())
            keep = jnp.exp2(top - new_top)
            factors = jnp.where(there, jnp.exp2(tops - new_top), 0.0)
            totals = load(totals_ref.at[first + index, head, m], mask=there, other=0.0)
            parts = load(
                partials_ref.at[(first + index)[:, None], head, m, column[None, :]],
                mask=there[:, None] & real[None, :],
                other=0.0,
            )
            sums = sums * keep + (parts * factors[:, None]).sum(axis=0)
            return new_top, total * keep + (totals * factors).sum(), sums

        begin = (jnp.float32(FLOOR), jnp.float32(0.0), jnp.zeros((width,), jnp.float32))
        _, total, sums = lax.fori_loop(0, (count + TOGETHER - 1) // TOGETHER, step, begin)
        out = sums / jnp.where(total == 0.0, 1.0, total)
        store(out_ref.at[token, head, m % groups, column], out.astype(out_ref.dtype), mask=real)
