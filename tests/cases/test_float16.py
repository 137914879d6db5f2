"""Activations beyond float16's range: an error that says so, never token 0 for ever."""

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
BEYOND = 3e5  # float16 ends at 65504


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose residual stream passes float16's range in the first layer, in every token, and stays there."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("loud") / "loud")
    file = path / "model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = (down * (BEYOND / np.abs(down).max())).astype(embeddings.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


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


def test_float16_serves_what_fits(tmp_path: Path) -> None:
    """The error comes from the values, not from the type."""
    path = tiny_checkpoint(tmp_path / "quiet")
    wanted = [output.outputs[0].token_ids[0] for output in answers(path, "float32")]
    outputs = answers(path, "float16")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)
    assert [output.outputs[0].token_ids[0] for output in outputs] == wanted
