"""Decode attention of others on the same device: XLA with gathered pages, and cuDNN's paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu_check import attention
from scripts.gpu_check.context import Context, timed, waves
from scripts.gpu_check.decode import time_decode


def run(context: Context) -> None:
    for rows, length in context.sizes.decode:
        for block_size in context.sizes.decode_blocks:
            for name, measure in (("XLA gather", _gather), ("cuDNN paged", _cudnn)):
                facts = {"kernel": name, "rows": rows, "context": length, "block": block_size}
                context.case(facts, partial(measure, context, rows, length, block_size), seconds=6.0)


def _gather(context: Context, rows: int, length: int, block_size: int) -> dict[str, Any]:
    """The pages of every row side by side in memory, then dense attention over them."""
    case = attention.make(context.sizes, "triton", rows=rows, new=1, context=length, block_size=block_size)
    attention.check_memory(2 * case.kv_bytes)
    return time_decode(context, _Gathered(case), "gather")


class _Gathered:
    """A timed batch whose step gathers."""

    def __init__(self, case: attention.Timed) -> None:
        self.q, self.constants, self.kv_bytes = case.q, case.constants, case.kv_bytes
        self._scale = case.spec.scale

    def step(self, implementation: str, *, interpret: bool) -> Callable[..., jax.Array]:
        del implementation, interpret
        return partial(gathered_decode, scale=self._scale)


def gathered_decode(q: jax.Array, k: jax.Array, v: jax.Array, batch: Any, *, scale: float) -> jax.Array:
    """[R, K, G, H] of rows that are all as long as the table is wide."""
    pages = batch.block_tables
    keys, values = (
        cache[pages].transpose(0, 2, 1, 3, 4).reshape(q.shape[0], cache.shape[1], -1, cache.shape[3])
        for cache in (k, v)
    )
    scores = jnp.einsum("rkgh,rksh->rkgs", q, keys, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("rkgs,rksh->rkgh", weights, values)


def _cudnn(context: Context, rows: int, length: int, block_size: int) -> dict[str, Any]:
    """A private interface of JAX, with pages as [B, K, H]. Raises: NotImplementedError where it is not there."""
    if jax.devices()[0].platform != "gpu":
        raise NotImplementedError("cuDNN needs an NVIDIA GPU")
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn
    except ImportError as error:
        raise NotImplementedError(f"this JAX has no cuDNN attention where it was: {error}") from error
    num_heads, groups, head_dim = context.sizes.heads
    blocks = length // block_size
    shape = (rows * blocks, block_size, num_heads, head_dim)
    dtype = jnp.dtype(context.sizes.dtype)
    kv_bytes = 2 * rows * length * num_heads * head_dim * dtype.itemsize
    attention.check_memory(kv_bytes)
    q = waves((rows, 1, num_heads * groups, head_dim), dtype)
    tables = jnp.arange(rows * blocks, dtype=jnp.int32).reshape(rows, 1, blocks, 1)
    lengths = jnp.full(rows, length, jnp.int32), jnp.ones(rows, jnp.int32)

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return cudnn.paged_attention(
            q, k, v, lengths[1], lengths[0], tables, tables, scale=head_dim**-0.5, mask_type=cudnn.MaskType.PADDING
        )

    repeats, rounds = context.sizes.repeats, context.sizes.rounds
    seconds = timed(step, q, waves(shape, dtype), waves(shape, dtype), repeats=repeats, rounds=rounds)
    rate = kv_bytes / seconds
    return {
        "microseconds": seconds * 1e6,
        "gb_per_second": rate / 1e9,
        "share_of_copy": context.share("copy_bytes_per_second", rate),
    }
