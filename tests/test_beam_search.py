"""The rules of beam search, apart from any engine: against every sequence tried, and transformers' loop written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch, Ending
from jaxpaged.request import FinishReason
from tests.support.beams import Model, Scored, answer_of, every_sequence, markov, our_search, transformers_search

EOS = 0
EARLY = (False, True, "never")
PENALTIES = (0.0, 1.0, 2.0, -0.5)


def same(wanted: list[Scored], got: list[Scored]) -> None:
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    assert [one.score for one in got] == pytest.approx([one.score for one in wanted])


def params(**options: object) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 4, "max_tokens": 6, **options})


@pytest.mark.parametrize("seed", range(25))
def test_is_transformers_search(seed: int) -> None:
    """For every width, penalty and rule for stopping that a vocabulary of 12 can fill."""
    model = markov(np.random.default_rng(seed), 12)
    for width, penalty, early in itertools.product((1, 2, 3, 5), PENALTIES, EARLY):
        asks = params(beam_width=width, length_penalty=penalty, early_stopping=early, max_tokens=8)
        same(transformers_search(model, asks, EOS), our_search(model, asks, EOS))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(10))
def test_a_wide_search_finds_the_best_of_all(seed: int, penalty: float) -> None:
    """Hypotheses kept growing after their end, beams got fewer, scores were compared at the wrong length."""
    model = markov(np.random.default_rng(100 + seed), 5)
    asks = params(beam_width=64, max_tokens=4, length_penalty=penalty)
    found = our_search(model, asks, EOS)
    same(every_sequence(model, asks, {EOS})[:3], found[:3])
    assert len(found) == 64
    assert all(EOS not in one.token_ids[:-1] for one in found)


def test_the_best_of_all_by_one_beam_is_greedy() -> None:
    """The likeliest token every time, until it is the end."""
    for seed in range(20):
        model = markov(np.random.default_rng(seed), 6)
        tokens: list[int] = []
        while len(tokens) < 7 and EOS not in tokens:
            tokens.append(int(np.argmax(model(tokens))))
        (found,) = our_search(model, params(beam_width=1, max_tokens=7), EOS)
        assert list(found.token_ids) == tokens


def table(rows: dict[tuple[int, ...], list[float]]) -> Model:
    """Probabilities by what was generated before."""
    return lambda tokens: np.log(np.array(rows[tuple(tokens)]))


UNEQUAL = table({(): [0.3, 0.4, 0.3], (1,): [0.1, 0.2, 0.7], (2,): [0.5, 0.25, 0.25]})


def test_the_length_counts_the_end() -> None:
    """Scores did not match: the prompt was counted, or the end-of-sequence token was not."""
    found = our_search(UNEQUAL, params(beam_width=3, max_tokens=2), EOS)
    by_ids = {one.token_ids: one.score for one in found}
    assert by_ids[(EOS,)] == pytest.approx(np.log(0.3))
    assert by_ids[(1, 2)] == pytest.approx(np.log(0.4 * 0.7) / 2)


def test_an_end_beyond_the_width_does_not_count() -> None:
    """Its place among all continuations decides, not that among the ended ones."""
    found = our_search(UNEQUAL, params(beam_width=1, max_tokens=2), EOS)
    assert [one.token_ids for one in found] == [(1, 2)]


def test_early_stopping_takes_the_first_to_end() -> None:
    """True stops when there are enough; False and "never" look on for better ones."""
    model = table(
        {
            (): [0.45, 0.55, 1e-9, 1e-9],
            (1,): [0.40, 0.60, 1e-9, 1e-9],
            (1, 1): [0.99, 0.01, 1e-9, 1e-9],
            (1, 1, 1): [0.99, 0.01, 1e-9, 1e-9],
            (2,): [0.25] * 4,
            (1, 2): [0.25] * 4,
        }
    )
    found = {early: our_search(model, params(early_stopping=early, beam_width=2, max_tokens=3), EOS) for early in EARLY}
    assert [one.token_ids for one in found[True]] == [(1, EOS), (EOS,)]
    assert found[False][0].token_ids == found["never"][0].token_ids == (1, 1, EOS)


def test_impossible_tokens_are_no_candidates() -> None:
    """Rows with fewer possible tokens than beams gave hypotheses of probability 0."""
    rows = np.array([0.5, 0.5, 0.0, 0.0])
    with np.errstate(divide="ignore"):
        logprobs = np.log(rows)
    search = BeamSearch(params(max_tokens=2), 2)
    survivors = search.advance([answer_of(logprobs, 4)], never)
    assert [survivor.hypothesis.token for survivor in survivors] == [0, 1]
    search.advance([answer_of(logprobs, 4)] * 2, never)
    assert search.over and len(search.finished) == 4


def test_all_ended_is_over() -> None:
    search = BeamSearch(params(), 6)
    logprobs = np.log(np.array([0.6, 0.4]))
    assert search.advance([answer_of(logprobs, 2)], lambda beam, token: (FinishReason.STOP, token)) == ()
    assert search.over and [one.stop_reason for one in search.finished] == [0, 1]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cut(steps: int) -> None:
    """What runs joins what has ended, as far as there is room."""
    model = markov(np.random.default_rng(3), 6)
    search = BeamSearch(params(beam_width=3), 6)
    for _ in range(steps):
        paths = [[node.token for node in beam.path()] for beam in search.beams]
        search.advance([answer_of(model(path), 6) for path in paths], never)
    search.cut(FinishReason.ABORT)
    assert search.over and len(search.finished) == (3 if steps else 0)
    assert {one.reason for one in search.finished} <= {FinishReason.ABORT}


def never(beam: int, token: int) -> Ending | None:
    return None
