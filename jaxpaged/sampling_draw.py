"""Drawing a token for each row from a few blocks of the vocabulary, and from all of it only where they are too few.

All ways give the same token where they apply: the noise belongs to the vocabulary id, not to the place.

Letters: S sampled rows, C rows of one pass, V vocabulary, G blocks per row, E banned ids per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged import sampling_filters as filters
from jaxpaged.sampling_blocks import Candidates, LogitRows, best_noise, candidates, for_rows, take_blocks
from jaxpaged.sampling_params import GREEDY_BELOW

FIRST_BLOCKS = 64  # searched first; their 2,048 entries hold at least a row's 64 greatest logits
MORE_BLOCKS = 256  # searched for rows with top_k and top_p where the first ones are too few
NOISY_BLOCKS = 16  # searched where the winner is looked for by its noise


def greedy(logits: LogitRows, maxima: Float[Array, "S G"], banned: Int[Array, "S E"]) -> Int[Array, " S"]:
    """The first of the greatest logits: its block by the maxima, then its place in the block."""
    numbers = lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
    block = filters.id_of_greatest(maxima, numbers)[:, None]
    return filters.id_of_greatest(*take_blocks(logits, jnp.arange(maxima.shape[0]), block, banned))


def draw(
    logits: LogitRows,
    maxima: Float[Array, "S G"],
    banned: Int[Array, "S E"],
    rules: filters.RowRules,
    rows_per_pass: int,
) -> Int[Array, " S"]:
    """A token for each row. maxima: of the logits that may be picked."""
    size, groups = maxima.shape
    search = _Search(
        logits=logits, maxima=maxima, best=jnp.max(maxima, 1), banned=banned, rules=rules, rows_per_pass=rows_per_pass
    )
    every = jnp.arange(size)
    if groups <= FIRST_BLOCKS:  # a small vocabulary: all of it
        return search.among(every, groups)[0]
    token = greedy(logits, maxima, banned)
    sampled = rules.temperature >= GREEDY_BELOW
    two_filters = (rules.top_k > 0) & (rules.top_p < 1.0)
    # Nothing to gain from the blocks of the greatest logits: no filter, or one that surely reaches below them.
    deep = sampled & (rules.top_p >= 1.0) & jnp.where(rules.top_k == 0, rules.min_p <= 0.0, rules.top_k > FIRST_BLOCKS)
    shallow = sampled & ~deep
    found, settled, total = lax.cond(
        jnp.any(shallow),
        lambda: search.among(every, FIRST_BLOCKS),
        lambda: (token, jnp.full((size,), False), jnp.zeros(size)),
    )
    token = jnp.where(shallow, found, token)
    settled = ~sampled | (shallow & settled)

    def more(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return search.among(rows, MORE_BLOCKS)[:2]

    few = two_filters & (rules.top_k <= MORE_BLOCKS)
    token, settled = for_rows(more, ~settled & few, (token, settled), rows_per_pass)

    def noisy(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return search.by_noise(rows, total[rows])

    token, settled = for_rows(noisy, ~settled & ~two_filters, (token, settled), rows_per_pass)
    return for_rows(search.everywhere, ~settled, token, rows_per_pass)


@final
@dataclass(frozen=True, kw_only=True)
class _Search:
    """The ways to search. `best` is the greatest value of each row, f32[S]."""

    logits: LogitRows
    maxima: jax.Array
    best: jax.Array
    banned: jax.Array
    rules: filters.RowRules
    rows_per_pass: int

    def among(self, rows: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """In the blocks with the greatest logits: (token, whether that is it, mass before top_p or 0), [C] each."""
        some, best = self.rules.take(rows), self.best[rows]
        part = candidates(self.logits, rows, self.maxima[rows], self.banned[rows], num_blocks)
        settled, weigh = _reach(part, best, some)
        known = jnp.where(jnp.all(self.banned[rows] >= self.logits.raw.shape[1], 1), self.logits.masses[rows], 0.0)
        known = jnp.where(weigh, known, 0.0)
        total = for_rows(lambda few: self._mass(rows[few]), weigh & (known == 0.0), known, self.rows_per_pass)
        token, threshold = filters.pick(part.values, part.ids, best, total, some)
        return token, settled | (weigh & (threshold > part.bound)), total

    def by_noise(self, rows: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """In the blocks that can score highest: (token, whether that is it), [C] each.

        For rows with top_k or top_p or neither. No entry of a block scores above its ceiling, the greatest logit plus
        the greatest noise. The best entry wins if the filter keeps it: if those with greater logits are fewer than
        top_k, or weigh less than top_p of the total. Otherwise the next best one with a greater logit is asked.
        """
        some, best, maxima = self.rules.take(rows), self.best[rows], self.maxima[rows]
        limit = some.top_k.astype(jnp.float32)
        by_count, by_mass = some.top_k > 0, some.top_p < 1.0
        # top_k of the blocks reach that far up, so so many entries do.
        there = jnp.where(maxima > -jnp.inf, 1.0, 0.0)
        floor = filters.upper_threshold(maxima, there, limit, limit, best, by_count & (limit <= jnp.sum(there, 1)))
        scaled = filters.scaled(maxima, best, some.temperature)
        alive = (maxima >= floor[:, None]) & (scaled >= jnp.log(some.min_p)[:, None])
        ceilings = jnp.where(alive, scaled + best_noise(some.key, maxima.shape[1]), -jnp.inf)
        part = candidates(self.logits, rows, ceilings, self.banned[rows], NOISY_BLOCKS)
        scores = filters.noisy(part.values, part.ids, best, some)
        scores = jnp.where(part.values >= floor[:, None], scores, -jnp.inf)

        def ask(
            state: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            refused, token, settled, asking = state
            left = jnp.where(part.values > refused[:, None], scores, -jnp.inf)
            score = jnp.max(left, 1)
            token = jnp.where(asking, filters.id_of_greatest(left, part.ids), token)
            value = jnp.max(jnp.where(part.ids == token[:, None], part.values, -jnp.inf), 1)
            ahead = self._ahead(rows, value, asking & by_count, asking & by_mass)
            kept = jnp.where(by_count, ahead < limit, jnp.where(by_mass, ahead < some.top_p * total, True))
            asking &= score > part.bound
            return jnp.where(asking, value, refused), token, settled | (asking & kept), asking & ~kept

        start = jnp.full(best.shape, -jnp.inf), jnp.zeros(best.shape, jnp.int32)
        nobody = jnp.full(best.shape, False)
        _, token, settled, _ = lax.while_loop(lambda state: jnp.any(state[3]), ask, (*start, nobody, ~nobody))
        return token, settled

    def everywhere(self, rows: jax.Array) -> jax.Array:
        """In the whole vocabulary: the token, int32[C]."""
        values = self._values(rows)
        ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        return filters.pick(values, ids, self.best[rows], jnp.zeros(rows.shape), self.rules.take(rows))[0]

    def _values(self, rows: jax.Array) -> jax.Array:
        """f32[C, V]: what may be picked; the rest is -inf."""
        return self.logits.allowed(rows, self.banned[rows])

    def _mass(self, rows: jax.Array) -> jax.Array:
        """What top_p is a part of, f32[C]."""
        return filters.mass(self._values(rows), self.best[rows], self.rules.take(rows))

    def _ahead(self, rows: jax.Array, value: jax.Array, count: jax.Array, weigh: jax.Array) -> jax.Array:
        """How many entries are greater than value, or what they weigh, f32[C]; where neither is asked, anything."""

        def measure() -> jax.Array:
            values = self._values(rows)
            ahead = values > value[:, None]

            def mass() -> jax.Array:
                weights = jnp.exp(filters.scaled(values, self.best[rows], self.rules.temperature[rows]))
                return jnp.sum(jnp.where(ahead, weights, 0.0), 1)

            number = jnp.sum(jnp.where(ahead, 1.0, 0.0), 1)
            return jnp.where(count, number, lax.cond(jnp.any(weigh), mass, lambda: jnp.zeros(value.shape)))

        return lax.cond(jnp.any(count | weigh), measure, lambda: jnp.zeros(value.shape))


def _reach(part: Candidates, best: jax.Array, rules: filters.RowRules) -> tuple[jax.Array, jax.Array]:
    """bool[C] each: rows whose kept tokens are all candidates; of the others, those where top_p may make it so."""
    cut = filters.scaled(part.bound[:, None], best, rules.temperature)[:, 0] < jnp.log(rules.min_p)
    settled = (rules.temperature < GREEDY_BELOW) | (part.bound == -jnp.inf) | cut
    above = jnp.sum((part.values > part.bound[:, None]).astype(jnp.int32), 1)
    settled |= (rules.top_k > 0) & (above >= rules.top_k)
    return settled, ~settled & (rules.top_p < 1.0) & (rules.top_k == 0)
