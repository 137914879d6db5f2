"""The semantics of paged attention in plain jnp: gathers everything, holds a full score matrix; for tests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec


def paged_attention_reference(
    q: Float[Array, "T K G H"],
    k_cache: Array,  # [N, K, B, H]
    v_cache: Array,
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> Float[Array, "T K G H"]:
    """Softmax attention of every query over its row's cached keys, in float32. Unowned queries give zeros."""
    num_tokens, block_size = q.shape[0], k_cache.shape[2]
    token = jnp.arange(num_tokens)
    owns = (token[:, None] >= batch.query_starts[None, :-1]) & (token[:, None] < batch.query_starts[None, 1:])
    owned, row = owns.any(1), owns.argmax(1)  # [T], [T]
    position = batch.kv_lens[row] - (batch.query_starts[row + 1] - token)
    tables = batch.block_tables[row]  # [T, P]
    k = _gather(k_cache, extras.k_scale, tables)
    v = _gather(v_cache, extras.v_scale, tables)
    key = jnp.arange(tables.shape[1] * block_size)[None, :]
    scores = jnp.einsum("tkgh,tkch->tkgc", q.astype(jnp.float32), k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if extras.alibi_slopes is not None:
        distance = (key - position[:, None]).astype(jnp.float32)[:, None, None, :]
        scores = scores + extras.alibi_slopes[None, :, :, None] * distance
    seen = (key <= position[:, None]) & owned[:, None]
    if spec.window is not None:
        seen &= key > position[:, None] - spec.window
    seen = seen[:, None, None, :]
    scores = jnp.where(seen, scores, -1e30)
    top = scores.max(-1, keepdims=True)
    if extras.sinks is not None:
        top = jnp.maximum(top, extras.sinks[None, :, :, None])
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if extras.sinks is not None:
        total = total + jnp.exp(extras.sinks[None, :, :, None] - top)
    weights = weights / jnp.maximum(total, 1e-30)
    v = jnp.where(seen.any((1, 2))[:, None, :, None], v, 0.0)  # 0 times what a recycled block holds may be NaN
    return jnp.einsum("tkgc,tkch->tkgh", weights, v).astype(q.dtype)


def _gather(cache: Array, scale: Array | np.ndarray | None, tables: Array) -> Float[Array, "T K C H"]:
    """Each query's keys or values in order of position, in float32, with its scales."""
    blocks = cache[tables].astype(jnp.float32)  # [T, P, K, B, H]
    if scale is not None:
        blocks = blocks * jnp.asarray(scale)[tables][..., None]
    blocks = blocks.transpose(0, 2, 1, 3, 4)
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])
