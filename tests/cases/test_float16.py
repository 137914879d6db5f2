"""Values beyond float16's range: an error that says so, never token 0 for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import RequestOutput, SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

PROMPTS = [[5, 6, 7], list(range(40, 57)), [200]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
OPTIONS = {"skip_tokenizer_init": True, "max_num_batched_tokens": 8}
WITHIN, BEYOND = 3e4, 3e5  # float16 ends at 65504


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose residual stream passes float16's range in the first layer, in every token, and stays there."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("loud") / "loud")
    scale(path, {"up_proj": WITHIN, "down_proj": WITHIN})
    return path


def scale(path: Path, largest: dict[str, float]) -> None:
    """Scale matrices of the first MLP so that their largest values are these."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, value in largest.items():
        key = f"model.layers.0.mlp.{name}.weight"
        tensors[key] = tensors[key] * np.float32(value / np.abs(tensors[key]).max())
    save_file(tensors, file, metadata={"format": "pt"})


def answers(path: Path, dtype: str) -> list[RequestOutput]:
    llm = small_llm(path, dtype=dtype, **OPTIONS)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.stats()["blocks_used"] == 0
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_types_serve_it(loud: Path, dtype: str) -> None:
    for output in answers(loud, dtype):
        (completion,) = output.outputs
        assert completion.finish_reason == "length"
        assert completion.cumulative_logprob is not None and np.isfinite(completion.cumulative_logprob)


def test_float16_ends_with_an_error(loud: Path) -> None:
    """The sums overflowed, everything became NaN, and the engine answered with token 0 until the length limit."""
    for output in answers(loud, "float16"):
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.token_ids) == ("error", [])


def test_a_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Cast in silence it would be an infinity."""
    path = tiny_checkpoint(tmp_path / "large")
    scale(path, {"down_proj": BEYOND})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight: .*float16 can hold, got 3e\+05"):
        small_llm(path, dtype="float16", **OPTIONS)


def test_float16_serves_what_fits(tmp_path: Path) -> None:
    """The error comes from the values, not from the type."""
    path = tiny_checkpoint(tmp_path / "quiet")
    wanted = [output.outputs[0].token_ids[0] for output in answers(path, "float32")]
    outputs = answers(path, "float16")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)
    assert [output.outputs[0].token_ids[0] for output in outputs] == wanted
