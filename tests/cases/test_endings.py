"""Where an answer ends: end-of-sequence ids from every file that may name them, and min_tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxpaged
from jaxpaged.sampling_params import SamplingParams
from tests.support.bigram import bigram_checkpoint, chain_table
from tests.support.driving import answer, answers, both_ways, greedy
from tests.support.engines import small_llm
from tests.support.tokenizers import SP_EOS, sentencepiece_tokenizer

ENDS_AT_7 = [4]  # the model goes on with 5 6 7 8 9 9 9 …
ENDS_AT_2 = [10]  # the model goes on with 11 2 12 13 13 13 …
CHAINS = [[4, 5, 6, 7, 8, 9], [10, 11, SP_EOS, 12, 13]]


def scripted(path: Path, *, config: Any, generation: Any, tokenizer_eos: str | None = "</s>") -> jaxpaged.LLM:
    """The two chains, with eos_token_id as config.json and generation_config.json give it (None: not at all)."""
    bigram_checkpoint(
        path,
        chain_table(CHAINS),
        320,
        tokenizer=sentencepiece_tokenizer(adds_bos=False),
        eos=config,
        generation_eos=generation,
        tokenizer_options={"eos_token": tokenizer_eos},
    )
    return small_llm(path)


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory) -> jaxpaged.LLM:
    return scripted(tmp_path_factory.mktemp("two-ends") / "model", config=None, generation=[2, 7])


def assert_ends_at_both(llm: jaxpaged.LLM) -> None:
    for prompt, ids in ((ENDS_AT_7, [5, 6, 7]), (ENDS_AT_2, [11, 2])):
        stream = both_ways(llm, prompt, max_tokens=10)
        assert stream.token_ids == ids
        assert stream.finish_reason == "stop"
        assert stream.last is not None
        assert stream.last.stop_reason is None
        assert stream.text == llm.get_tokenizer().decode(ids[:-1], skip_special_tokens=True)


def test_every_listed_end_counts(two_ends: jaxpaged.LLM):
    """Of the two end tokens in generation_config.json only the tokenizer's was honoured: answers ran past the turn."""
    assert_ends_at_both(two_ends)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_eos"),
    [
        ([7, 2], None, None),  # a list in config.json, and a tokenizer that knows of no end
        (None, 7, "</s>"),  # one id: it must not replace the tokenizer's
        (7, 2, None),  # the two files name one each
        (2, [7, 2], "</s>"),
    ],
)
def test_ends_of_all_files_add_up(tmp_path: Path, config: Any, generation: Any, tokenizer_eos: str | None):
    """The id of one file replaced that of another, so that one of them no longer ended the answer."""
    assert_ends_at_both(scripted(tmp_path / "model", config=config, generation=generation, tokenizer_eos=tokenizer_eos))


def test_the_tokenizers_end_counts_where_the_files_name_none(tmp_path: Path):
    """A config without eos_token_id let the model run on after the tokenizer's own end token."""
    llm = scripted(tmp_path / "model", config=None, generation=None)
    assert answer(llm, ENDS_AT_2, max_tokens=10).token_ids == [11, 2]
    going_on = answer(llm, ENDS_AT_7, max_tokens=6)
    assert (going_on.token_ids, going_on.finish_reason) == ([5, 6, 7, 8, 9, 9], "length")


def test_ignore_eos_ignores_every_end(two_ends: jaxpaged.LLM):
    """The second end id had become an ordinary stop token, which ignore_eos does not touch."""
    seven = both_ways(two_ends, ENDS_AT_7, max_tokens=6, ignore_eos=True)
    assert (seven.token_ids, seven.finish_reason) == ([5, 6, 7, 8, 9, 9], "length")
    two = both_ways(two_ends, ENDS_AT_2, max_tokens=6, ignore_eos=True)
    assert (two.token_ids, two.finish_reason) == ([11, 2, 12, 13, 13, 13], "length")


def test_ignore_eos_keeps_the_callers_stop_ids(two_ends: jaxpaged.LLM):
    """A stop id that is an end id, too, is the caller's wish and stays one."""
    stream = both_ways(two_ends, ENDS_AT_7, max_tokens=6, ignore_eos=True, stop_token_ids=[7])
    assert (stream.token_ids, stream.finish_reason) == ([5, 6, 7], "stop")
    assert stream.last is not None
    assert stream.last.stop_reason == 7


def test_an_end_as_the_last_token_allowed_is_a_stop(two_ends: jaxpaged.LLM):
    """The end at exactly max_tokens was reported as cut off."""
    assert [answer(two_ends, ENDS_AT_7, max_tokens=count).finish_reason for count in (2, 3, 4)] == [
        "length", "stop", "stop",
    ]  # fmt: skip


A, C, D, E = 20, 21, 22, 23


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> jaxpaged.LLM:
    """Wants to end after every token: at 7, else at 2, else it says A. C and D follow each other, E comes second."""
    table = {token: {7: 11.0, SP_EOS: 10.0, A: 5.0} for token in range(320)}
    table |= {C: {D: 20.0, E: 5.0}, D: {C: 20.0, E: 5.0}, E: {D: 20.0}}
    path = tmp_path_factory.mktemp("eager") / "model"
    bigram_checkpoint(
        path, table, 320, tokenizer=sentencepiece_tokenizer(adds_bos=False), eos=None, generation_eos=[2, 7]
    )
    return small_llm(path)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_no_end_before_min_tokens_and_none_too_late(eager: jaxpaged.LLM, min_tokens: int):
    """The second end id slipped through early, and another build forced one token too many."""
    stream = both_ways(eager, [A], min_tokens=min_tokens, max_tokens=12)
    assert stream.token_ids == [A] * min_tokens + [7]
    assert stream.finish_reason == "stop"


def test_stop_ids_wait_for_min_tokens(eager: jaxpaged.LLM):
    """A stop id was sampled, and ended the answer, before min_tokens."""
    plain = both_ways(eager, [D], stop_token_ids=[C], max_tokens=12)
    assert plain.token_ids == [C]
    stream = both_ways(eager, [D], min_tokens=3, stop_token_ids=[C], max_tokens=12)
    assert stream.token_ids == [E, D, E, D, C]
    assert stream.last is not None
    assert (stream.finish_reason, stream.last.stop_reason) == ("stop", C)


def test_stop_strings_wait_for_min_tokens(eager: jaxpaged.LLM):
    """A stop string ended the answer before min_tokens; one inside the first tokens does not end it later either."""
    text = eager.get_tokenizer().token_text(C)
    stream = both_ways(eager, [D], min_tokens=3, stop=[text], max_tokens=12)
    assert stream.token_ids == [C, D, C, D, C]
    assert stream.text == eager.get_tokenizer().decode([C, D, C, D], skip_special_tokens=True)
    assert (stream.finish_reason, stream.last and stream.last.stop_reason) == ("stop", text)


def test_min_tokens_above_max_tokens_is_refused():
    """Neither limit can be kept: the request must be refused, not cut or run on."""
    with pytest.raises(ValueError, match="min_tokens must not be more than max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_min_tokens_of_one_row_leaves_the_others_alone(eager: jaxpaged.LLM):
    """Ids banned for one row of a batch were banned for its neighbours."""
    params = [
        greedy(min_tokens=count, max_tokens=12, logprobs=extra) for count, extra in ((0, None), (4, 2), (1, None))
    ]
    together = answers(eager, [[A]] * 3, params)
    assert [completion.token_ids for completion in together] == [[7], [A] * 4 + [7], [A, 7]]
    alone = [answers(eager, [[A]], param)[0].token_ids for param in params]
    assert [completion.token_ids for completion in together] == alone
