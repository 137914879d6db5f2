"""How probable given tokens are after given hidden states: the scorer that all kinds of prompt readings share.

Letters: Q positions a step can read, D model dim, V vocabulary, K alternatives reported, C rows handled together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.sampling_blocks import BLOCK, block_maxima, candidates, rows_of
from jaxpaged.sampling_logprobs import best_entries, finite_at, log_masses, ranks


@dataclass(frozen=True, kw_only=True)
class ScoringMode:
    """How the scorer works: static."""

    max_logprobs: int  # K
    rows_per_product: int  # C: rows whose logits exist at a time
    rows_per_pass: int  # of them, rows measured at a time: see sampling_blocks.for_rows


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of each row's target token, by the raw logits. Rank 1 is the most probable token, of equal ones the least id."""

    logprob: jax.Array | np.ndarray  # f32[Q]; -inf where the target's logit is not finite
    rank: jax.Array | np.ndarray  # int32[Q]
    top_ids: jax.Array | np.ndarray  # int32[Q, K], best first; zeros unless asked for
    top_logprobs: jax.Array | np.ndarray  # f32[Q, K]
    bad: jax.Array | np.ndarray  # bool[Q]: the row has no finite logit


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class ReadOutput:
    """What a step's read positions give: scores of the first ones, final hidden states f32[Q, D] of all."""

    scores: Scores
    states: jax.Array | np.ndarray


def score(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: Float[Array, "Q D"],
    targets: Int[Array, " Q"],
    count: Int[Array, ""],
    with_top: jax.Array,
    mode: ScoringMode,
) -> Scores:
    """Scores of the first `count` rows, C at a time; the others are zeros. with_top (bool): report alternatives."""
    size = hidden.shape[0]
    width = min(mode.rows_per_product, size)
    nothing = jnp.zeros(size)
    wide = jnp.zeros((size, mode.max_logprobs))
    ids = jnp.zeros(size, jnp.int32)
    start = Scores(
        logprob=nothing, rank=ids, top_ids=wide.astype(jnp.int32), top_logprobs=wide, bad=jnp.zeros(size, jnp.bool_)
    )

    def step(index: jax.Array, done: Scores) -> Scores:
        row = jnp.minimum(index * width, size - width)  # the last pass may repeat rows
        logits = logits_of(lax.dynamic_slice_in_dim(hidden, row, width)).astype(jnp.float32)
        part = _measure(logits, lax.dynamic_slice_in_dim(targets, row, width), with_top, mode)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(old, new, row, 0)

        return jax.tree.map(put, done, part)

    return lax.fori_loop(0, (count + width - 1) // width, step, start)


def _measure(logits: Float[Array, "C V"], targets: Int[Array, " C"], with_top: jax.Array, mode: ScoringMode) -> Scores:
    rows, vocab_size = logits.shape
    padding = -vocab_size % BLOCK
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    maxima = block_maxima(logits)
    best = jnp.max(maxima, 1)
    bad = best == -jnp.inf
    best = jnp.maximum(best, np.finfo(np.float32).min)
    chosen = finite_at(logits, targets[:, None])[:, 0]

    everyone = jnp.full((rows,), True)
    log_mass = log_masses(logits, best, everyone, mode.rows_per_pass)
    rank = ranks(logits, chosen, targets, everyone, jnp.zeros(rows, jnp.int32), mode.rows_per_pass)
    num_top = min(mode.max_logprobs, vocab_size)

    def find_top() -> tuple[jax.Array, jax.Array]:
        part = candidates(rows_of(logits), jnp.arange(rows), maxima, None, num_top)
        top_ids, top = best_entries(part, num_top)
        return top_ids, (top - best[:, None]) - log_mass[:, None]

    empty = jnp.zeros((rows, num_top))
    top_ids, top_logprobs = lax.cond(with_top, find_top, lambda: (empty.astype(jnp.int32), empty))
    return Scores(logprob=(chosen - best) - log_mass, rank=rank, top_ids=top_ids, top_logprobs=top_logprobs, bad=bad)
