"""The semantics of paged attention in plain jnp: gathers everything, holds a full score matrix; for tests."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionSpec


def paged_attention_reference(
    q: Float[Array, "T K G H"],
    k_cache: Float[Array, "N K B H"],
    v_cache: Float[Array, "N K B H"],
    batch: AttentionBatch,
    spec: AttentionSpec,
) -> Float[Array, "T K G H"]:
    """Softmax attention of every query over its row's cached keys, in float32. Unowned queries give zeros."""
    num_tokens, block_size = q.shape[0], k_cache.shape[2]
    token = jnp.arange(num_tokens)
    owns = (token[:, None] >= batch.query_starts[None, :-1]) & (token[:, None] < batch.query_starts[None, 1:])
    owned, row = owns.any(1), owns.argmax(1)  # [T], [T]
    position = batch.kv_lens[row] - (batch.query_starts[row + 1] - token)
    tables = batch.block_tables[row]  # [T, P]
    width = tables.shape[1] * block_size
    k = k_cache[tables].transpose(0, 2, 1, 3, 4).reshape(num_tokens, k_cache.shape[1], width, -1)
    v = v_cache[tables].transpose(0, 2, 1, 3, 4).reshape(num_tokens, v_cache.shape[1], width, -1)
    scores = jnp.einsum("tkgh,tkch->tkgc", q.astype(jnp.float32), k.astype(jnp.float32)) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    key = jnp.arange(width)[None, :]
    seen = (key <= position[:, None]) & owned[:, None]
    if spec.window is not None:
        seen &= key > position[:, None] - spec.window
    seen = seen[:, None, None, :]
    scores = jnp.where(seen, scores, -1e30)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("tkgc,tkch->tkgh", weights, v.astype(jnp.float32)).astype(q.dtype)
