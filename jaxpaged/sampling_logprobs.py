"""What log-probabilities are made of: the normaliser, a token's rank, and the most probable tokens.

Letters: S rows, V vocabulary, N entries of the best blocks, K alternatives, E ids asked about.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.sampling_blocks import Candidates, finite, for_rows


def best_entries(part: Candidates, num_top: int) -> tuple[Int[Array, "S K"], Float[Array, "S K"]]:
    """The num_top greatest entries, ids and values, best first; of equal ones the least id comes first."""
    top, places = lax.top_k(part.values, num_top)  # the ids ascend, and of equal values top_k takes the first
    return jnp.take_along_axis(part.ids, places, 1), top


def log_masses(
    logits: Float[Array, "S V"], best: Float[Array, " S"], wanted: Bool[Array, " S"], rows_per_pass: int
) -> Float[Array, " S"]:
    """log sum exp(logit - best), where wanted; 0 elsewhere, and in rows without a finite logit. best: the greatest."""

    def measure(rows: jax.Array) -> jax.Array:
        return jnp.log(jnp.sum(jnp.exp(finite(logits[rows]) - best[rows][:, None]), 1))

    # Below 0 only in rows without a finite logit, where it is -inf.
    return jnp.maximum(for_rows(measure, wanted, jnp.zeros(best.shape), rows_per_pass), 0.0)


def ranks(
    logits: Float[Array, "S V"],
    chosen: Float[Array, " S"],
    ids: Int[Array, " S"],
    wanted: Bool[Array, " S"],
    otherwise: Int[Array, " S"],
    rows_per_pass: int,
) -> Int[Array, " S"]:
    """The rank of one id of each row, whose logits are `chosen`, where wanted."""

    def search(rows: jax.Array) -> jax.Array:
        values = finite(logits[rows])
        return _rank(values, lax.broadcasted_iota(jnp.int32, values.shape, 1), chosen[rows], ids[rows])

    return for_rows(search, wanted, otherwise, rows_per_pass)


def ranks_among(
    part: Candidates, chosen: Float[Array, " S"], ids: Int[Array, " S"]
) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
    """The ranks, and whether the candidates tell them: they do above the bound, which no other entry exceeds."""
    return _rank(part.values, part.ids, chosen, ids), (chosen > part.bound) | (part.bound == -jnp.inf)


def _rank(values: jax.Array, ids: jax.Array, chosen: jax.Array, chosen_id: jax.Array) -> jax.Array:
    ahead = (values > chosen[:, None]) | ((values == chosen[:, None]) & (ids < chosen_id[:, None]))
    # Floats count exactly up to 2^24, and XLA:CPU adds them several times as fast as integers.
    return 1 + jnp.sum(jnp.where(ahead, 1.0, 0.0), 1).astype(jnp.int32)


def finite_at(logits: Float[Array, "S V"], ids: Int[Array, "S E"]) -> Float[Array, "S E"]:
    """The logits of some ids of each row, -inf where they are not finite."""
    return finite(jnp.take_along_axis(logits, ids, 1))
