"""Preemption by recomputation must not be seen in an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxpaged
from jaxpaged.outputs import CompletionOutput
from jaxpaged.sampling_params import SamplingParams
from tests.support.driving import Arrival, Stream, advance, answers, greedy, join, logprob_rows, run_arrivals
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import byte_tokenizer

PROMPTS = [[base + step for step in range(6)] for base in (100, 300, 500, 700)]
TOKENS = 20  # 26 tokens of a sequence fill 7 blocks; four sequences want 28
POOL = 11  # 10 blocks to use
LONG_PROMPT = list(range(900, 916))  # with its answer it nearly fills the pool alone


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_checkpoint(directory, tokenizer=byte_tokenizer(adds_bos=False))


@pytest.fixture(scope="module")
def roomy(path: Path) -> list[CompletionOutput]:
    """The answers, to LONG_PROMPT last, of an engine that never runs short of blocks."""
    llm = small_llm(path)
    completions = answers(llm, [*PROMPTS, LONG_PROMPT], greedy(max_tokens=TOKENS, logprobs=2, ignore_eos=True))
    assert llm.engine.stats()["preemptions"] == 0
    return completions


def tight(path: Path, **options: Any) -> jaxpaged.LLM:
    return small_llm(path, num_gpu_blocks_override=POOL, max_model_len=40, **options)


def arrivals() -> list[Arrival]:
    params = greedy(max_tokens=TOKENS, ignore_eos=True)
    return [Arrival(step=0, name=str(index), prompt=prompt, params=params) for index, prompt in enumerate(PROMPTS)]


def test_answers_are_those_of_a_large_pool(path: Path, roomy: list[CompletionOutput]):
    """A resumed request was taken for a decoding one, or its outputs were appended twice: tokens missing or doubled."""
    llm = tight(path)
    found = answers(llm, PROMPTS, greedy(max_tokens=TOKENS, logprobs=2, ignore_eos=True))
    assert llm.engine.stats()["preemptions"] > 0
    for got, wanted in zip(found, roomy[:4], strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.text == wanted.text
        assert got.finish_reason == "length"
        for row, wanted_row in zip(logprob_rows(got), logprob_rows(wanted), strict=True):
            assert row == pytest.approx(wanted_row, abs=1e-4)
    assert llm.engine.stats()["output_tokens"] == TOKENS * len(PROMPTS)
    assert llm.engine.stats()["blocks_used"] == 0
    llm.engine.check_invariants()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},  # recomputed in chunks, beside decoding neighbours
        {"enable_prefix_caching": False},  # nothing is found again: all of it is computed anew
        {"async_scheduling": False},
    ],
    ids=["default", "chunks", "no-cache", "one-step"],
)
def test_streams_go_on_without_gap_or_repeat(path: Path, roomy: list[CompletionOutput], options: dict[str, Any]):
    """A stream repeated what it had sent, or lost a piece, when its request was computed again."""
    llm = tight(path, **options)
    streams = run_arrivals(llm, arrivals())
    assert llm.engine.stats()["preemptions"] > 0
    for stream, wanted in zip(streams.values(), roomy[:4], strict=True):
        assert stream.token_ids == wanted.token_ids
        assert stream.text == wanted.text
        assert max(len(delta) for delta in stream.deltas) < len(wanted.text)
    assert llm.engine.stats()["output_tokens"] == TOKENS * len(PROMPTS)


def test_the_same_request_preempted_three_times(path: Path, roomy: list[CompletionOutput]):
    """Each preemption recomputes what the one before had recomputed; a count that drifts shows at the second."""
    llm = tight(path, scheduling_policy="priority")
    others = arrivals()[:3]
    streams = {name: Stream() for name in ("long", *(other.name for other in others))}
    params = greedy(max_tokens=TOKENS, ignore_eos=True)
    join(llm, Arrival(step=0, name="long", prompt=LONG_PROMPT, params=params, priority=1))
    for count, other in enumerate(others, start=1):  # each joins once the long one is under way (again), and goes first
        before = len(streams["long"].token_ids)
        while len(streams["long"].token_ids) == before:
            advance(llm, streams)
        join(llm, other)
        while streams[other.name].last is None or streams[other.name].finish_reason is None:
            advance(llm, streams)
        assert llm.engine.stats()["preemptions"] == count
    while llm.engine.has_unfinished:
        advance(llm, streams)
    assert streams.pop("long").token_ids == roomy[4].token_ids
    assert [stream.token_ids for stream in streams.values()] == [wanted.token_ids for wanted in roomy[:3]]


def test_a_preempted_prompt_counts_its_cached_tokens_once(path: Path):
    """What a request finds of its own work after a preemption is no prefix of somebody else's."""
    llm = tight(path)
    outputs = llm.generate(PROMPTS, greedy(max_tokens=TOKENS, ignore_eos=True), use_tqdm=False)
    assert llm.engine.stats()["preemptions"] > 0
    assert [output.num_cached_tokens for output in outputs] == [0] * 4


def test_preempted_samples_of_one_request(path: Path):
    """Samples that share prompt blocks, preempted apart from each other, took the wrong sample's tokens up again."""
    params = SamplingParams(n=3, temperature=1, seed=11, max_tokens=TOKENS, ignore_eos=True)
    ids = []
    for llm in (small_llm(path), tight(path)):
        outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
        ids.append([completion.token_ids for output in outputs for completion in output.outputs])
    assert llm.engine.stats()["preemptions"] > 0
    assert ids[0] == ids[1]
    assert len({tuple(sample) for sample in ids[0]}) == 6
