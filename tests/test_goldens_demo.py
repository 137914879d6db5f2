"""The demo model through LLM("demo"), quantised weights and all, against Hugging Face float32 on the same weights."""

from __future__ import annotations

import pytest

import jaxpaged
from jaxpaged import LLM, SamplingParams
from jaxpaged.outputs import RequestOutput
from tests.support.goldens import Golden, check_greedy, load_smollm2

pytestmark = pytest.mark.e2e

GOLDENS = load_smollm2()
ALONE = ("chat-short", "letter-257", "newline")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return jaxpaged.LLM(
        "demo",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=40,
        max_num_batched_tokens=256,
        warmup=False,
        use_tqdm_on_load=False,
    )


def test_there_are_enough_prompts() -> None:
    assert len(GOLDENS) >= 24
    assert {len(golden.token_ids) for golden in GOLDENS} == {64}
    assert set(ALONE) < {golden.name for golden in GOLDENS}


def test_all_prompts_in_one_batch(llm: LLM) -> None:
    """Tokens equal up to close calls of the reference, log-probabilities within 1e-3.

    The longest come first, so that the short ones start, and end, together: few programs have to be compiled.
    """
    longest_first = sorted(GOLDENS, key=lambda golden: -len(golden.prompt_ids))
    outputs = llm.generate([golden.prompt_ids for golden in longest_first], greedy(), use_tqdm=False)
    for golden, output in zip(longest_first, outputs, strict=True):
        check(golden, output)
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["preemptions"] == 0


@pytest.mark.parametrize("name", ALONE)
def test_alone(llm: LLM, name: str) -> None:
    (golden,) = [golden for golden in GOLDENS if golden.name == name]
    check(golden, llm.generate(golden.prompt_ids, greedy(), use_tqdm=False)[0])


def test_text_in_text_out(llm: LLM) -> None:
    """The tokenizer of the GGUF file makes the same prompt ids, and text goes in and comes out."""
    whole = [golden for golden in GOLDENS if golden.text and not golden.text_is_cut]
    outputs = llm.generate([golden.text for golden in whole], greedy(max_tokens=2), use_tqdm=False)
    for golden, output in zip(whole, outputs, strict=True):
        assert output.prompt_token_ids == golden.prompt_ids
        assert list(output.outputs[0].token_ids) == golden.token_ids[:2]
        assert output.outputs[0].text == llm.get_tokenizer().decode(golden.token_ids[:2], skip_special_tokens=True)


def greedy(max_tokens: int = 64) -> SamplingParams:
    """As the goldens were made."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)


def check(golden: Golden, output: RequestOutput) -> None:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    chosen = [entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)]
    check_greedy(golden, completion.token_ids, chosen, tolerance=1e-3)
