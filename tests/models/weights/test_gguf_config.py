"""GGUF metadata gives the config that the Hugging Face checkpoint has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from jaxpaged.models.weights.gguf import GGUFSource
from tests.support.gguf_files import add_metadata, finish
from tests.support.gguf_models import model_config_of, opened_gguf, tiny_model


def test_sizes_and_ids_reach_the_config(tmp_path: Path):
    config, tensors = tiny_model(head_dim=32, rms_norm_eps=1e-5, rope_theta=123456.0)
    metadata = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.padding_token_id": 3,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    source = opened_gguf(tmp_path, config, tensors, metadata=metadata)
    got = model_config_of(source)
    assert (got.head_dim, got.vocab_size, got.max_position, got.norm_eps) == (32, 1024, 512, 1e-5)
    assert got.rope.theta == 123456.0
    assert (got.bos_id, got.eos_ids) == (1, frozenset({2, 7}))
    assert source.config_dict()["eos_token_id"] == 2
    assert source.generation_config() == {
        "bos_token_id": 1,
        "pad_token_id": 3,
        "eos_token_id": [2, 7],
        "temperature": 0.6,
        "top_k": 20,
    }


@pytest.mark.parametrize("linear", [{"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0},
                                    {"{arch}.rope.scale_linear": 4.0}])  # fmt: skip
def test_linear_rope_scaling(tmp_path: Path, linear: dict[str, Any]):
    source = opened_gguf(tmp_path, *tiny_model(), metadata=linear)
    assert model_config_of(source).rope.kind == "linear"
    assert model_config_of(source).rope.factor == 4.0


def test_yarn_rope_scaling(tmp_path: Path):
    metadata = {
        "{arch}.rope.scaling.type": "yarn",
        "{arch}.rope.scaling.factor": 4.0,
        "{arch}.rope.scaling.original_context_length": 128,
        "{arch}.rope.scaling.yarn_beta_fast": 16.0,
    }
    config, tensors = tiny_model()
    source = opened_gguf(tmp_path, config, tensors, metadata=metadata)
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}
    assert source.config_dict()["rope_scaling"] == wanted
    assert model_config_of(source).rope.kind == "yarn"
    scaled = opened_gguf(tmp_path, config, tensors, metadata=metadata | {"{arch}.rope.scaling.attn_factor": 0.5})
    attention = scaled.config_dict()["rope_scaling"]["attention_factor"]
    assert attention == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


def _llama3_table(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The converter's loop."""
    divisors = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (32.0, 4096)])
def test_llama3_rope_scaling_is_recovered_from_its_table(tmp_path: Path, factor: float, original: int):
    """Such files hold only the divisors, as rope_freqs.weight; ignoring them spoils long contexts silently."""
    config, tensors = tiny_model(head_dim=64, rope_theta=500000.0)
    table = _llama3_table(64, 500000.0, factor, 1.0, 4.0, original)
    source = opened_gguf(tmp_path, config, tensors, raw={"rope_freqs.weight": (table, Kind.F32)})
    assert "rope_freqs.weight" not in source.names()
    assert source.config_dict()["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    assert model_config_of(source).rope.kind == "llama3"


def test_a_table_of_ones_is_no_scaling_and_an_unknown_one_is_refused(tmp_path: Path):
    config, tensors = tiny_model(head_dim=64)
    ones = opened_gguf(tmp_path, config, tensors, raw={"rope_freqs.weight": (np.ones(32, np.float32), Kind.F32)})
    assert model_config_of(ones).rope.kind == "default"
    table = np.linspace(1, 3, 32, dtype=np.float32)
    unknown = opened_gguf(tmp_path, config, tensors, raw={"rope_freqs.weight": (table, Kind.F32)})
    with pytest.raises(ValueError, match="longrope"):
        model_config_of(unknown)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3' is not supported"),
        ("llama", {"{arch}.expert_count": 8}, "mixtures of experts"),
        ("llama", {"{arch}.rope.scaling.type": "longrope", "{arch}.rope.scaling.factor": 2.0}, "'longrope'"),
        ("llama", {"{arch}.rope.scaling.type": "linear"}, "llama.rope.scaling.factor: wanted a number, got None"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        opened_gguf(tmp_path, *tiny_model(), architecture=architecture, metadata=metadata)


def test_layers_of_different_sizes_are_refused(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_metadata(writer, {"llama.embedding_length": 64, "llama.attention.head_count": [4, 8]})
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    with pytest.raises(ValueError, match=r"head_count: wanted one whole number, got \[4, 8\]"):
        GGUFSource(finish(writer))
