"""Bad input at every entrance: a clear error, nothing left queued, and the next call works."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import byte_tokenizer

V = 1024
GOOD = [[1, 2, 3], list(range(40, 49))]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("bad-input") / "tiny",
        tokenizer=byte_tokenizer(adds_bos=False),
        tokenizer_options={"chat_template": TEMPLATE},
    )


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return small_llm(path, max_model_len=32, max_num_batched_tokens=8)


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[list[int]]:
    return answers(llm)


def answers(llm: LLM) -> list[list[int]]:
    """What the good prompts give, and that every one gives something."""
    outputs = llm.generate(GOOD, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == GOOD
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextlib.contextmanager
def refused(llm: LLM, wanted: list[list[int]], match: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """The block must raise; afterwards nothing is queued, no block is held, and the next call gives its results."""
    with pytest.raises(error, match=match):
        yield
    assert llm.engine.num_unfinished == 0
    assert not llm.engine.has_unfinished
    assert llm.stats()["blocks_used"] == 0
    llm.engine.check_invariants()
    assert answers(llm) == wanted


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "at least one token"),
    ([""], "at least one token"),
    ([[]], "at least one token"),
    ({"prompt_token_ids": []}, "at least one token"),
    ([-1], r"in \[0, 1024\).*-1"),
    ([V], r"in \[0, 1024\).*1024"),
    ([5, 2**31, 6], "2147483648"),
    ([5, 2**80], "1208925819614629174706176"),
    ([5, -3], "got -3"),
    ([[5, -3]], "got -3"),
    ([True], "wanted text.*True"),
    ([[True, 5]], "wanted text.*True"),
    ([1.0], r"wanted text.*1\.0"),
    ([5, 2.5], r"wanted text"),
    ([[5, 2.5]], r"wanted text.*2\.5"),
    ([None], "wanted text.*None"),
    (None, "wanted text.*NoneType"),
    (7, "wanted text.*int"),
    (b"abc", "wanted text.*bytes"),
    ([b"abc"], "wanted text.*abc"),
    (np.array([1, 2]), "wanted text.*ndarray"),
    ({"promt": "a"}, "promt"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
    ({}, "wanted text"),
    ({1: "a", "b": 2}, "wanted text"),
    ({"prompt": [1]}, "list under 'prompt'"),
    ({"prompt": None}, "NoneType under 'prompt'"),
    ({"prompt_token_ids": "abc"}, "str under 'prompt_token_ids'"),
    ({"prompt_token_ids": [1.5]}, r"1\.5"),
    ([[[5]]], "wanted text"),
]


@pytest.mark.parametrize(("prompt", "match"), BAD_PROMPTS, ids=[repr(prompt) for prompt, _ in BAD_PROMPTS])
def test_bad_prompts(llm: LLM, wanted: list[list[int]], prompt: Any, match: str) -> None:
    """Ids out of range are clamped or wrapped by a gather, which answers for another token without a word."""
    with refused(llm, wanted, match):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    with refused(llm, wanted, f"{match}|wanted text"):  # a stream takes one prompt, so a list of prompts is none
        llm.generate_stream(prompt, GREEDY)
    if not isinstance(prompt, list):
        with refused(llm, wanted, f"{match}|wanted text"):
            llm.generate([GOOD[0], prompt, GOOD[1]], GREEDY, use_tqdm=False)


def test_the_bad_one_of_several_is_named(llm: LLM, wanted: list[list[int]]) -> None:
    """A list refused half way left its first prompts in the engine; their outputs turned up in the next call."""
    with refused(llm, wanted, "prompt 1: .*got -1"):
        llm.generate([GOOD[0], [-1], GOOD[1]], GREEDY, use_tqdm=False)
    with refused(llm, wanted, "prompt 2: .*33"):
        llm.generate([*GOOD, list(range(33))], GREEDY, use_tqdm=False)


def test_unusual_good_prompts(llm: LLM) -> None:
    """No prompts, no results; the last id of the embedding has no text and is a token like any other."""
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    for prompt in ([V - 1], [np.int64(5), np.uint8(7)], range(3), (4, 5)):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [int(token) for token in prompt]
        assert len(output.outputs[0].token_ids) == 6
    (one,) = llm.generate({"prompt": "the end"}, GREEDY, use_tqdm=False)
    (other,) = llm.generate("the end", GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_bad_prompts_while_a_stream_is_open(llm: LLM, wanted: list[list[int]]) -> None:
    """Other requests go on; what comes for the stream while others are served is not lost."""
    params = SamplingParams(temperature=0, max_tokens=20)
    (whole,) = llm.generate([9, 8, 7], params, use_tqdm=False)
    stream = llm.generate_stream([9, 8, 7], params)
    got = list(next(stream).outputs[0].token_ids)
    for prompt, match in BAD_PROMPTS[:9]:
        with pytest.raises(ValueError, match=match):
            llm.generate(prompt, GREEDY, use_tqdm=False)
        assert llm.engine.num_unfinished == 1
        got += next(stream).outputs[0].token_ids
    assert answers(llm) == wanted
    got += [token for output in stream for token in output.outputs[0].token_ids]
    assert got == list(whole.outputs[0].token_ids)


def test_two_streams_taken_in_turns(llm: LLM) -> None:
    """A stream's step made tokens of the other one, and threw them away."""
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(GOOD, params, use_tqdm=False)
    streams = [llm.generate_stream(prompt, params) for prompt in GOOD]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            for output in [next(stream, None)]:
                got[index] += output.outputs[0].token_ids if output else []
    assert got == [list(output.outputs[0].token_ids) for output in outputs]
    assert llm.engine.num_unfinished == 0


def test_a_stream_never_begun_queues_nothing(llm: LLM, wanted: list[list[int]]) -> None:
    stream = llm.generate_stream([5, 6], GREEDY)
    assert llm.engine.num_unfinished == 0
    stream.close()
    assert answers(llm) == wanted


BAD_PARAMS: list[tuple[Any, str]] = [
    ([], "sampling_params: wanted one for each of the 2 prompts, got 0"),
    ([GREEDY], "sampling_params: wanted one for each of the 2 prompts, got 1"),
    ([GREEDY] * 3, "sampling_params: wanted one for each of the 2 prompts, got 3"),
    ({"temperature": 0}, "sampling_params: wanted SamplingParams"),
    ([GREEDY, {"temperature": 0}], "sampling_params: wanted SamplingParams"),
    ("greedy", "sampling_params: wanted SamplingParams"),
    (SamplingParams, "sampling_params: wanted SamplingParams"),
    (0.5, "sampling_params: wanted SamplingParams"),
    (SamplingParams(logprobs=21), "logprobs.*20"),
    ([GREEDY, SamplingParams(stop_token_ids=[V])], "prompt 1: stop_token_ids.*1024"),
]


@pytest.mark.parametrize(("params", "match"), BAD_PARAMS, ids=[match for _, match in BAD_PARAMS])
def test_bad_sampling_params(llm: LLM, wanted: list[list[int]], params: Any, match: str) -> None:
    with refused(llm, wanted, match):
        llm.generate(GOOD, params, use_tqdm=False)
    conversation = [{"role": "user", "content": "hi"}]
    with refused(llm, wanted, match):
        llm.chat([conversation, conversation], params, use_tqdm=False)
    if not isinstance(params, list):
        with refused(llm, wanted, match):
            llm.generate_stream(GOOD[0], params)


@pytest.mark.parametrize(
    ("priority", "match"),
    [([1], "got 1"), ([1, 2, 3], "got 3"), ([1, None], "list of integers"), ("ab", "list of integers"), (5, "list")],
)
def test_bad_priorities(llm: LLM, wanted: list[list[int]], priority: Any, match: str) -> None:
    with refused(llm, wanted, f"priority: .*{match}"):
        llm.generate(GOOD, GREEDY, use_tqdm=False, priority=priority)


BAD_MESSAGES: list[tuple[Any, str]] = [
    ("hi", "messages: wanted"),
    ([], "messages: wanted"),
    ([[]], "messages: wanted"),
    ([{}], "role"),
    ([{"content": "hi"}], "role"),
    ([5], "messages: wanted"),
    (None, "messages: wanted"),
    ({"role": "user", "content": "hi"}, "messages: wanted"),
    ([[{"role": "user", "content": "hi"}], "hi"], "messages: wanted"),
    ([{"role": "tool", "content": "hi"}], "no tools here"),
    ([{"role": "user", "content": "much too long for this model"}], "max_model_len"),
]


@pytest.mark.parametrize(("messages", "match"), BAD_MESSAGES, ids=[repr(messages) for messages, _ in BAD_MESSAGES])
def test_bad_messages(llm: LLM, wanted: list[list[int]], messages: Any, match: str) -> None:
    with refused(llm, wanted, match):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_text_without_a_tokenizer(path: Path) -> None:
    llm = small_llm(path, max_model_len=32, max_num_batched_tokens=8, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate("hello")
    with pytest.raises(ValueError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([5], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="tokenizer"):
        llm.get_tokenizer()
    assert llm.engine.num_unfinished == 0
