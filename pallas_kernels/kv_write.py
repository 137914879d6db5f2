"""Writing keys and values into the paged cache, and copying whole blocks (copy-on-write)."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def write_kv(
    cache: Float[Array, "P K B H"], values: Float[Array, "T K H"], slot_mapping: Int[Array, " T"]
) -> Float[Array, "P K B H"]:
    """The cache with values[t] at slot slot_mapping[t] = block * B + offset.

    Padding tokens carry a slot of block 0, the trash block: nobody reads it, so duplicates there are harmless.
    On a donated cache XLA runs this scatter in place, without a temporary.
    """
    block_size = cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    return cache.at[blocks, :, offsets].set(values.astype(cache.dtype), mode="promise_in_bounds")


def copy_blocks(cache: Float[Array, "P K B H"], copies: Int[Array, "C 2"]) -> Float[Array, "P K B H"]:
    """The cache with block copies[i, 1] equal to block copies[i, 0]. Padding pairs are (0, 0).

    Targets are distinct and no target is a source: copy-on-write takes its targets from the free blocks.
    """
    sources, targets = copies[:, 0], copies[:, 1]
    moved = jax.lax.optimization_barrier(cache.at[sources].get(mode="promise_in_bounds"))
    return cache.at[targets].set(moved, mode="promise_in_bounds")
