"""Length limits: what just fits, what just does not, and what can never fit into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=30)
NEIGHBOURS = [[1, 2, 3], list(range(40, 49))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("limits") / "tiny")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    """32 tokens per sequence, 8 per step, blocks of 4."""
    return small_llm(path, max_model_len=32, max_num_batched_tokens=8, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def tight(path: Path) -> LLM:
    """64 tokens per sequence in a pool of 8 usable blocks of 4."""
    return small_llm(
        path, max_model_len=64, max_num_batched_tokens=8, num_gpu_blocks_override=9, skip_tokenizer_init=True
    )


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 1024, length).tolist()


def run(llm: LLM, prompts: Sequence[list[int]]) -> list[tuple[list[int], str | None]]:
    """Ids and finish reason of each prompt; everything comes back afterwards."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == list(prompts)
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["blocks_used"] == 0
    llm.engine.check_invariants()
    return [(list(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]


def test_one_token_of_room(llm: LLM) -> None:
    """A prompt over the budget of a step goes in chunks; one shorter than max_model_len gives exactly one token."""
    ((tokens, reason),) = run(llm, [prompt(31)])
    assert (len(tokens), reason) == (1, "length")
    alone = run(llm, NEIGHBOURS)
    assert [len(tokens) for tokens, _ in alone] == [29, 23]
    assert run(llm, [NEIGHBOURS[0], prompt(31), NEIGHBOURS[1]]) == [alone[0], (tokens, reason), alone[1]]


@pytest.mark.parametrize(
    ("length", "match"), [(32, "32.*no room is left for an output token"), (33, "max_model_len=32 tokens, got 33")]
)
def test_no_room(llm: LLM, length: int, match: str) -> None:
    """A prompt as long as the limit was called longer; refused ones stayed in the queue and blocked it."""
    alone = run(llm, NEIGHBOURS)
    for prompts in ([prompt(length)], [NEIGHBOURS[0], prompt(length), NEIGHBOURS[1]], [*NEIGHBOURS, prompt(length)]):
        with pytest.raises(ValueError, match=match):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.engine.num_unfinished == 0
        assert not llm.engine.has_unfinished
        assert llm.stats()["blocks_used"] == 0
        assert run(llm, NEIGHBOURS) == alone


@pytest.mark.parametrize(("length", "room"), [(31, 2), (32, 1)])
def test_outgrowing_the_pool_alone_ends_with_length(tight: LLM, llm: LLM, length: int, room: int) -> None:
    """A request that fits as a prompt and outgrows the whole pool was preempted and retried for ever."""
    ((tokens, reason),) = run(tight, [prompt(length)])
    assert (len(tokens), reason) == (room, "length")
    assert_serves_a_short_one(tight, llm)


@pytest.mark.parametrize("length", [33, 40])
def test_a_prompt_larger_than_the_pool_is_refused(tight: LLM, llm: LLM, length: int) -> None:
    """A prompt below max_model_len and above the pool was admitted and retried for ever."""
    with pytest.raises(ValueError, match=f"KV cache, which holds 32 tokens.*got {length}"):
        tight.generate([prompt(length)], GREEDY, use_tqdm=False)
    assert tight.engine.num_unfinished == 0
    assert_serves_a_short_one(tight, llm)


def test_the_largest_with_neighbours(tight: LLM, llm: LLM) -> None:
    """The pool serves one of them at a time; nobody starves."""
    prompts = [prompt(31), prompt(4), prompt(32), prompt(4)]
    got = run(tight, prompts)
    assert [len(tokens) for tokens, _ in got] == [2, 28 + 1, 1, 28 + 1]
    assert got[1] == got[3]
    assert got[1][0][:28] == run(llm, [prompt(4)])[0][0]


def assert_serves_a_short_one(tight: LLM, llm: LLM) -> None:
    """As the engine with the large pool does, whose limit comes one token earlier."""
    ((tokens, reason),) = run(tight, [prompt(4)])
    assert (len(tokens), reason) == (29, "length")
    assert tokens[:28] == run(llm, [prompt(4)])[0][0]
