"""The ring of key and value tiles in shared memory: who fills a slot, who reads it, who says it is free again.

A slot holds `kv` keys and as many values. TMA copies fill it, one per block (or per part of a block larger than the
tile); the copies of a slot's keys arrive at one barrier, those of its values at another, so that q·k starts while the
values are under way.

    self-fed (one warpgroup)              with a loader (one or two warpgroups compute)
    keys i ─▶ q·k ─▶ keys i + stages      loader: wait keys_free ─▶ copy keys     wait values_free ─▶ copy values
    values i ─▶ p·v ─▶ values i + stages  others: keys_full ─▶ q·k ─▶ keys_free   values_full ─▶ p·v ─▶ values_free
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import Geometry

Ref = Any  # inside a kernel references are traced and of no public type


class Span(NamedTuple):
    """The tiles of keys that an item reads: row's tiles first … first + steps - 1."""

    row: jax.Array  # of the block tables
    first: jax.Array
    steps: jax.Array


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring's references in one program, for one KV head."""

    sizes: Geometry
    head: jax.Array  # KV head
    tables: Ref  # [R, P]
    k_cache: Ref  # [N, K, B, H], as all that follow in pairs: global memory, shared memory, barriers
    v_cache: Ref
    keys: Ref  # [stages, kv, H]
    values: Ref
    keys_full: Ref  # [stages]
    values_full: Ref
    keys_free: Ref  # None: self-fed
    values_free: Ref

    def slot(self, step: jax.Array) -> jax.Array:
        """The slot of the span's tile number `step`."""
        return lax.rem(step, jnp.int32(self.sizes.stages))

    def blocks(self, span: Span, step: jax.Array) -> tuple[jax.Array, ...]:
        """Block ids of a tile's pieces. Beyond the table's width the last entry serves: those keys are masked."""
        sizes = self.sizes
        entries = [self._entry(span, step, i) for i in range(sizes.pieces)]
        return tuple(self.tables[span.row, jnp.minimum(entry, sizes.table_width - 1)] for entry in entries)

    def _entry(self, span: Span, step: jax.Array, i: int) -> jax.Array:
        sizes = self.sizes
        if sizes.kv >= sizes.block_size:
            return (span.first + step) * sizes.pieces + i
        return lax.div(span.first + step, jnp.int32(sizes.block_size // sizes.kv))

    def _offset(self, span: Span, step: jax.Array) -> jax.Array:
        """Where in its block a tile smaller than a block begins; 0 for the others."""
        parts = max(1, self.sizes.block_size // self.sizes.kv)
        return lax.rem(span.first + step, jnp.int32(parts)) * self.sizes.kv

    def copy_keys(self, span: Span, step: jax.Array, blocks: tuple[jax.Array, ...]) -> None:
        """Begin to fill a tile's slot with its keys."""
        self._copy(self.k_cache, self.keys, self.keys_full, span, step, blocks)

    def copy_values(self, span: Span, step: jax.Array, blocks: tuple[jax.Array, ...]) -> None:
        """Begin to fill a tile's slot with its values."""
        self._copy(self.v_cache, self.values, self.values_full, span, step, blocks)

    def _copy(self, cache, slots, full, span, step, blocks) -> None:
        slot, piece = self.slot(step), self.sizes.piece
        offset = self._offset(span, step)
        for i, block in enumerate(blocks):
            source = cache.at[block, self.head, pl.ds(offset, piece)]
            plgpu.copy_gmem_to_smem(source, slots.at[slot, pl.ds(i * piece, piece)], full.at[slot])

    def begin(self, span: Span) -> tuple[jax.Array, ...]:
        """Self-fed: fill all slots; returns the blocks of the tile after those, for refill()."""
        for step in map(jnp.int32, range(self.sizes.stages)):

            @pl.when(step < span.steps)
            def _fill(step=step):
                blocks = self.blocks(span, step)
                self.copy_keys(span, step, blocks)
                self.copy_values(span, step, blocks)

        return self.blocks(span, jnp.int32(self.sizes.stages))

    def load(self, span: Span) -> None:
        """The loader's whole work: every tile of the span, each as soon as its slot is free.

        A tile's block ids are read one tile ahead, so that their latency is not added to the copy's.
        """

        def step_(step, blocks):
            following = self.blocks(span, step + 1)
            slot, reused = self.slot(step), step >= self.sizes.stages
            pl.when(reused)(lambda: plgpu.barrier_wait(self.keys_free.at[slot]))
            self.copy_keys(span, step, blocks)
            pl.when(reused)(lambda: plgpu.barrier_wait(self.values_free.at[slot]))
            self.copy_values(span, step, blocks)
            return following

        lax.fori_loop(jnp.int32(0), span.steps, step_, self.blocks(span, jnp.int32(0)))
        for back in range(self.sizes.stages, 0, -1):  # no barrier is left with an arrival that nobody has seen

            @pl.when(span.steps >= back)
            def _drain(back=back):
                slot = self.slot(span.steps - back)
                plgpu.barrier_wait(self.keys_free.at[slot])
                plgpu.barrier_wait(self.values_free.at[slot])
