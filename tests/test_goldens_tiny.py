"""The whole engine against Hugging Face float32 on tiny checkpoints: one per switch of a Llama-family config."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpaged import SamplingParams
from jaxpaged.outputs import RequestOutput
from tests.support.engines import small_llm
from tests.support.goldens import Golden, TinyGoldens, check_greedy, load_tiny, weights_digest
from tests.support.tiny import tiny_checkpoint

CASES = load_tiny()
# Two token buckets (1 and 8): long prompts come in chunks of up to 8 tokens, mixed with others' decoding.
SMALL = {"max_num_batched_tokens": 8, "skip_tokenizer_init": True}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_and_logprobs_equal_hugging_face(case: TinyGoldens, tmp_path: Path) -> None:
    """All prompts of a case in one batch, as token ids."""
    path = tiny_checkpoint(tmp_path / "model", seed=case.seed, **case.config)
    assert weights_digest(path) == case.weights_sha256, "numpy made other weights than the golden file was made with"
    llm = small_llm(path, **SMALL)
    outputs = llm.generate([golden.prompt_ids for golden in case.goldens], greedy(case.goldens[0]), use_tqdm=False)
    for golden, output in zip(case.goldens, outputs, strict=True):
        check(golden, output)
    assert llm.engine.num_unfinished == 0
    llm.engine.check_invariants()


@pytest.mark.parametrize("name", ["default", "rope-dynamic", "window-second-layer"])
def test_whole_prompts_in_one_step(name: str, tmp_path: Path) -> None:
    """As above with a budget that takes every prompt whole: attention sees all of a prompt's queries at once."""
    (case,) = [case for case in CASES if case.name == name]
    path = tiny_checkpoint(tmp_path / "model", seed=case.seed, **case.config)
    llm = small_llm(path, **{**SMALL, "max_num_batched_tokens": 256, "block_size": 16})
    outputs = llm.generate([golden.prompt_ids for golden in case.goldens], greedy(case.goldens[0]), use_tqdm=False)
    for golden, output in zip(case.goldens, outputs, strict=True):
        check(golden, output)


def test_every_config_switch_has_goldens() -> None:
    """A case lost from the golden file must not go unnoticed."""
    names = {case.name for case in CASES}
    assert {"tied", "attention-bias", "mlp-bias", "head-dim-32", "gqa-3", "mqa", "window-4", "window-off"} <= names
    ropes = ("linear", "dynamic", "llama3", "yarn", "parameters-yarn", "theta")
    assert {f"rope-{kind}" for kind in ropes} <= names
    assert len(CASES) >= 30


def greedy(golden: Golden) -> SamplingParams:
    """As the goldens were made."""
    return SamplingParams(temperature=0, max_tokens=len(golden.token_ids), ignore_eos=True, logprobs=0)


def check(golden: Golden, output: RequestOutput) -> None:
    """Tokens equal, log-probabilities within 1e-3, ended by length."""
    (completion,) = output.outputs
    assert completion.logprobs is not None
    chosen = [entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)]
    check_greedy(golden, completion.token_ids, chosen, tolerance=1e-3)
    assert completion.finish_reason == "length"
