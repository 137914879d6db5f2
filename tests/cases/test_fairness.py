"""Who is served while long prompts, or ever more of them, come in."""

from __future__ import annotations

import pytest

import jaxpaged
from tests.support.driving import Arrival, Stream, advance, answer, greedy, join
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

BUDGET = 16
LONG_PROMPT = [7 * step % 90 for step in range(200)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> jaxpaged.LLM:
    return small_llm(
        tiny_checkpoint(tmp_path_factory.mktemp("fair") / "tiny"),
        skip_tokenizer_init=True,
        max_num_batched_tokens=BUDGET,
        max_model_len=256,
        enable_prefix_caching=False,
    )


def begin(llm: jaxpaged.LLM, streams: dict[str, Stream], name: str, prompt: list[int], max_tokens: int) -> Stream:
    params = greedy(max_tokens=max_tokens, ignore_eos=True)
    join(llm, Arrival(step=0, name=name, prompt=prompt, params=params))
    streams[name] = Stream()
    return streams[name]


def test_a_stream_goes_on_while_a_long_prompt_is_read(llm: jaxpaged.LLM) -> None:
    """Every step that had a piece of a prompt left the running requests out: they stood still until it was read."""
    streams: dict[str, Stream] = {}
    a = begin(llm, streams, "a", [1, 2, 3], 60)
    while not a.token_ids:
        advance(llm, streams)
    b = begin(llm, streams, "b", LONG_PROMPT, 4)
    steps = 0
    while not b.token_ids:
        before = len(a.token_ids)
        advance(llm, streams)
        steps += 1
        assert len(a.token_ids) == before + 1
    assert 200 / (BUDGET - 1) < steps <= 200 / (BUDGET - 1) + 3  # the prompt has all of the budget but a's token
    while llm.engine.has_unfinished:
        advance(llm, streams)
    assert a.token_ids == answer(llm, [1, 2, 3], max_tokens=60, ignore_eos=True).token_ids
    assert b.token_ids == answer(llm, LONG_PROMPT, max_tokens=4, ignore_eos=True).token_ids


def test_prompts_without_end(llm: jaxpaged.LLM) -> None:
    """Prompts that filled every step: who ran before got no token any more, and the last to come waited for ever.

    A prompt of 12 tokens a step leaves room for what already runs, so each has its first token at most two steps later:
    one reads the prompt, the next takes in the result.
    """
    streams: dict[str, Stream] = {}
    a = begin(llm, streams, "first", [1, 2, 3], 60)
    came: dict[str, int] = {}
    waits: dict[str, int] = {}
    ended = 0
    for step in range(100):
        name = f"r{step}"
        begin(llm, streams, name, [(step + 5 * index) % 90 for index in range(12)], 2)
        came[name] = step
        advance(llm, streams)
        waits |= {each: step - came[each] for each in came if each not in waits and streams[each].token_ids}
        ended = ended or (step + 1 if len(a.token_ids) == 60 else 0)
    assert 60 <= ended <= 63
    assert max(waits.values()) <= 2
    assert all(came[name] > 95 for name in came if name not in waits)
    while llm.engine.has_unfinished:
        advance(llm, streams)
    assert llm.stats()["blocks_used"] == 0
