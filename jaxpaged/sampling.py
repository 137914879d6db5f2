"""From logits to tokens and log-probabilities: one compiled program for whatever mix of rows a batch holds.

Order of processing: what sampling_adjust changes, banned ids, temperature, min_p (against the greatest probability),
top_k, top_p on what top_k left, Gumbel-max. A row's result depends on its logits, its parameters, its seed, its
position and, with penalties, its own tokens only.

Letters: S sampled rows (padded), V vocabulary, E banned ids per row, K alternatives in log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import sampling_filters as filters
from jaxpaged.sampling_adjust import Adjustments, RowState, adjust
from jaxpaged.sampling_params import GREEDY_BELOW, SamplingParams

CANDIDATE_BLOCKS = 128  # blocks searched first; their 4,096 entries hold at least a row's 128 greatest logits


@dataclass(frozen=True, kw_only=True)
class SamplerMode:
    """What a sampler program can do: static, so each mode is a program of its own."""

    greedy: bool  # every row is greedy: the most probable token that is not banned, and nothing else
    max_logprobs: int | None  # K, the alternatives reported; None: no log-probabilities at all
    rows_per_pass: int  # rows handled at a time where the whole vocabulary is searched: 2 on a CPU, S on a GPU
    adjusts: bool  # rows may have Adjustments
    processors: tuple[Callable[..., Any], ...]  # the requests' own functions; with `adjusts` only


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class SamplingInput:
    """What the rows of a batch ask of sampling. Padding rows are greedy and ban nothing."""

    temperature: jax.Array | np.ndarray  # f32[S]; below 1e-5: greedy, and the other settings are ignored
    top_k: jax.Array | np.ndarray  # int32[S]; 0 or at least V: off
    top_p: jax.Array | np.ndarray  # f32[S]; 1: off
    min_p: jax.Array | np.ndarray  # f32[S]; 0: off
    seed: jax.Array | np.ndarray  # uint32[S, 2]: low and high word of the request's seed
    position: jax.Array | np.ndarray  # int32[S]: position, in its sequence, of the token being sampled
    banned: jax.Array | np.ndarray  # int32[S, E]: ids that must not be sampled now; V or more: no id
    adjustments: Adjustments | None  # None in modes that do not adjust


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """Sampled tokens. The log-probabilities are of the raw logits (no mask, no temperature, no filter).

    They are None in modes without them. Rank 1 is the most probable token; of equal ones the lesser id comes first,
    in ranks and in top_ids alike. Tokens with a non-finite logit have log-probability -inf.
    """

    token: jax.Array | np.ndarray  # int32[S]
    bad: (
        jax.Array | np.ndarray
    )  # bool[S]: no token of the row has a finite logit and may be sampled; token is meaningless
    logprob: jax.Array | np.ndarray | None  # f32[S], of token
    rank: jax.Array | np.ndarray | None  # int32[S], of token
    top_ids: jax.Array | np.ndarray | None  # int32[S, K], best first
    top_logprobs: jax.Array | np.ndarray | None  # f32[S, K]
    scored: jax.Array | np.ndarray | None  # f32[S, E], of the ids that the rows' adjustments name


def build_sampling_input(
    rows: Sequence[tuple[SamplingParams, int, int, Sequence[int]]], size: int, *, vocab_size: int, banned_width: int
) -> SamplingInput:
    """Rows of (params, seed in [0, 2**64), position, banned ids) as numpy arrays, padded to `size` rows.

    Raises ValueError if there are more rows than size, or more banned ids in a row than banned_width.
    """
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {size}: choose a larger bucket")
    widest = max((len(banned) for *_, banned in rows), default=0)
    if widest > banned_width:
        raise ValueError(f"a row bans {widest} ids, banned_width is {banned_width}: choose a wider variant")
    largest = float(np.finfo(np.float32).max)
    result = SamplingInput(
        temperature=np.zeros(size, np.float32),
        top_k=np.zeros(size, np.int32),
        top_p=np.ones(size, np.float32),
        min_p=np.zeros(size, np.float32),
        seed=np.zeros((size, 2), np.uint32),
        position=np.zeros(size, np.int32),
        banned=np.full((size, banned_width), vocab_size, np.int32),
        adjustments=None,
    )
    for row, (params, seed, position, banned) in enumerate(rows):
        result.temperature[row] = min(params.temperature, largest)
        result.top_k[row] = 0 if params.top_k >= vocab_size else params.top_k
        result.top_p[row] = params.top_p
        result.min_p[row] = params.min_p
        result.seed[row] = (seed & 0xFFFFFFFF, seed >> 32)
        result.position[row] = position
        result.banned[row, : len(banned)] = banned
    return result


def sample(
    logits: Float[Array, "S V"], inputs: SamplingInput, mode: SamplerMode, state: RowState | None
) -> SampleOutput:
    """One token per row, of any mix of greedy and sampled rows (greedy rows only if mode.greedy).

    state: what adjustments look at; None in modes that do not adjust.
    """
    vocab_size = logits.shape[1]
    padding = -vocab_size % filters.BLOCK
    logits = logits.astype(jnp.float32)
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    raw = filters.block_maxima(logits)
    banned = jnp.asarray(inputs.banned)
    shaped, maxima = logits, raw
    if state is not None:
        assert inputs.adjustments is not None
        shaped, maxima = adjust(logits, raw, inputs.adjustments, state, mode.processors, mode.rows_per_pass)
    maxima = filters.ban(maxima, shaped, banned)
    token = _greedy(shaped, maxima, banned) if mode.greedy else _draw(shaped, maxima, inputs, mode)
    bad = jnp.max(maxima, 1) == -jnp.inf
    token = jnp.minimum(token, vocab_size - 1)
    if mode.max_logprobs is None:
        return SampleOutput(token=token, bad=bad, logprob=None, rank=None, top_ids=None, top_logprobs=None, scored=None)
    num_top = max(1, min(mode.max_logprobs, vocab_size))
    return _with_logprobs(logits, raw, token, bad, num_top, inputs.adjustments, mode)


def _greedy(logits: jax.Array, maxima: jax.Array, banned: jax.Array) -> jax.Array:
    """The first of the greatest logits: its block by the maxima, then its place in the block."""
    blocks = lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
    values, ids = filters.take_blocks(logits, filters.id_of_greatest(maxima, blocks)[:, None], banned)
    return filters.id_of_greatest(values, ids)


def _draw(logits: jax.Array, maxima: jax.Array, inputs: SamplingInput, mode: SamplerMode) -> jax.Array:
    """Samples from candidates; rows for which these may not be enough are done again on the whole vocabulary.

    Both give the same token where both apply: the noise belongs to the vocabulary id, not to the place.
    """
    banned = jnp.asarray(inputs.banned)
    rules = filters.RowRules(
        temperature=jnp.asarray(inputs.temperature),
        top_k=jnp.asarray(inputs.top_k),
        top_p=jnp.asarray(inputs.top_p),
        min_p=jnp.asarray(inputs.min_p),
        key=filters.noise_keys(jnp.asarray(inputs.seed), jnp.asarray(inputs.position)),
    )
    best = jnp.max(maxima, 1)
    if maxima.shape[1] <= CANDIDATE_BLOCKS:  # a small vocabulary: all of it
        part = filters.candidates(logits, maxima, banned, CANDIDATE_BLOCKS)
        return filters.pick(part.values, part.ids, best, jnp.zeros(best.shape), rules)[0]

    def row(rows: jax.Array) -> jax.Array:
        values = jnp.where(jnp.isfinite(logits[rows]), logits[rows], -jnp.inf)
        return values.at[jnp.arange(rows.shape[0])[:, None], banned[rows]].set(-jnp.inf, mode="drop")

    def mass(rows: jax.Array) -> jax.Array:
        some = rules.take(rows)
        scaled = filters.scaled(row(rows), best[rows], some.temperature)
        return jnp.sum(jnp.where(scaled >= jnp.log(some.min_p)[:, None], jnp.exp(scaled), 0.0), 1)

    def noise(rows: jax.Array) -> jax.Array:
        return filters.best_noise(rules.key[rows], maxima.shape[1])

    def whole(rows: jax.Array) -> jax.Array:
        ids = lax.broadcasted_iota(jnp.int32, (rows.shape[0], logits.shape[1]), 1)
        return filters.pick(row(rows), ids, best[rows], jnp.zeros(rows.shape), rules.take(rows))[0]

    # Rows without filters: no entry of a block scores above its ceiling, the greatest logit plus the greatest noise.
    free = (rules.temperature >= GREEDY_BELOW) & (rules.top_k == 0) & (rules.top_p >= 1.0) & (rules.min_p <= 0.0)
    ceilings = filters.for_rows(noise, free, jnp.zeros(maxima.shape), mode.rows_per_pass)
    ceilings += filters.scaled(maxima, best, rules.temperature)
    keys = jnp.where(free[:, None], ceilings, maxima)
    part = filters.candidates(logits, keys, banned, CANDIDATE_BLOCKS)
    settled, weigh = _reach(part, best, rules)
    total = filters.for_rows(mass, weigh, jnp.zeros(weigh.shape), mode.rows_per_pass)
    token, threshold, score = filters.pick(part.values, part.ids, best, total, rules)
    settled = jnp.where(free, score > part.bound, settled | (weigh & (threshold > part.bound)))
    return filters.for_rows(whole, ~settled, token, mode.rows_per_pass)


def _reach(part: filters.Candidates, best: jax.Array, rules: filters.RowRules) -> tuple[jax.Array, jax.Array]:
    """bool[S] each: rows whose kept tokens are all candidates; of the others, those where top_p may make it so."""
    cut = filters.scaled(part.bound[:, None], best, rules.temperature)[:, 0] < jnp.log(rules.min_p)
    settled = (rules.temperature < GREEDY_BELOW) | (part.bound == -jnp.inf) | cut
    above = jnp.sum((part.values > part.bound[:, None]).astype(jnp.int32), 1)
    settled |= (rules.top_k > 0) & (above >= rules.top_k)
    return settled, ~settled & (rules.top_p < 1.0) & (rules.top_k == 0)


def _with_logprobs(
    logits: jax.Array,
    maxima: jax.Array,
    token: jax.Array,
    bad: jax.Array,
    num_top: int,
    adjustments: Adjustments | None,
    mode: SamplerMode,
) -> SampleOutput:
    """Adds the log-probabilities: the best ones from the best blocks, the normaliser and the rank from all entries."""
    size, width = logits.shape
    part = filters.candidates(logits, maxima, None, num_top)
    ids, values = lax.sort((part.ids, part.values), num_keys=1)  # of equal values top_k then takes the least id
    top, places = lax.top_k(values, num_top)
    chosen = _finite(logits, token[:, None])[:, 0]
    best = jnp.maximum(top[:, 0], np.finfo(np.float32).min)

    def measure(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = jnp.where(jnp.isfinite(logits[rows]), logits[rows], -jnp.inf)
        ids = lax.broadcasted_iota(jnp.int32, (rows.shape[0], width), 1)
        mine, my_id = chosen[rows][:, None], token[rows][:, None]
        ahead = (values > mine) | ((values == mine) & (ids < my_id))
        rank = 1 + jnp.sum(ahead.astype(jnp.int32), 1)
        return jnp.log(jnp.sum(jnp.exp(values - best[rows][:, None]), 1)), rank

    wanted = jnp.full((size,), True) if adjustments is None else jnp.asarray(adjustments.reports)
    nothing = (jnp.zeros(size), jnp.zeros(size, jnp.int32))
    log_mass, rank = filters.for_rows(measure, wanted, nothing, mode.rows_per_pass)
    log_mass = jnp.maximum(log_mass, 0.0)  # below only in rows without a finite logit, where it is -inf
    scored = None
    if adjustments is not None:
        scored = (_finite(logits, adjustments.scored_ids) - best[:, None]) - log_mass[:, None]
    return SampleOutput(
        token=token,
        bad=bad,
        logprob=(chosen - best) - log_mass,
        rank=rank,
        top_ids=jnp.take_along_axis(ids, places, 1),
        top_logprobs=(top - best[:, None]) - log_mass[:, None],
        scored=scored,
    )


def _finite(logits: jax.Array, ids: jax.Array | np.ndarray) -> jax.Array:
    """The logits of some ids of each row, -inf where they are not finite: f32[S, E]."""
    values = jnp.take_along_axis(logits, jnp.asarray(ids), 1)
    return jnp.where(jnp.isfinite(values), values, -jnp.inf)
