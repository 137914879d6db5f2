"""Writing keys and values into the paged cache, and copying whole blocks (copy-on-write)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@no_type_check  # holds arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class QuantizedKV:
    """One layer's cache in int8 or float8_e4m3fn: what is meant is k · k_scale and v · v_scale."""

    k: Array  # [N, K, B, H]
    v: Array
    k_scale: Float[Array, "N K B"]  # float32
    v_scale: Float[Array, "N K B"]


def write_kv(
    k_cache: Float[Array, "N K B H"],
    v_cache: Float[Array, "N K B H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array | np.ndarray, " T"],
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


def write_kv_quantized(
    caches: QuantizedKV,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array | np.ndarray, " T"],
) -> QuantizedKV:
    """The caches with token t's key and value at its slot, in int8 or float8_e4m3fn, with a scale per token and head.

    Slots are as in write_kv, and so is what becomes of numbers that are not finite: integers know no NaN, so it is the
    key's scale that becomes NaN, and the value is 0.
    """
    broken = ~(jnp.isfinite(v).all(-1) & jnp.isfinite(k).all(-1))  # [T, K]
    keys, k_scale = _quantize(jnp.where(broken[..., None], 0, k), caches.k.dtype)
    values, v_scale = _quantize(jnp.where(broken[..., None], 0, v), caches.v.dtype)
    return QuantizedKV(
        k=_scatter(caches.k, keys, slot_mapping),
        v=_scatter(caches.v, values, slot_mapping),
        k_scale=_scatter(caches.k_scale, jnp.where(broken, jnp.nan, k_scale), slot_mapping),
        v_scale=_scatter(caches.v_scale, v_scale, slot_mapping),
    )


def _quantize(x: Float[Array, "T K H"], dtype: jnp.dtype) -> tuple[Array, Float[Array, "T K"]]:
    """x / scale in dtype, the largest of each head at the end of dtype's range; scale 1 for zeros."""
    integers = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(-1) / largest
    scale = jnp.where(scale > 0, scale, 1.0)
    scaled = jnp.clip(wide / scale[..., None], -largest, largest)
    return (jnp.round(scaled) if integers else scaled).astype(dtype), scale


def _scatter(cache: Array, values: Array, slot_mapping: Array | np.ndarray) -> Array:
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
