"""truncate_prompt_tokens: the prompt's last tokens are kept."""

from __future__ import annotations

import pytest

import jaxpaged
from tests.support.driving import answer, greedy
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

PROMPT = [(7 * index) % 90 + 1 for index in range(50)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> jaxpaged.LLM:
    return small_llm(tiny_checkpoint(tmp_path_factory.mktemp("tiny")), skip_tokenizer_init=True, max_model_len=32)


@pytest.mark.parametrize(("asked", "kept"), [(1, 1), (5, 5), (31, 31), (-1, 31)])
def test_the_last_tokens_are_kept(llm: jaxpaged.LLM, asked: int, kept: int):
    """A prompt cut at its end, or not at all, answers another question."""
    (output,) = llm.generate([PROMPT], greedy(max_tokens=1, truncate_prompt_tokens=asked), use_tqdm=False)
    assert output.prompt_token_ids == PROMPT[-kept:]
    assert output.outputs[0].token_ids == answer(llm, PROMPT[-kept:], max_tokens=1).token_ids


def test_a_shorter_prompt_is_left_alone(llm: jaxpaged.LLM):
    for asked in (4, 100, -1):
        (output,) = llm.generate([PROMPT[:4]], greedy(max_tokens=2, truncate_prompt_tokens=asked), use_tqdm=False)
        assert output.prompt_token_ids == PROMPT[:4]


def test_what_is_left_must_fit(llm: jaxpaged.LLM):
    with pytest.raises(ValueError, match="32"):
        llm.generate([PROMPT], greedy(max_tokens=1, truncate_prompt_tokens=40), use_tqdm=False)
