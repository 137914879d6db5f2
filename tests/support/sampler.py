"""Runs the sampler on numpy rows, and says what a sort in float64 would have sampled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import sampling_filters as filters
from jaxpaged.sampling import SampleOutput, SamplerMode, build_sampling_input, sample
from jaxpaged.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
ABC = np.array([3.0, 2.0, 1.0], np.float32)
WIDE = 6001  # more than the candidates hold, and no whole number of blocks
Row = tuple[SamplingParams, int, int, Sequence[int]]
SAMPLE = jax.jit(sample, static_argnames="mode")


def mode(greedy: bool = False, max_logprobs: int | None = None, rows_per_pass: int = 2) -> SamplerMode:
    return SamplerMode(
        greedy=greedy, max_logprobs=max_logprobs, rows_per_pass=rows_per_pass, adjusts=False, processors=()
    )


def run(logits: np.ndarray, rows: Sequence[Row], how: SamplerMode, size: int | None = None) -> SampleOutput:
    """Samples rows [len(rows), V] in a batch of `size`; numpy, without the padding rows."""
    size = size or len(rows)
    padded = np.zeros((size, logits.shape[1]), np.float32)
    padded[: len(rows)] = logits
    inputs = build_sampling_input(rows, size, vocab_size=logits.shape[1], banned_width=8)
    output = SAMPLE(jnp.asarray(padded), jax.tree.map(jnp.asarray, inputs), mode=how, state=None)
    return jax.tree.map(lambda field: np.asarray(field)[: len(rows)], output)


def draws(logits: np.ndarray, params: SamplingParams, banned: Sequence[int] = ()) -> np.ndarray:
    """Tokens drawn at positions 0 to 4,095 of one request."""
    rows: list[Row] = [(params, 11, position, banned) for position in range(4096)]
    return run(np.tile(logits, (len(rows), 1)), rows, mode()).token


def reference(
    logits: np.ndarray, params: SamplingParams, banned: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray, bool]:
    """By sorting, in float64: (kept bool[V], logits / temperature [V], whether some token is too near a border)."""
    logits = logits.astype(np.float64)
    logits[list(banned)] = -np.inf
    scaled = (logits - logits.max()) / np.float32(params.temperature)
    order = np.argsort(-logits, kind="stable")
    kept = np.exp(scaled) >= np.float32(params.min_p)
    near = bool(np.any(np.abs(np.exp(scaled) / max(params.min_p, 1e-30) - 1) < 1e-5)) and params.min_p < 1
    kept &= logits > -np.inf
    if 0 < params.top_k < len(logits):
        kept &= logits >= logits[order[params.top_k - 1]]
    if params.top_p < 1:
        chances = np.where(kept, np.exp(scaled), 0)[order]
        chances /= chances.sum()
        before = np.cumsum(chances) - chances
        near |= bool(np.any(np.abs(before - np.float32(params.top_p)) < 1e-5))
        kept &= logits >= logits[order[before < np.float32(params.top_p)]].min()  # ties with the last one stay
    return kept, scaled, near


def expected_token(logits: np.ndarray, row: Row) -> int | None:
    """What the reference picks with the sampler's own noise; None where rounding decides."""
    params, seed, position, banned = row
    return winner(reference(logits, params, banned), seed, position)


def winner(found: tuple[np.ndarray, np.ndarray, bool], seed: int, position: int) -> int | None:
    """The token that the sampler's noise picks from what reference() found; None where rounding decides."""
    kept, scaled, near = found
    seeds = jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
    keys = filters.noise_keys(seeds, jnp.array([position], jnp.int32))
    noise = filters.gumbel(filters.noise_words(keys, jnp.arange(len(scaled), dtype=jnp.int32)[None]))
    noisy = np.where(kept, scaled + np.asarray(noise, np.float64)[0], -np.inf)
    second, first = np.sort(noisy)[-2:]
    return None if near or first - second < 1e-4 else int(np.argmax(noisy))


def chi_square(counts: np.ndarray, chances: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; tokens expected less than 5 times are taken together.

    AssertionError if a token of chance 0 occurs.
    """
    assert not counts[chances == 0].any(), f"impossible tokens {np.flatnonzero(counts * (chances == 0))} were drawn"
    expected = counts.sum() * chances
    rare = (expected < 5) & (chances > 0)
    often = expected >= 5
    expected = np.append(expected[often], expected[rare].sum() if rare.any() else [])
    found = np.append(counts[often], counts[rare].sum() if rare.any() else [])
    return float(((found - expected) ** 2 / expected).sum()), len(expected) - 1


def plausible(statistic: float, freedom: int, deviations: float) -> bool:
    """Whether a chi-square so great is no further out than so many standard deviations (Wilson-Hilferty)."""
    if freedom == 0:
        return True
    return statistic < freedom * (1 - 2 / (9 * freedom) + deviations * np.sqrt(2 / (9 * freedom))) ** 3


def chi_square_fits(counts: np.ndarray, chances: np.ndarray) -> bool:
    """Pearson's test at about 1e-4; tokens of chance 0 must not occur."""
    return not counts[chances == 0].any() and plausible(*chi_square(counts, chances), 3.72)
