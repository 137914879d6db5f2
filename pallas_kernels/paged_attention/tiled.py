"""Paged attention in plain XLA: tiles over sequences and queries, inner loops over the blocks really held.

The online softmax of FlashAttention (Dao et al., 2022) over blocks found through the block table (PagedAttention,
Kwon et al., 2023). Loop trip counts are data, so one program per token bucket serves every mix of lengths, and the
work is proportional to the tokens held, not to the table's width.

Masked weights are exactly 0 and write_kv keeps every value in the cache finite, so what a recycled block still holds
beyond a row's length never shows; a key there may be NaN, its score is masked.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec

MASKED = -1e30  # finite: exp(MASKED - MASKED) is 1, never NaN


def paged_attention_tiled(
    q: Float[Array, "T K G H"],
    k_cache: Array,  # [N, K, B, H]
    v_cache: Array,
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> Float[Array, "T K G H"]:
    """Decode rows first, then prefill tiles: a tile writes past its own queries, and what follows overwrites that."""
    num_tokens = q.shape[0]
    pad = batch.tiles.prefill_queries if batch.tile_rows.shape[0] else 0
    scaled = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)
    scaled = jnp.pad(scaled, ((0, pad), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros(scaled.shape, q.dtype)
    if batch.tiles.decode_lanes:
        out = _decode_rows(out, scaled, k_cache, v_cache, batch, spec, extras)
    if pad:
        out = _prefill_tiles(out, scaled, k_cache, v_cache, batch, spec, extras)
    return out[:num_tokens]


def _chunk_blocks(tokens: int, block_size: int, table_width: int) -> int:
    """Blocks per inner iteration: about `tokens` keys, a divisor of the table's width."""
    blocks = max(1, tokens // block_size)
    while table_width % blocks:
        blocks -= 1
    return blocks


def _cap(scores: Array, spec: AttentionSpec) -> Array:
    return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def _start(shape: tuple[int, ...], head_dim: int, sinks: Array | None) -> tuple[Array, Array, Array]:
    """The online softmax before the first key: maximum, total and weighted sum; a sink is a key with a value of 0."""
    top = jnp.full(shape, MASKED) if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32), shape)
    return top, jnp.full(shape, 0.0 if sinks is None else 1.0), jnp.zeros((*shape, head_dim))


def _weigh(scores: Array, mask: Array, top: Array) -> tuple[Array, Array, Array]:
    """The online softmax over the last axis: the new maximum, what earlier sums are multiplied by, and the weights."""
    scores = jnp.where(mask, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
    return new_top, jnp.exp(top - new_top), weights


def _divide(acc: Array, total: Array) -> Array:
    """Weighted sums to means; 0 where nothing was seen."""
    return acc / jnp.maximum(total, 1e-30)[..., None]


def _decode_rows(out, q, k_cache, v_cache, batch, spec, extras):
    """Rows [0, num_decodes), a tile of lanes at a time; lanes of a tile should have similar lengths.

    Row r's query is token r, so the last tile begins early enough that it ends with the rows and with the tokens.
    """
    places = min(q.shape[0], batch.kv_lens.shape[0])
    lanes = min(batch.tiles.decode_lanes, places)
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    slopes = None if extras.alibi_slopes is None else extras.alibi_slopes[:, :, None]  # [K, G, 1]
    chunk = _chunk_blocks(batch.tiles.decode_kv, block_size, batch.block_tables.shape[1])
    span = chunk * block_size

    def tile(i, out):
        row = jnp.minimum(i * lanes, places - lanes)
        lens = lax.dynamic_slice(batch.kv_lens, (row,), (lanes,))
        tables = lax.dynamic_slice(batch.block_tables, (row, 0), (lanes, batch.block_tables.shape[1]))
        query = lax.dynamic_slice_in_dim(q, row, lanes)  # [lanes, K, G, H]
        low = jnp.zeros_like(lens) if spec.window is None else jnp.maximum(lens - spec.window, 0)

        def step(j, carry):
            top, total, acc = carry  # [lanes, K, G], the same, [lanes, K, G, H]
            pages = lax.dynamic_slice(tables, (0, j * chunk), (lanes, chunk))
            key = (j * span + jnp.arange(span))[None]
            seen = (key < lens[:, None]) & (key >= low[:, None])  # [lanes, span]
            k = _gather(k_cache, pages, extras.k_scale, q.dtype)  # [lanes, K, span, H]
            v = _gather(v_cache, pages, extras.v_scale, q.dtype)
            scores = jnp.einsum("lkgh,lksh->lkgs", query, k, preferred_element_type=jnp.float32)
            scores = _cap(scores, spec)
            if slopes is not None:
                scores += slopes[None] * (key - lens[:, None] + 1).astype(jnp.float32)[:, None, None, :]
            new_top, keep, weights = _weigh(scores, seen[:, None, None, :], top)
            part = jnp.einsum("lkgs,lksh->lkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return new_top, total * keep + weights.sum(-1), acc * keep[..., None] + part

        shape = (lanes, num_kv_heads, q.shape[2])
        start = _start(shape, head_dim, None if extras.sinks is None else extras.sinks[None])
        live = jnp.arange(lanes) + row < batch.num_decodes
        first = jnp.where(live, low, jnp.iinfo(jnp.int32).max).min() // span
        last = (jnp.where(live, lens, 0).max() + span - 1) // span
        _, total, acc = lax.fori_loop(first, last, step, start)
        done = _divide(acc, total).astype(out.dtype)
        return lax.dynamic_update_slice_in_dim(out, done, row, 0)

    return lax.fori_loop(0, (batch.num_decodes + lanes - 1) // lanes, tile, out)


def _gather(
    cache: Array, pages: Int[Array, "lanes chunk"], scale: Array | None, dtype: jnp.dtype
) -> Float[Array, "lanes K span H"]:
    """Blocks by id, the tokens of a lane in one piece; those of a cache with scales are multiplied out to dtype.

    The barrier keeps XLA:CPU from fusing the gather into the product, which would then read it repeatedly.
    """
    blocks = cache.at[pages].get(mode="promise_in_bounds")
    if scale is not None:
        factors = scale.at[pages].get(mode="promise_in_bounds")[..., None]
        blocks = (blocks.astype(jnp.float32) * factors).astype(dtype)
    blocks = blocks.transpose(0, 2, 1, 3, 4)
    return lax.optimization_barrier(blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1]))


def _prefill_tiles(out, q, k_cache, v_cache, batch, spec, extras):
    """Tiles of consecutive queries of one sequence, in ascending order."""
    size = batch.tiles.prefill_queries
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    groups = q.shape[2]
    slopes = None if extras.alibi_slopes is None else extras.alibi_slopes[:, None, :, None]  # [K, 1, G, 1]
    chunk = _chunk_blocks(batch.tiles.prefill_kv, block_size, batch.block_tables.shape[1])
    span = chunk * block_size

    def tile(i, out):
        row, start = batch.tile_rows[i], batch.tile_starts[i]
        end, length = batch.query_starts[row + 1], batch.kv_lens[row]
        position = length - (end - start) + jnp.arange(size)  # of each query; those past `end` are garbage
        query = lax.dynamic_slice_in_dim(q, start, size).transpose(1, 0, 2, 3)  # [K, size, G, H]
        query = lax.optimization_barrier(query.reshape(num_kv_heads, size * groups, head_dim))
        pages_of_row = lax.dynamic_slice(batch.block_tables, (row, 0), (1, batch.block_tables.shape[1]))[0]

        def step(j, carry):
            top, total, acc = carry  # [K, size, G], the same, [K, size, G, H]
            pages = lax.dynamic_slice(pages_of_row, (j * chunk,), (chunk,))
            key = j * span + jnp.arange(span)
            seen = key[None, :] <= position[:, None]  # [size, span]
            if spec.window is not None:
                seen &= key[None, :] > position[:, None] - spec.window
            k = _gather(k_cache, pages[None], extras.k_scale, q.dtype)[0]  # [K, span, H]
            v = _gather(v_cache, pages[None], extras.v_scale, q.dtype)[0]
            scores = jnp.einsum("kqh,kch->kqc", query, k, preferred_element_type=jnp.float32)
            scores = scores.reshape(num_kv_heads, size, groups, span)
            scores = _cap(scores, spec)
            if slopes is not None:
                scores += slopes * (key[None, :] - position[:, None]).astype(jnp.float32)[None, :, None, :]
            new_top, keep, weights = _weigh(scores, seen[None, :, None, :], top)
            flat_weights = weights.astype(v.dtype).reshape(num_kv_heads, size * groups, span)
            part = jnp.einsum("kqc,kch->kqh", flat_weights, v, preferred_element_type=jnp.float32)
            acc = acc * keep[..., None] + part.reshape(acc.shape)
            return new_top, total * keep + weights.sum(-1), acc

        shape = (num_kv_heads, size, groups)
        begin = _start(shape, head_dim, None if extras.sinks is None else extras.sinks[:, None])
        low = 0 if spec.window is None else jnp.maximum(position[0] - spec.window + 1, 0) // span
        high = (jnp.minimum(position[-1] + 1, length) + span - 1) // span
        _, total, acc = lax.fori_loop(low, high, step, begin)
        done = _divide(acc, total).astype(out.dtype).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(out, done, start, 0)

    return lax.fori_loop(0, batch.num_tiles, tile, out)
