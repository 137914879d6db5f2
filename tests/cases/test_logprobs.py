"""Log-probabilities through the whole engine: which tokens are reported, their values and ranks."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged.outputs import CompletionOutput
from jaxpaged.sampling_params import SamplingParams
from tests.support.bigram import bigram_checkpoint
from tests.support.driving import answer, answers, greedy
from tests.support.engines import small_llm

BEST, SECOND, THIRD, FOURTH = 4, 9, 6, 7
VOCAB = 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> jaxpaged.LLM:
    """After any token: 3, 2, 1 and 0 for four tokens, all others -30."""
    table = {last: {BEST: 3.0, SECOND: 2.0, THIRD: 1.0, FOURTH: 0.0} for last in range(VOCAB)}
    return small_llm(
        bigram_checkpoint(tmp_path_factory.mktemp("bigram") / "model", table, VOCAB), skip_tokenizer_init=True
    )


EXACT = {
    token: logit - math.log(sum(map(math.exp, range(4))))
    for token, logit in zip((4, 9, 6, 7), (3, 2, 1, 0), strict=True)
}


def check(found: CompletionOutput, count: int) -> None:
    """Each token once, the sampled one first; true ranks; values by softmax of the raw logits; their sum."""
    assert found.logprobs is not None
    assert len(found.logprobs) == len(found.token_ids)
    for token, entries in zip(found.token_ids, found.logprobs, strict=True):
        assert next(iter(entries)) == token
        best = [BEST, SECOND, THIRD, FOURTH][:count]
        assert set(entries) >= {token, *best}
        assert len(entries) == count + (token not in list(EXACT)[:count])
        ranks = {each: entry.rank for each, entry in entries.items()}
        assert all(ranks[each] == rank for rank, each in enumerate(best, 1))
        assert ranks[token] == [BEST, SECOND, THIRD, FOURTH].index(token) + 1
        for each in {token, *best}:
            assert entries[each].logprob == pytest.approx(EXACT[each], abs=2e-3)
    chosen = [entries[token].logprob for token, entries in zip(found.token_ids, found.logprobs, strict=True)]
    assert found.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_fourth_best_token_is_reported_with_its_true_rank(llm: jaxpaged.LLM, count: int):
    """logprobs=0 reported nothing; the sampled token came twice, or a rank too low among the alternatives."""
    check(answer(llm, [1], max_tokens=3, allowed_token_ids=[FOURTH], logprobs=count), count)
    check(answer(llm, [1], max_tokens=3, logprobs=count), count)
    (sampled,) = answers(llm, [[1]], SamplingParams(seed=1, temperature=2.0, top_k=4, max_tokens=9, logprobs=count))
    assert len(set(sampled.token_ids)) > 2
    check(sampled, count)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5, "repetition_penalty": 1.9},
        {"logit_bias": {FOURTH: 50.0, BEST: -50.0}},
        {"stop_token_ids": [BEST], "min_tokens": 3},
        {"temperature": 0.4, "seed": 3, "top_k": 1},
    ],
    ids=str,
)
def test_what_changes_the_choice_does_not_change_the_values(llm: jaxpaged.LLM, options: dict[str, Any]):
    """Reported values were those after penalties and bans, -inf for what had been excluded."""
    params = SamplingParams(**{"temperature": 0.0} | options, max_tokens=3, logprobs=4)
    check(answers(llm, [[1]], params)[0], 4)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "logprobs": 5},
        {"top_p": 0.3, "logprobs": 5},
        {"logit_bias": {BEST: -100.0}, "logprobs": 5},
        {"allowed_token_ids": [FOURTH], "logprobs": 3},
        {"top_k": 1, "logprobs": 1, "prompt_logprobs": 1},
        {"min_tokens": 2, "stop_token_ids": [BEST], "logprobs": -1, "prompt_logprobs": 5},
    ],
    ids=str,
)
def test_all_that_is_reported_is_finite(llm: jaxpaged.LLM, options: dict[str, Any]):
    """Of tokens that a filter or a ban had dropped minus infinity was reported, which JSON cannot carry."""
    params = SamplingParams(seed=2, max_tokens=3, **options)
    (whole,) = llm.generate([[1, SECOND, 0]], params, use_tqdm=False)
    parts = list(llm.generate_stream([1, SECOND, 0], params))
    streamed = [entries for part in parts for entries in part.outputs[0].logprobs or []]
    assert whole.outputs[0].logprobs == streamed and len(streamed) == 3
    count = VOCAB if options["logprobs"] == -1 else options["logprobs"]
    assert all(len(entries) >= count for entries in streamed)
    read = [entries for entries in whole.prompt_logprobs or [] if entries is not None]
    assert len(read) == (2 if "prompt_logprobs" in options else 0)
    values = [[entry.logprob for entry in entries.values()] for entries in [*streamed, *read]]
    json.dumps([values, whole.outputs[0].cumulative_logprob], allow_nan=False)


def test_rows_that_want_different_numbers(llm: jaxpaged.LLM):
    """All rows of a batch got the largest number, or the first row's."""
    counts = [None, 0, 3, 1, None, 4]
    found = answers(llm, [[1]] * 6, [greedy(max_tokens=4, logprobs=count) for count in counts])
    for count, each in zip(counts, found, strict=True):
        if count is None:
            assert each.logprobs is None and each.cumulative_logprob is None
        else:
            check(each, count)


def test_ids_that_are_named(llm: jaxpaged.LLM):
    """The sampled token and the named ones, whatever their ranks."""
    found = answer(llm, [1], max_tokens=2, logprob_token_ids=[FOURTH, 0])
    assert found.logprobs is not None
    for entries in found.logprobs:
        assert list(entries) == [BEST, FOURTH, 0]
        assert entries[FOURTH].logprob == pytest.approx(EXACT[FOURTH], abs=2e-3)
        assert entries[0].logprob < -30


def test_the_whole_vocabulary(llm: jaxpaged.LLM):
    """-1 was taken as an end counted from the right: the last token was missing."""
    found = answer(llm, [1], max_tokens=1, logprobs=-1)
    assert found.logprobs is not None
    (entries,) = found.logprobs
    assert sorted(entries) == list(range(VOCAB))
    assert sorted(entry.rank or 0 for entry in entries.values()) == list(range(1, VOCAB + 1))
    assert np.isclose(sum(math.exp(entry.logprob) for entry in entries.values()), 1.0, atol=1e-5)
