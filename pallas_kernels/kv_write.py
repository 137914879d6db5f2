"""Writing keys and values into the paged cache, and copying whole blocks (copy-on-write)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_kv(
    k_cache: Float[Array, "N K B H"],
    v_cache: Float[Array, "N K B H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
) -> tuple[Float[Array, "N K B H"], Float[Array, "N K B H"]]:
    """The caches with token t's key and value at slot slot_mapping[t] = block * B + offset.

    Padding tokens carry a slot of block 0, the trash block: nobody reads it, so duplicates there are harmless.
    On a donated cache XLA runs each scatter in place, without a temporary.

    The values in the cache are always finite, so that a weight of 0 times a recycled block's value is 0: where a value
    is not finite, 0 is written in its place and the key becomes NaN. Whoever sees that key then gets NaN, and
    whoever masks it does not.
    """
    broken = ~jnp.isfinite(v).all(-1, keepdims=True)
    k = jnp.where(broken, jnp.nan, k)
    v = jnp.where(broken, 0, v)
    return _scatter(k_cache, k, slot_mapping), _scatter(v_cache, v, slot_mapping)


def _scatter(cache: Array, values: Array, slot_mapping: Array) -> Array:
    block_size = cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    return cache.at[blocks, :, offsets].set(values.astype(cache.dtype), mode="promise_in_bounds")


def copy_blocks(cache: Float[Array, "N K B H"], copies: Int[Array, "C 2"]) -> Float[Array, "N K B H"]:
    """The cache with block copies[i, 1] equal to block copies[i, 0]. Padding pairs are (0, 0).

    Targets are distinct and no target is a source: copy-on-write takes its targets from the free blocks.
    """
    sources, targets = copies[:, 0], copies[:, 1]
    moved = jax.lax.optimization_barrier(cache.at[sources].get(mode="promise_in_bounds"))
    return cache.at[targets].set(moved, mode="promise_in_bounds")
