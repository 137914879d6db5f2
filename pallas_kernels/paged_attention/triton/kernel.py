"""The body of paged attention: one program computes one item of the work list for one KV head.

The M rows of a program's tile are the G query heads of up to M // G consecutive queries, so that a key is read once for
all of them. Keys come in tiles through the block table; the softmax is the online one, in powers of two and float32.

H is cut into powers of two, as tiles must be: 96 = 64 + 32, 80 = 64 + 16. Letters: M rows, S keys of a tile, C columns
of a piece of H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import load, store
from jaxpaged.pallas_kernels.paged_attention.batch import AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.worklist import GpuTile, Item

LOG2E = math.log2(math.e)
# Finite, as inf - inf is NaN. A maximum never falls below FLOOR, so a masked score's weight, 2^(MASKED - FLOOR), is 0.
MASKED = -1e30
FLOOR = -1e29


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """All that is static."""

    spec: AttentionSpec
    tile: GpuTile
    groups: int  # G
    block_size: int  # B
    head_dim: int  # H

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first column, columns) of each piece of H, widest first: 80 gives (0, 64) and (64, 16)."""
        pieces, start = [], 0
        while start < self.head_dim:
            width = 1 << ((self.head_dim - start).bit_length() - 1)
            pieces.append((start, width))
            start += width
        return pieces


def attend(
    q_ref,  # [T, K, G, H]
    k_ref,  # [N, K, B, H]
    v_ref,
    tables_ref,  # [R, P]
    items_ref,  # [W, 8]
    sinks_ref,  # [K, G] or None
    slopes_ref,  # [K, G] or None
    k_scale_ref,  # [N, K, B] or None
    v_scale_ref,
    _,  # the output of the phase before, of which out_ref is the same memory, or None
    out_ref,  # [T, K, G, H]
    # None, or three, all float32: partial sums [max_partials, K, M, H], then tops, which are scores in powers of two,
    # and totals, both [max_partials, K, M].
    *partial_refs,
    config: KernelConfig,
):
    """Program (k, w): item w for KV head k."""
    spec, tile, pieces = config.spec, config.tile, config.pieces
    head, w = pl.program_id(0), pl.program_id(1)
    query_start, query_end = items_ref[w, Item.QUERY_START], items_ref[w, Item.QUERY_END]

    @pl.when(query_start < query_end)
    def _():
        row, first = items_ref[w, Item.ROW], items_ref[w, Item.POSITION]
        m = jnp.arange(tile.query_rows, dtype=jnp.int32)
        token, group, position = query_start + m // config.groups, m % config.groups, first + m // config.groups
        live = token < query_end  # a block has at most M // G queries, so rows beyond their heads are not live
        queries = [
            load(q_ref.at[token[:, None], head, group[:, None], columns], mask=wide(live, columns), other=0.0)
            for columns in _columns(pieces)
        ]
        low, high = items_ref[w, Item.KV_START], items_ref[w, Item.KV_END]
        oldest = jnp.int32(0)  # key that any of the queries sees
        if spec.window is not None:
            oldest = jnp.maximum(first - spec.window + 1, 0)
            low = jnp.maximum(low, oldest // tile.kv * tile.kv)

        def step(j, carry):
            top, total, sums = carry  # [M], [M], pieces [M, C]
            key = j * tile.kv + jnp.arange(tile.kv, dtype=jnp.int32)  # [S]
            inside = key < high
            if spec.window is not None:
                inside &= key >= oldest
            block, slot = _find(tables_ref, row, key, j * tile.kv, inside, config), key % config.block_size
            scores = jnp.zeros((tile.query_rows, tile.kv), jnp.float32)
            for query, columns in zip(queries, _columns(pieces), strict=True):
                k = _load_tile(k_ref, block, head, slot, columns, inside).astype(query.dtype)
                scores += jnp.dot(query, k.T, preferred_element_type=jnp.float32)
            if k_scale_ref is not None:
                scores *= load(k_scale_ref.at[block, head, slot], mask=inside, other=0.0)[None, :]
            scores = _finish(scores, position, key, slopes, spec)
            new_top = jnp.maximum(top, scores.max(axis=1))
            keep = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - new_top[:, None])
            total = total * keep + weights.sum(axis=1)
            if v_scale_ref is not None:
                weights *= load(v_scale_ref.at[block, head, slot], mask=inside, other=0.0)[None, :]
            weights = weights.astype(queries[0].dtype)
            new_sums = []
            for part, columns in zip(sums, _columns(pieces), strict=True):
                v = _load_tile(v_ref, block, head, slot, columns, inside).astype(weights.dtype)
                new_sums.append(part * keep[:, None] + jnp.dot(weights, v, preferred_element_type=jnp.float32))
            return new_top, total, tuple(new_sums)

        slopes = None if slopes_ref is None else _per_head(slopes_ref, head, group) * LOG2E
        top, total = jnp.full(m.shape, FLOOR, jnp.float32), jnp.zeros(m.shape, jnp.float32)
        if sinks_ref is not None:  # a key of its own with a value of 0, seen by the item with the first keys
            holds = items_ref[w, Item.KV_START] == 0
            top = jnp.where(holds, _per_head(sinks_ref, head, group) * LOG2E, top)
            total = jnp.where(holds, 1.0, total)
        sums = tuple(jnp.zeros((tile.query_rows, width), jnp.float32) for _, width in pieces)
        bounds = low // tile.kv, (high + tile.kv - 1) // tile.kv
        top, total, sums = lax.fori_loop(*bounds, step, (top, total, sums))

        def write_output():
            inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
            for part, columns in zip(sums, _columns(pieces), strict=True):
                at = out_ref.at[token[:, None], head, group[:, None], columns]
                store(at, (part * inverse[:, None]).astype(out_ref.dtype), mask=wide(live, columns))

        if not partial_refs:
            write_output()
            return
        partials_ref, tops_ref, totals_ref = partial_refs
        direct = items_ref[w, Item.DIRECT] == 1
        pl.when(direct)(write_output)

        @pl.when(~direct)
        def _():
            place = items_ref[w, Item.PARTIAL]
            for part, columns in zip(sums, _columns(pieces), strict=True):
                store(partials_ref.at[place, head, m[:, None], columns], part, mask=wide(live, columns))
            store(tops_ref.at[place, head, m], top, mask=live)
            store(totals_ref.at[place, head, m], total, mask=live)


def wide(mask, columns):
    """[M] to [M, C]."""
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], columns.shape[1]))


def _columns(pieces):
    """Column indices of each piece, [1, C]."""
    return [(start + jnp.arange(width, dtype=jnp.int32))[None, :] for start, width in pieces]


def _per_head(ref, head, group):
    """The row's query head's number, [M]. Rows that are not live have a head too, so nothing is masked."""
    return load(ref.at[head, group]).astype(jnp.float32)


def _find(tables_ref, row, key, first_key, inside, config):
    """Block ids of the tile's keys, [S]: one read where a tile lies within a block."""
    if config.block_size % config.tile.kv == 0:
        return jnp.broadcast_to(tables_ref[row, first_key // config.block_size], key.shape)
    return load(tables_ref.at[row, key // config.block_size], mask=inside, other=0)


def _load_tile(ref, block, head, slot, columns, inside):
    """[S, C] of the cache, 0 outside the item's keys. `other` has the cache's dtype: fp8 takes no other."""
    at = ref.at[block[:, None], head, slot[:, None], columns]
    return load(at, mask=wide(inside, columns), other=jnp.zeros((), ref.dtype))


def _finish(scores, position, key, slopes, spec):
    """Scale, cap, bias and mask, in powers of two, [M, S]."""
    if spec.soft_cap is None:
        scores = scores * (spec.scale * LOG2E)
    else:
        scores = jnp.tanh(scores * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2E)
    distance = key[None, :] - position[:, None]
    if slopes is not None:
        scores += slopes[:, None] * distance.astype(jnp.float32)
    seen = distance <= 0
    if spec.window is not None:
        seen &= distance > -spec.window
    return jnp.where(seen, scores, MASKED)
