"""Rope settings and an explicit head_dim, as the reference understands them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from tests.support.driving import answer, answers, greedy, logprob_rows
from tests.support.engines import small_llm
from tests.support.goldens import TinyGoldens, load_tiny
from tests.support.tiny import tiny_checkpoint

# As in the test of all golden outputs, so that the compiled programs are shared.
SMALL = {"max_num_batched_tokens": 8, "skip_tokenizer_init": True}
TINY = {tiny.name: tiny for tiny in load_tiny()}
TOLERANCE = 1e-4


def llm_of(path: Path, tiny: TinyGoldens, **options: Any) -> jaxpaged.LLM:
    return small_llm(tiny_checkpoint(path / "model", seed=tiny.seed, **tiny.config), **SMALL, **options)


def assert_answers(llm: jaxpaged.LLM, tiny: TinyGoldens) -> None:
    """The five best of every step, by id and by value."""
    params = greedy(max_tokens=40, logprobs=5)
    found = answers(llm, [golden.prompt_ids for golden in tiny.goldens], params)
    for golden, completion in zip(tiny.goldens, found, strict=True):
        assert completion.token_ids == golden.token_ids
        for step, row in enumerate(logprob_rows(completion)):
            wanted = dict(zip(golden.top_ids[step].tolist(), golden.top_logprobs[step].tolist(), strict=True))
            got = sorted(row.values(), reverse=True)
            np.testing.assert_allclose(got, golden.top_logprobs[step], atol=TOLERANCE, err_msg=f"step {step}")
            assert all(abs(row[token] - wanted[token]) <= TOLERANCE for token in row.keys() & wanted.keys())


@pytest.mark.parametrize("name", [name for name in TINY if name.startswith("rope-")])
def test_every_rope_kind_is_the_references(tmp_path: Path, name: str):
    """Scaling was dropped without notice: short prompts looked fine, positions beyond the trained ones did not."""
    lengths = [len(golden.prompt_ids) for golden in TINY[name].goldens]
    ends = (lengths.index(min(lengths)), lengths.index(max(lengths)))  # prompts of 3 and 88 tokens, 40 steps each
    tiny = dataclasses.replace(TINY[name], goldens=tuple(TINY[name].goldens[end] for end in ends))
    positions = {len(golden.prompt_ids) - 1 + step for golden in tiny.goldens for step in range(len(golden.token_ids))}
    assert positions >= ({100, 126} if name == "rope-theta" else {5, 31, 33, 100, 126})
    assert_answers(llm_of(tmp_path, tiny), tiny)


def test_rope_theta_absent_means_the_default(tmp_path: Path):
    """An engine had another default than the reference for a config without rope_theta."""
    path = tiny_checkpoint(tmp_path / "model", omit=["rope_theta"])
    assert_answers(small_llm(path, **SMALL), TINY["default"])


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
KINDS = {"default": {}, "linear": {"factor": 4.0}, "dynamic": {"factor": 4.0}, "llama3": LLAMA3, "yarn": YARN}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_all_spellings_mean_the_same(tmp_path: Path, kind: str, theta: float):
    """Older configs say "type", newer ones "rope_type" or nest it all in rope_parameters: one of them was missed."""
    rest = KINDS[kind]
    spellings: list[dict[str, Any]] = [
        {"rope_theta": theta, "rope_scaling": {"type": kind, **rest}},
        {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **rest}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **rest}},
    ]
    ropes = []
    for index, spelling in enumerate(spellings):
        omit = [] if "rope_theta" in spelling else ["rope_theta"]
        path = tiny_checkpoint(tmp_path / str(index), omit=omit, **spelling)
        ropes.append(small_llm(path, **SMALL).engine.model_config.rope)
    assert ropes[0] == ropes[1] == ropes[2]
    assert (ropes[0].kind, ropes[0].theta) == (kind, theta)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_rope_kind_is_refused(tmp_path: Path, key: str):
    """A kind nobody knows was taken for none."""
    path = tiny_checkpoint(tmp_path / "model", rope_scaling={key: "bogus", "factor": 2.0})
    with pytest.raises(ValueError, match="unknown rope type 'bogus'"):
        small_llm(path, **SMALL)


@pytest.mark.parametrize(
    ("positions", "scaling", "wanted"),
    [
        (64, None, 64),
        (64, {"rope_type": "linear", "factor": 4.0}, 256),
        (32, {"rope_type": "dynamic", "factor": 4.0}, 128),
        (128, {"rope_type": "yarn", **YARN}, 128),
        (32, {"rope_type": "yarn", "factor": 4.0}, 128),
        (128, {"rope_type": "llama3", **LLAMA3}, 128),
    ],
)
def test_the_length_limit_follows_the_scaling(tmp_path: Path, positions: int, scaling: Any, wanted: int):
    """The limit stayed that of the unscaled model, or was beyond what its position table held."""
    path = tiny_checkpoint(tmp_path / "model", max_position_embeddings=positions, rope_scaling=scaling)
    assert small_llm(path, **SMALL, max_model_len=None).engine.limits.max_model_len == wanted
    with pytest.raises(ValueError, match=f"max_model_len: wanted at most the model's {wanted}, got {wanted + 1}"):
        small_llm(path, **SMALL, max_model_len=wanted + 1)


def test_no_position_beyond_the_limit(tmp_path: Path):
    """A position beyond the table took the last row in silence: a long answer fell apart instead of ending."""
    path = tiny_checkpoint(tmp_path / "model", max_position_embeddings=64)
    llm = small_llm(path, **SMALL, max_model_len=None)
    prompt = list(range(40))
    completion = answer(llm, prompt, max_tokens=100)
    assert (len(completion.token_ids), completion.finish_reason) == (24, "length")
    with pytest.raises(ValueError, match="65"):
        llm.generate([list(range(65))], greedy(), use_tqdm=False)


@pytest.mark.parametrize("name", ["head-dim-32", "head-dim-16-hidden-60", "head-dim-null"])
def test_an_explicit_head_dim_is_the_references(tmp_path: Path, name: str):
    """The head size was taken as hidden size over heads although the config states another, or none divides."""
    assert_answers(llm_of(tmp_path, TINY[name]), TINY[name])


@pytest.mark.parametrize(
    ("name", "block_bytes"),
    [
        # keys and values · layers · kv heads · tokens of a block · head_dim · bytes of a float32
        ("head-dim-32", 2 * 2 * 2 * 4 * 32 * 4),
        ("head-dim-16-hidden-60", 2 * 2 * 2 * 4 * 16 * 4),
        ("head-dim-null", 2 * 2 * 2 * 4 * 16 * 4),
    ],
)
def test_blocks_are_sized_by_the_stated_head_dim(tmp_path: Path, name: str, block_bytes: int):
    """The cache was sized by hidden size over heads: half the memory it then took."""
    for budget, blocks in ((12 * block_bytes, 12), (12 * block_bytes - 1, 11)):
        llm = llm_of(tmp_path, TINY[name], kv_cache_memory_bytes=budget, num_gpu_blocks_override=None, max_model_len=16)
        assert llm.engine.limits.num_blocks == blocks
    kv_bytes = llm_of(
        tmp_path,
        TINY[name],
        kv_cache_dtype="bfloat16",
        kv_cache_memory_bytes=12 * block_bytes,
        num_gpu_blocks_override=None,
        max_model_len=16,
    ).engine.limits.num_blocks
    assert kv_bytes == 24


@pytest.mark.parametrize("name", ["head-dim-32", "head-dim-16-hidden-60"])
def test_an_explicit_head_dim_on_two_devices(tmp_path: Path, name: str):
    """Heads were split by a width computed from the hidden size."""
    assert_answers(llm_of(tmp_path, TINY[name], tensor_parallel_size=2), TINY[name])
