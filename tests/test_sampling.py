"""The sampler's rows: greedy ones, independence of neighbours, log-probabilities, inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxpaged.sampling import SamplingInput, build_sampling_input
from jaxpaged.sampling_params import SamplingParams
from tests.support.sampler import ABC, GREEDY, WIDE, Row, draws, mode, run

# ---- greedy rows


def test_greedy_row_in_a_sampling_batch_equals_its_solo_result() -> None:
    """Greedy rows once went through a dummy temperature, which turned the -inf of banned tokens into NaN or +inf."""
    generator = np.random.default_rng(5)
    logits = generator.normal(0.0, 4.0, (6, WIDE)).astype(np.float32)
    logits[2, 4000] = logits[2, 77] = 50.0  # a tie: the lesser id
    best = np.argsort(-logits, axis=1)
    banned: list[list[int]] = [[], best[1, :5].tolist(), [], best[3, 1:3].tolist(), best[4, :1].tolist(), []]
    sampled = SamplingParams(temperature=1.3, top_k=40, top_p=0.9)
    tricky = replace(GREEDY, top_k=5, top_p=0.5, min_p=0.5)  # a greedy row's filters are ignored
    rows: list[Row] = [(tricky if row % 2 else sampled, row, 9, banned[row]) for row in range(6)]
    mixed = run(logits, rows, mode(), 8).token
    solo = [run(logits[[row]], [(GREEDY, 0, 9, banned[row])], mode(greedy=True)).token[0] for row in range(6)]
    wanted = [0, best[1, 5], 77, best[3, 0], best[4, 1], best[5, 0]]
    assert mixed[1::2].tolist() == solo[1::2] == wanted[1::2]
    assert solo[2:] == wanted[2:]
    assert np.isin(mixed[[0, 2, 4]], best[[0, 2, 4], :45]).all()
    assert mixed[4] not in banned[4]


def test_banned_ids_at_the_edges() -> None:
    """Padding entries of the ban list are the vocabulary size: they must ban neither the last id nor any other."""
    for vocab_size, greedy in ((3, True), (32, True), (33, True), (64, True), (33, False)):
        logits = np.zeros((3, vocab_size), np.float32)
        logits[:, -1] = 9.0
        logits[:, 0] = 8.0
        rows: list[Row] = [(GREEDY, 0, 0, []), (GREEDY, 0, 0, [vocab_size - 1]), (GREEDY, 0, 0, [vocab_size - 1, 0])]
        assert run(logits, rows, mode(greedy)).token.tolist() == [vocab_size - 1, 0, 1]
    assert set(draws(ABC, SamplingParams(), banned=[0]).tolist()) == {1, 2}
    assert set(draws(ABC, SamplingParams(top_k=1), banned=[0]).tolist()) == {1}


@pytest.mark.parametrize("greedy", [True, False])
def test_rows_without_finite_logits_are_reported(greedy: bool) -> None:
    """NaN logits sampled token 0 without a word; now the row is reported and its neighbours are untouched."""
    nan, inf = np.nan, np.inf
    logits = np.full((7, 100), nan, np.float32)
    logits[:, 50] = -inf
    logits[:, :3] = [
        [nan, nan, nan], [-inf, -inf, nan], [inf, inf, -inf], [nan, 1, 0], [-inf, -inf, 0], [inf, 1, 2], [5, nan, 6]
    ]  # fmt: skip
    how = GREEDY if greedy else SamplingParams(top_k=1)
    rows: list[Row] = [(how, 1, 0, []) for _ in logits[:-1]] + [(how, 1, 0, [0, 2])]
    output = run(logits, rows, mode(greedy, max_logprobs=2))
    assert output.bad.tolist() == [True, True, True, False, False, False, True]
    assert output.token[3:6].tolist() == [1, 2, 2]
    for field in (output.logprob, output.top_logprobs):
        assert not np.isnan(field).any()


# ---- rows do not see each other


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Repeatability of a seeded request once depended on who else was in the batch, and in which row."""
    generator = np.random.default_rng(3)
    logits = generator.normal(0.0, 1.0, (7, WIDE)).astype(np.float32)
    settings_ = [{}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.2}, {"top_k": 500}, {"top_p": 0.02}]
    params = [SamplingParams(temperature=0.9, **each) for each in settings_] + [GREEDY]
    rows: list[Row] = [(each, 2**40 + row, 5, [row] if row % 2 else []) for row, each in enumerate(params)]
    tokens = run(logits, rows, mode(), 8).token.tolist()
    assert run(logits, rows, mode(), 16).token.tolist() == tokens
    assert run(logits, rows, mode(rows_per_pass=3), 8).token.tolist() == tokens
    for _ in range(3):
        order = generator.permutation(7)
        again = run(logits[order], [rows[row] for row in order], mode(), 8).token
        assert again.tolist() == [tokens[row] for row in order]
    assert [run(logits[[row]], [rows[row]], mode()).token[0] for row in range(7)] == tokens


def test_seed_and_position_change_the_draw_and_nothing_else_does() -> None:
    """Requests with equal prompts and no seed came out equal; so did all samples of one request."""
    logits = np.zeros((64, 512), np.float32)
    for vary in (lambda row: (row, 0), lambda row: (row << 32, 0), lambda row: (7, row)):
        rows: list[Row] = [(SamplingParams(), *vary(row), []) for row in range(64)]
        assert len(set(run(logits, rows, mode()).token.tolist())) > 50
    same: list[Row] = [(SamplingParams(), 7, 3, [])] * 64
    assert len(set(run(logits, same, mode()).token.tolist())) == 1


# ---- log-probabilities


@pytest.mark.parametrize("greedy", [True, False])
def test_logprobs_are_of_the_raw_logits(greedy: bool) -> None:
    """Alternatives came from filtered logits, -inf where top_k had cut; ranks shifted; the banned best was missing."""
    generator = np.random.default_rng(8)
    logits = generator.normal(0.0, 3.0, (5, WIDE)).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties everywhere
    order = np.argsort(-logits, axis=1, kind="stable")
    params = GREEDY if greedy else SamplingParams(temperature=1.8, top_k=300)
    rows: list[Row] = [(params, row, 1, order[row, :8].tolist() if row == 2 else []) for row in range(5)]
    output = run(logits, rows, mode(greedy, max_logprobs=20), 8)
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True) + np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True))
    assert output.top_ids.tolist() == order[:, :20].tolist()
    np.testing.assert_allclose(output.top_logprobs, np.take_along_axis(exact, order[:, :20], 1), atol=1e-5)
    np.testing.assert_allclose(output.logprob, exact[np.arange(5), output.token], atol=1e-5)
    ranks = [order[row].tolist().index(token) + 1 for row, token in enumerate(output.token)]
    assert output.rank.tolist() == ranks
    assert (max(ranks) > 20) != greedy
    plain = run(logits, rows, mode(greedy), 8)
    assert plain.token.tolist() == output.token.tolist()
    assert plain.logprob is plain.rank is plain.top_ids is plain.top_logprobs is None


def test_more_alternatives_than_tokens() -> None:
    """Asking for more alternatives than the vocabulary holds took a server down."""
    output = run(ABC[None], [(GREEDY, 0, 0, [])], mode(greedy=True, max_logprobs=20))
    assert output.top_ids.tolist() == [[0, 1, 2]]


# ---- inputs


def build(rows: Sequence[Row], size: int) -> SamplingInput:
    return build_sampling_input(rows, size, vocab_size=100, banned_width=2)


def test_built_inputs() -> None:
    built = build([(SamplingParams(temperature=3e38, top_k=100, seed=1), 2**64 - 2, 12, [4])], 2)
    assert built.seed.tolist() == [[2**32 - 2, 2**32 - 1], [0, 0]]
    assert built.banned.tolist() == [[4, 100], [100, 100]]
    assert built.top_k.tolist() == [0, 0]
    assert built.position.tolist() == [12, 0]
    assert np.isfinite(built.temperature).all()
    assert built.temperature[1] == 0


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: build([(GREEDY, 0, 0, [])] * 3, 2), "3 rows do not fit a batch of 2"),
        (lambda: build([(GREEDY, 0, 0, [1, 2, 3])], 2), "a row bans 3 ids, banned_width is 2"),
    ],
)
def test_inputs_that_do_not_fit(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()
