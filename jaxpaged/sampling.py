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

from jaxpaged.sampling_adjust import Adjustments, RowState, adjust
from jaxpaged.sampling_blocks import BLOCK, ban, block_maxima, candidates, rows_of
from jaxpaged.sampling_draw import draw, greedy
from jaxpaged.sampling_filters import RowRules, noise_keys
from jaxpaged.sampling_logprobs import best_entries, finite_at, log_masses, ranks, ranks_among
from jaxpaged.sampling_params import SamplingParams


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
    padding = -vocab_size % BLOCK
    logits = logits.astype(jnp.float32)
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    raw = block_maxima(logits)
    rules, banned = _rules(inputs), jnp.asarray(inputs.banned)
    banned = jnp.where(banned < vocab_size, banned, logits.shape[1])  # no id: none of the padding's, either
    shaped, maxima = rows_of(logits), raw
    if state is not None:
        assert inputs.adjustments is not None
        shaped, maxima = adjust(logits, raw, inputs.adjustments, state, rules, mode.processors, mode.rows_per_pass)
    maxima = ban(maxima, shaped, banned)
    if mode.greedy:
        token = greedy(shaped, maxima, banned)
    else:
        token = draw(shaped, maxima, banned, rules, mode.rows_per_pass)
    bad = jnp.max(maxima, 1) == -jnp.inf
    token = jnp.minimum(token, vocab_size - 1)
    if mode.max_logprobs is None:
        return SampleOutput(token=token, bad=bad, logprob=None, rank=None, top_ids=None, top_logprobs=None, scored=None)
    num_top = max(1, min(mode.max_logprobs, vocab_size))
    return _with_logprobs(logits, raw, token, bad, num_top, inputs.adjustments, mode)


def _rules(inputs: SamplingInput) -> RowRules:
    return RowRules(
        temperature=jnp.asarray(inputs.temperature),
        top_k=jnp.asarray(inputs.top_k),
        top_p=jnp.asarray(inputs.top_p),
        min_p=jnp.asarray(inputs.min_p),
        key=noise_keys(jnp.asarray(inputs.seed), jnp.asarray(inputs.position)),
    )


def _with_logprobs(
    logits: jax.Array,
    maxima: jax.Array,
    token: jax.Array,
    bad: jax.Array,
    num_top: int,
    adjustments: Adjustments | None,
    mode: SamplerMode,
) -> SampleOutput:
    """Adds the log-probabilities: the best ones from the best blocks, the normaliser from all entries."""
    size = logits.shape[0]
    wanted = jnp.full((size,), True) if adjustments is None else jnp.asarray(adjustments.reports)
    chosen = finite_at(logits, token[:, None])[:, 0]
    best = jnp.maximum(jnp.max(maxima, 1), np.finfo(np.float32).min)

    def among() -> tuple[jax.Array, ...]:
        part = candidates(rows_of(logits), jnp.arange(size), maxima, None, num_top)
        return *best_entries(part, num_top), *ranks_among(part, chosen, token)

    def nothing() -> tuple[jax.Array, ...]:
        wide, narrow = jnp.zeros((size, num_top)), jnp.zeros(size, jnp.int32)
        return wide.astype(jnp.int32), wide, narrow, narrow == 0

    top_ids, top, near, known = lax.cond(jnp.any(wanted), among, nothing)
    log_mass = log_masses(logits, best, wanted, mode.rows_per_pass)
    scored = None
    if adjustments is not None:
        scored = (finite_at(logits, jnp.asarray(adjustments.scored_ids)) - best[:, None]) - log_mass[:, None]
    return SampleOutput(
        token=token,
        bad=bad,
        logprob=(chosen - best) - log_mass,
        rank=ranks(logits, chosen, token, wanted & ~known, near, mode.rows_per_pass),
        top_ids=top_ids,
        top_logprobs=(top - best[:, None]) - log_mass[:, None],
        scored=scored,
    )
