"""The vocabulary in blocks: their maxima, the blocks that hold what may be picked, and batches a few rows at a time.

Letters: S sampled rows, C rows of one pass, V vocabulary, G blocks per row, M blocks chosen, E banned ids per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxpaged.sampling_filters import gumbel, noise_words

BLOCK = 32  # entries per block of the vocabulary


@dataclass(frozen=True, kw_only=True)
class LogitRows:
    """Logits [S, V], V a multiple of BLOCK, changed where they are read: so they need not be written anywhere."""

    raw: jax.Array  # f32[S, V]
    changed: jax.Array  # bool[S]: others are raw
    masses: jax.Array  # f32[S]: sampling_filters.mass of the row, nothing being banned; 0: not known
    whole: Callable[[jax.Array], jax.Array]  # changed rows: (rows int32[C]) -> f32[C, V]
    blocks: Callable[[jax.Array, jax.Array], jax.Array]  # all: (rows int32[C], blocks int32[C, M]) -> f32[C, M, BLOCK]

    def allowed(self, rows: jax.Array, banned: jax.Array) -> jax.Array:
        """Whole rows, f32[C, V], in which what must not be picked is -inf. banned int32[C, E]; V or more: no id."""
        row = jnp.arange(rows.shape[0])[:, None]
        # Both branches compute something: XLA copies what a branch only passes on.
        return lax.cond(
            jnp.any(self.changed[rows]) | jnp.any(banned < self.raw.shape[1]),
            lambda: finite(self.whole(rows)).at[row, banned].set(-jnp.inf, mode="drop"),
            lambda: finite(self.raw[rows]),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The blocks of each row with the greatest keys."""

    values: jax.Array  # f32[C, N]; -inf: must not be picked
    ids: jax.Array  # int32[C, N], their vocabulary ids, ascending
    bound: jax.Array  # f32[C]: the greatest key of a block left out; -inf: none with anything to pick is left out


def rows_of(logits: Float[Array, "S V"]) -> LogitRows:
    """Logits as they are."""
    unchanged = jnp.full(logits.shape[:1], False)
    return LogitRows(
        raw=logits,
        changed=unchanged,
        masses=jnp.zeros(logits.shape[0]),
        whole=lambda rows: logits[rows],
        blocks=lambda rows, wanted: blocks_of(logits, rows, wanted),
    )


def blocks_of(logits: Float[Array, "S V"], rows: Int[Array, " C"], wanted: Int[Array, "C M"]) -> Float[Array, "C M 32"]:
    """Some blocks of some rows."""
    return logits.reshape(logits.shape[0], -1, BLOCK).at[rows[:, None], wanted].get(mode="promise_in_bounds")


def finite(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """What is infinite or no number counts as the least."""
    return jnp.where(values < jnp.inf, values, -jnp.inf)


def block_maxima(logits: Float[Array, "S V"]) -> Float[Array, "S G"]:
    """Greatest finite logit of each block of the vocabulary, -inf where there is none; V: a multiple of BLOCK."""

    def greater(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.where((right > left) & (right < jnp.inf), right, left)

    # Filtering first and then jnp.max takes XLA:CPU four times as long.
    return lax.reduce(logits.reshape(logits.shape[0], -1, BLOCK), np.float32(-np.inf), greater, (2,))


def take_blocks(
    logits: LogitRows, rows: Int[Array, " C"], wanted: Int[Array, "C M"], banned: Int[Array, "C E"] | None
) -> tuple[Float[Array, "C N"], Int[Array, "C N"]]:
    """The entries of the given blocks and their ids; banned and non-finite ones are -inf. N = M * BLOCK."""
    values = finite(logits.blocks(rows, wanted).reshape(rows.shape[0], -1))
    offsets = lax.broadcasted_iota(jnp.int32, (1, 1, BLOCK), 2)
    ids = (wanted[:, :, None] * BLOCK + offsets).reshape(rows.shape[0], -1)
    if banned is not None:
        values = jnp.where(jnp.any(ids[:, :, None] == banned[:, None, :], 2), -jnp.inf, values)
    return values, ids


def ban(maxima: Float[Array, "S G"], logits: LogitRows, banned: Int[Array, "S E"]) -> Float[Array, "S G"]:
    """The block maxima as they are without the banned ids."""
    size, groups = maxima.shape
    width = banned.shape[1]
    wanted = jnp.minimum(banned // BLOCK, groups - 1)
    values, _ = take_blocks(logits, jnp.arange(size), wanted, banned)
    row = lax.broadcasted_iota(jnp.int32, (size, width), 0)
    return maxima.at[row, wanted].set(jnp.max(values.reshape(size, width, BLOCK), 2), mode="promise_in_bounds")


def candidates(
    logits: LogitRows,
    rows: Int[Array, " C"],
    keys: Float[Array, "C G"],
    banned: Int[Array, "C E"] | None,
    num_blocks: int,
) -> Candidates:
    """The num_blocks blocks with the greatest keys (the first ones, when keys are equal).

    With the block maxima as keys, every entry above the bound is a candidate.
    """
    groups = keys.shape[1]
    if num_blocks >= groups:
        wanted = jnp.broadcast_to(jnp.arange(groups, dtype=jnp.int32), keys.shape)
        bound = jnp.full(keys.shape[:1], -jnp.inf)
    else:
        # Without barriers XLA:CPU makes the slices part of the top-k, which it then does by sorting: 9 times slower.
        # Around both at once jaxlib 0.11.2 aborts while compiling for several devices.
        top, wanted = (lax.optimization_barrier(part) for part in lax.top_k(keys, num_blocks + 1))
        bound, wanted = top[:, -1], lax.sort(wanted[:, :-1])
    values, ids = take_blocks(logits, rows, wanted, banned)
    return Candidates(values=values, ids=ids, bound=bound)


def best_noise(key: UInt32[Array, "C 2"], groups: int) -> Float[Array, "C G"]:
    """The greatest noise of each block of the vocabulary."""
    ids = lax.broadcasted_iota(jnp.int32, (key.shape[0], groups * BLOCK), 1)
    # gumbel() goes on in f32 in any case, and XLA:CPU finds the least of floats several times as fast as of integers.
    words = noise_words(key, ids).astype(jnp.float32)
    return gumbel(jnp.min(words.reshape(-1, groups, BLOCK), 2))


def for_rows[Result](
    compute: Callable[[jax.Array], Result], active: Bool[Array, " S"], otherwise: Result, rows_per_pass: int
) -> Result:
    """compute(rows int32[C]) -> [C, ...] for the active rows, rows_per_pass at a time; `otherwise` [S, ...] elsewhere.

    On the CPU a few vocabulary-wide rows stay in the cache from one operation to the next; the whole batch would
    go through memory, into freshly mapped pages, each time.
    """
    size = active.shape[0]
    width = min(rows_per_pass, size)
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    place = jnp.sum((active[None, :] & (column < row)).astype(jnp.int32), 1)  # of an active row among the active
    order = jnp.sum(jnp.where(active[None, :] & (place[None, :] == row), column, 0), 1)
    count = jnp.sum(active.astype(jnp.int32))

    def step(index: jax.Array, result: Result) -> Result:
        # The slice is clamped: the last pass may repeat rows or, beyond the active ones, compute row 0 unused.
        rows = lax.dynamic_slice(order, (index * width,), (width,))

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            use = jnp.expand_dims(active[rows], range(1, old.ndim))
            return old.at[rows].set(jnp.where(use, new, old[rows]))

        return jax.tree.map(put, result, compute(rows))

    return lax.fori_loop(0, (count + width - 1) // width, step, otherwise)
