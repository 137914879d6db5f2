"""Requests that run together must not see each other: any lengths, order, and steps of joining and leaving."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import jaxpaged
from tests.support.bigram import bigram_checkpoint, chain_table
from tests.support.driving import Arrival, answer, answers, greedy, run_arrivals
from tests.support.engines import small_llm
from tests.support.goldens import load_tiny
from tests.support.tiny import tiny_checkpoint

# Prompt length: tokens to generate. Lengths around the larger block size, and answers that end at different steps.
TOKENS = {1: 9, 15: 4, 16: 12, 17: 6, 33: 2}
PROMPTS = {length: [(37 * length + 11 * step) % 1024 for step in range(length)] for length in TOKENS}
FOUR = (1, 15, 16, 17)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def engine(path: Path, block_size: int) -> jaxpaged.LLM:
    return small_llm(path, block_size=block_size, skip_tokenizer_init=True, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def solo(path: Path) -> dict[int, list[int]]:
    """Each request's answer, alone in an engine whose answers to the reference's prompts are the reference's."""
    llm = engine(path, 4)
    (reference,) = [tiny for tiny in load_tiny() if tiny.name == "default"]
    for golden in reference.goldens:
        assert answer(llm, golden.prompt_ids, max_tokens=40).token_ids == golden.token_ids
    return {length: answer(llm, PROMPTS[length], max_tokens=TOKENS[length]).token_ids for length in TOKENS}


@pytest.fixture(scope="module", params=[4, 16])
def llm(request, path: Path) -> jaxpaged.LLM:
    return engine(path, request.param)


def arrival(length: int, step: int) -> Arrival:
    return Arrival(step=step, name=str(length), prompt=PROMPTS[length], params=greedy(max_tokens=TOKENS[length]))


def assert_solo(llm: jaxpaged.LLM, arrivals: list[Arrival], solo: dict[int, list[int]]) -> None:
    streams = run_arrivals(llm, arrivals)
    assert {name: stream.token_ids for name, stream in streams.items()} == {
        arrival.name: solo[int(arrival.name)] for arrival in arrivals
    }


def test_all_lengths_at_once(llm: jaxpaged.LLM, solo: dict[int, list[int]]):
    """Cache positions of the second and later requests were not aligned to a block: only batches of one were right."""
    found = answers(llm, list(PROMPTS.values()), [greedy(max_tokens=count) for count in TOKENS.values()])
    assert dict(zip(PROMPTS, (completion.token_ids for completion in found), strict=True)) == solo


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_joining_and_leaving_at_different_steps(llm: jaxpaged.LLM, solo: dict[int, list[int]], gap: int):
    """A request that joined took a slot, or blocks, that another had just left, with something of it."""
    for lengths in (tuple(TOKENS), tuple(TOKENS)[::-1]):
        assert_solo(llm, [arrival(length, gap * turn) for turn, length in enumerate(lengths)], solo)


def test_any_order_of_four(llm: jaxpaged.LLM, solo: dict[int, list[int]]):
    """Answers changed with the order in which a batch was put together."""
    for order in itertools.permutations(FOUR):
        assert_solo(llm, [arrival(length, step) for step, length in zip((0, 0, 1, 3), order, strict=True)], solo)


def test_a_length_limit_that_fills_no_whole_attention_tile(path: Path, solo: dict[int, list[int]]):
    """Block tables were as wide as the limit needs and the compiled programs' wider: the first step failed."""
    for limit in (45, 50):
        llm = small_llm(path, skip_tokenizer_init=True, max_model_len=limit)
        assert answer(llm, PROMPTS[33], max_tokens=TOKENS[33]).token_ids == solo[33]
        assert len(answer(llm, PROMPTS[33], max_tokens=100).token_ids) == limit - 33


def test_forty_answers_belong_to_their_prompts(tmp_path: Path):
    """Under load answers went to other callers' prompts."""
    end = 319
    chains = [[start, *(start + 40 * link for link in range(1, 2 + start % 6)), end] for start in range(40)]
    llm = small_llm(bigram_checkpoint(tmp_path / "model", chain_table(chains), 320, eos=end), skip_tokenizer_init=True)
    prompts = [[start] * (1 + start % 7) for start in range(40)]
    wanted = [chain[1:] for chain in chains]
    params = greedy(max_tokens=20)
    assert [completion.token_ids for completion in answers(llm, prompts, params)] == wanted
    arrivals = [Arrival(step=start % 9, name=str(start), prompt=prompts[start], params=params) for start in range(40)]
    streams = run_arrivals(llm, arrivals)
    assert [streams[str(start)].token_ids for start in range(40)] == wanted
