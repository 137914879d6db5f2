"""Which tokens the sampler can draw, and how often: against a sort-based reference and exact probabilities."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged import sampling_draw
from jaxpaged import sampling_filters as filters
from jaxpaged.sampling_params import SamplingParams
from tests.support.sampler import ABC, WIDE, Row, chi_square_fits, draws, expected_token, mode, reference, run

# ---- which tokens are possible


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(temperature=0.5, top_p=0.85), {0}),
        (SamplingParams(temperature=2.0, top_p=0.85), {0, 1, 2}),
        (SamplingParams(min_p=0.3), {0, 1}),
        (SamplingParams(temperature=2.0, min_p=0.3), {0, 1, 2}),
        (SamplingParams(top_k=2, top_p=0.7), {0}),
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(), {0, 1, 2}),
    ],
)
def test_support_with_filters(params: SamplingParams, support: set[int]) -> None:
    """A sampler measured top_p before the temperature, and min_p on logits: impossible tokens were drawn."""
    assert set(draws(ABC, params).tolist()) == support


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(temperature=1e-6), {0}),
        (SamplingParams(temperature=1e-30), {0}),
        (SamplingParams(temperature=1e-45), {0}),
        (SamplingParams(temperature=2e-5), {0}),
        (SamplingParams(temperature=1e30), {0, 1, 2}),
        (SamplingParams(temperature=1e30, top_k=2), {0, 1}),
        (SamplingParams(top_k=3), {0, 1, 2}),
        (SamplingParams(top_k=4), {0, 1, 2}),
        (SamplingParams(top_k=10**9), {0, 1, 2}),
        (SamplingParams(top_k=10**12), {0, 1, 2}),
        (SamplingParams(top_p=1e-9), {0}),
        (SamplingParams(top_p=1e-60), {0}),
        (SamplingParams(min_p=1.0), {0}),
    ],
)
def test_extreme_values(params: SamplingParams, support: set[int]) -> None:
    """A tiny temperature overflowed the logits to inf, the softmax to NaN, and took the engine down."""
    assert set(draws(ABC, params).tolist()) == support


def test_huge_temperature_is_uniform_over_what_is_kept() -> None:
    counts = np.bincount(draws(ABC, SamplingParams(temperature=1e30, top_k=2)), minlength=3)
    assert chi_square_fits(counts, np.array([0.5, 0.5, 0.0]))


def test_tied_tokens_stay_together() -> None:
    """The tie rule: tokens equal to the last kept one are kept, too."""
    logits = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 0.0], np.float32)
    for params, support in (
        (SamplingParams(min_p=1.0), {1, 3}),
        (SamplingParams(top_k=1), {1, 3}),
        (SamplingParams(top_k=3), {1, 2, 3, 4}),
        (SamplingParams(top_p=0.1), {1, 3}),
        (SamplingParams(top_p=0.75), {1, 2, 3, 4}),
    ):
        assert set(draws(logits, params).tolist()) == support, params


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.8, 1.0, 1.7, 30.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 20, 127, 128, 129, 700, 5999, 6001]),
        "top_p": st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.013]),
        "min_p": st.sampled_from([0.0, 0.0, 0.0001, 0.05, 1.0]),
    }
)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**64 - 1),
    spread=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    step=st.sampled_from([0.0, 0.25]),
    choices=st.lists(SETTINGS, min_size=8, max_size=8),
)
@example(seed=1, spread=0.5, step=0.0, choices=[{"top_p": 0.9}] * 4 + [{"top_k": 700, "top_p": 0.5}, {}, {}, {}])
def test_same_token_as_the_reference(seed: int, spread: float, step: float, choices: list[dict[str, float]]) -> None:
    """Candidates and whole-vocabulary search, ties (step) and bans included, agree with sorting in float64."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0.0, spread, (8, WIDE)).astype(np.float32)
    logits = np.round(logits / step).astype(np.float32) * np.float32(step) if step else logits
    banned = [[], *(generator.choice(WIDE, 8).tolist() for _ in range(6)), np.argsort(-logits[7])[:8].tolist()]
    rows: list[Row] = [
        (SamplingParams(**choice), (seed + row) % 2**64, 3 * row, banned[row]) for row, choice in enumerate(choices)
    ]
    tokens = run(logits, rows, mode()).token
    for index, row in enumerate(rows):
        expected = expected_token(logits[index], row)
        assert expected is None or expected == tokens[index], (index, row)


def test_top_p_is_of_the_whole_vocabulary() -> None:
    """40 peaks hold a third of the mass: a share of the candidates' mass alone would keep 24 of them, not 32."""
    logits = np.zeros((8, WIDE), np.float32)
    peaks = np.random.default_rng(2).choice(WIDE, 40, replace=False)
    logits[:, peaks] = np.log(100.0 - np.arange(40, dtype=np.float32))
    drawn = set()
    for first in range(0, 128, 8):
        rows: list[Row] = [(SamplingParams(top_p=0.3), 4, first + row, []) for row in range(8)]
        tokens = run(logits, rows, mode()).token
        expected = [expected_token(logits[0], row) for row in rows]
        assert all(want in (None, got) for want, got in zip(expected, tokens.tolist(), strict=True))
        drawn |= set(tokens.tolist())
    assert drawn & set(peaks[24:32].tolist())
    assert drawn <= set(peaks[:33].tolist())


def test_few_candidates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four candidate blocks, most rows have to notice that the candidates are not enough."""
    logits = np.random.default_rng(6).normal(0.0, 0.3, (32, WIDE)).astype(np.float32)
    logits[:, ::32] += 8.0  # in each block one entry that can win; the greatest noise is mostly elsewhere
    choices = [{}, {}, {"top_p": 0.5}, {"top_k": 100}, {"min_p": 0.4}, {"top_p": 0.01}, {"top_k": 2}, {"top_p": 0.999}]
    rows: list[Row] = [(SamplingParams(**choices[row % 8]), 5, row, []) for row in range(32)]
    for name in ("FIRST_BLOCKS", "MORE_BLOCKS", "NOISY_BLOCKS"):
        monkeypatch.setattr(sampling_draw, name, 4)
    tokens = run(logits, rows, mode(rows_per_pass=4)).token.tolist()
    expected = [expected_token(logits[index], row) for index, row in enumerate(rows)]
    assert all(want in (None, got) for want, got in zip(expected, tokens, strict=True))


def test_filters_that_reach_far_down_are_settled_by_the_noise() -> None:
    """Hundreds of tokens are kept, many more than the first blocks hold; what wins without the filter is often not."""
    logits = np.random.default_rng(8).normal(0.0, 0.7, (36, WIDE)).astype(np.float32)
    logits[::2] = np.round(logits[::2], 1)  # ties at the thresholds
    choices = [{"top_k": 65}, {"top_k": 188}, {"top_k": 189}, {"top_k": 3000}, {"top_p": 0.2}, {"top_p": 0.6}]
    choices += [{"top_k": 400, "min_p": 0.1}, {"top_p": 0.5, "min_p": 0.05}, {"top_k": 100, "top_p": 0.7}]
    rows: list[Row] = [(SamplingParams(**choices[row % 9]), 3, row, [row, 4000]) for row in range(36)]
    tokens = run(logits, rows, mode(rows_per_pass=3)).token.tolist()
    expected = [expected_token(logits[index], row) for index, row in enumerate(rows)]
    assert all(want in (None, got) for want, got in zip(expected, tokens, strict=True))
    free = [(SamplingParams(), *row[1:]) for row in rows]
    unfiltered = run(logits, free, mode(rows_per_pass=3)).token
    assert np.mean(unfiltered != tokens) > 0.3  # otherwise nothing was refused
    assert sum(want is None for want in expected) < 6


# ---- distributions


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("filters_set", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9}])
def test_frequencies_follow_the_probabilities(temperature: float, filters_set: dict[str, float]) -> None:
    logits = np.array([0.0, 2.0, 1.5, -1.0, 1.0, 0.2, 1.9, -0.5], np.float32)
    params = SamplingParams(temperature=temperature, **filters_set)
    kept, scaled, near = reference(logits, params, [])
    assert not near
    chances = np.where(kept, np.exp(scaled), 0)
    counts = np.bincount(draws(logits, params), minlength=8)
    assert chi_square_fits(counts, chances / chances.sum())


@pytest.mark.parametrize("spread", ["seeds", "high seeds", "positions"])
def test_draws_of_neighbouring_keys_are_independent(spread: str) -> None:
    """Pairs of draws under keys that differ in one count: a weak hash would tie one to the other."""
    keys = np.arange(2 * 2048)
    seeds = {"seeds": keys, "high seeds": keys << 32, "positions": 0 * keys}[spread]
    places = keys if spread == "positions" else 0 * keys
    rows: list[Row] = [(SamplingParams(), int(seed), int(place), []) for seed, place in zip(seeds, places, strict=True)]
    pairs = run(np.tile(ABC, (len(rows), 1)), rows, mode()).token.reshape(-1, 2)
    single = np.exp(ABC) / np.exp(ABC).sum()
    counts = np.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9)
    assert chi_square_fits(counts, np.outer(single, single).ravel())


def test_both_words_of_a_key_count() -> None:
    """With 32 effective bits two of some 80,000 requests would share their noise, and so would close keys."""
    keys = jnp.array([[1, 2], [1, 3], [2, 2], [2, 3]], jnp.uint32)
    words = np.asarray(filters.noise_words(keys, jnp.tile(jnp.arange(4096, dtype=jnp.int32), (4, 1))))
    assert len(np.unique(words)) > 0.999 * words.size


def test_noise_is_gumbel_in_the_tail_that_wins() -> None:
    """Noise from 23 random bits has too short a tail: rare tokens of a large vocabulary would come up too seldom."""
    keys = filters.noise_keys(jnp.arange(64, dtype=jnp.uint32).reshape(32, 2), jnp.arange(32, dtype=jnp.int32))
    ids = jnp.broadcast_to(jnp.arange(2**17, dtype=jnp.int32), (32, 2**17))
    noise = np.sort(np.asarray(filters.gumbel(filters.noise_words(keys, ids)), np.float64).ravel())
    assert np.isfinite(noise).all()
    edges = -np.log(-np.log1p(-np.array([0.999, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5])))
    counts = np.diff(np.concatenate([[0], np.searchsorted(noise, edges), [noise.size]]))
    chances = np.diff([0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 1.0])
    assert chi_square_fits(counts, chances)
    assert abs(noise.max() - np.log(noise.size)) < 4.0
