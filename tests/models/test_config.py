"""A Hugging Face config is read as transformers reads it, and what cannot be run is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from jaxpaged.models.config import ModelConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


def read(*overrides: dict[str, Any], generation: dict[str, Any] | None = None, omit: str = "") -> ModelConfig:
    config = dict(BASE)
    for override in overrides:
        config |= override
    config.pop(omit, None)
    return ModelConfig.from_hf(config, generation)


def test_plain_llama() -> None:
    config = read({"rms_norm_eps": 1e-5, "rope_theta": 5e5, "bos_token_id": 1, "torch_dtype": "bfloat16"})
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.mlp_dim, config.num_layers, config.vocab_size) == (64, 128, 4, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.norm_eps, config.rope.theta, config.bos_id, config.dtype) == (1e-5, 5e5, 1, "bfloat16")
    assert (config.hidden_act, config.windows, config.max_position) == ("silu", (None,) * 4, 512)
    assert not (config.tie_word_embeddings or config.attention_bias or config.attention_out_bias or config.mlp_bias)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Ministral", "Qwen2"])
def test_absent_keys_are_what_transformers_assumes(name: str) -> None:
    """A key left out of config.json has a meaning: Mistral without sliding_window has a window of 4096."""
    sizes = {"hidden_size": 256, "num_attention_heads": 32, "num_hidden_layers": 30}
    reference = getattr(transformers, f"{name}Config")(**sizes)
    config = read(
        {
            "architectures": [f"{name}ForCausalLM"],
            "vocab_size": reference.vocab_size,
            "intermediate_size": reference.intermediate_size,
            **sizes,
        },
        omit="num_key_value_heads",
    )
    assert config.num_kv_heads == reference.num_key_value_heads
    unstated = {key: value for key, value in BASE.items() if key not in ("max_position_embeddings",)}
    assert (
        ModelConfig.from_hf(unstated | {"architectures": [f"{name}ForCausalLM"]}, None).max_position
        == reference.max_position_embeddings
    )
    assert config.norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    if name == "Llama":
        assert config.windows == (None,) * 30
    elif name == "Mistral":
        assert config.windows == (reference.sliding_window,) * 30
    else:
        kinds = reference.layer_types
        assert config.windows == tuple(reference.sliding_window if k == "sliding_attention" else None for k in kinds)


def test_model_type_stands_in_for_architectures() -> None:
    assert read({"model_type": "mistral"}, omit="architectures").architecture == "MistralForCausalLM"


@pytest.mark.parametrize("override", [{"architectures": ["GPT2LMHeadModel"]}, {"architectures": ["LlamaModel"]}])
def test_unknown_architecture(override: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{override['architectures'][0]}.*supported: LlamaForCausalLM"):
        read(override)


def test_no_architecture_at_all() -> None:
    with pytest.raises(ValueError, match="unsupported architecture None"):
        read(omit="architectures")


@pytest.mark.parametrize(
    ("override", "head_dim"),
    [
        ({"head_dim": 32}, 32),
        ({"head_dim": None}, 16),
        ({"hidden_size": 60, "num_attention_heads": 8, "head_dim": 16}, 16),
    ],
)
def test_stated_head_dim_wins(override: dict[str, Any], head_dim: int) -> None:
    """The head size was derived from hidden / heads although the config stated another."""
    assert read(override).head_dim == head_dim


def test_head_dim_must_be_stated_when_it_cannot_be_derived() -> None:
    with pytest.raises(ValueError, match="60 is not a multiple of num_attention_heads 8"):
        read({"hidden_size": 60, "num_attention_heads": 8})


def test_kv_heads() -> None:
    assert read({"num_key_value_heads": None}).num_kv_heads == 4
    assert read(omit="num_key_value_heads").num_kv_heads == 4
    with pytest.raises(ValueError, match="4 must be a multiple of num_key_value_heads 3"):
        read({"num_key_value_heads": 3})


def test_biases() -> None:
    llama = read({"attention_bias": True, "mlp_bias": True})
    assert (llama.attention_bias, llama.attention_out_bias, llama.mlp_bias) == (True, True, True)
    qwen = read(QWEN2)
    assert (qwen.attention_bias, qwen.attention_out_bias, qwen.mlp_bias) == (True, False, False)
    mistral = read(MISTRAL, {"attention_bias": True, "mlp_bias": True})  # Mistral's classes know no such keys
    assert (mistral.attention_bias, mistral.attention_out_bias, mistral.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("override", "windows"),
    [
        (MISTRAL | {"sliding_window": 5}, (5, 5, 5, 5)),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL | {"sliding_window": 5, "use_sliding_window": False}, (None,) * 4),
        (MISTRAL | {"sliding_window": 5, "use_sliding_window": None}, (None,) * 4),
        (MISTRAL | {"sliding_window": 5, "max_window_layers": 3}, (None, None, None, 5)),
        (QWEN2 | {"sliding_window": 5, "max_window_layers": 2}, (None,) * 4),
        (QWEN2 | {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 5)),
        (QWEN2 | {"sliding_window": 5, "use_sliding_window": True}, (None,) * 4),  # from layer 28 on
        ({"layer_types": ["full_attention"] * 4}, (None,) * 4),
        (
            {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 5, None, 5),
        ),
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 3,
            },
            (5, None, None, None),
        ),
    ],
)
def test_windows(override: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """A switched-off or per-layer window was applied to every layer."""
    assert read(override).windows == windows


def test_llama_ignores_a_window_without_layer_types(caplog: pytest.LogCaptureFixture) -> None:
    """transformers' Llama does not read sliding_window; applying it would change the logits."""
    assert read({"sliding_window": 5}).windows == (None,) * 4
    assert "sliding_window 5 is ignored" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ({"layer_types": ["full_attention"]}, "one type for each of the 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "unsupported layer_types 'chunked_attention'"),
        (
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is null",
        ),
        ({"hidden_act": "geglu"}, "unsupported hidden_act 'geglu'"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"vocab_size": None}, "the config has no vocab_size"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true, false or null"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .method 'gptq'"),
        ({"torch_dtype": "int4"}, "unsupported dtype 'int4'"),
        ({"rope_scaling": {"type": "bogus"}}, "unknown rope type 'bogus'"),
        ({"eos_token_id": "2"}, "eos_token_id in config.json must be a token id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id in config.json"),
        ({"bos_token_id": [1]}, "bos_token_id must be a token id or null"),
    ],
)
def test_what_cannot_be_run_is_named(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(override)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"no {key}"):
        read(omit=key)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, None, set()),
        ({"eos_token_id": None}, {}, set()),
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, {2, 7}),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 7}, {2, 3, 7}),
        ({}, {"eos_token_id": 0}, {0}),
    ],
)
def test_eos_ids_of_both_files_count(config: dict[str, Any], generation: dict[str, Any], ids: set[int]) -> None:
    """One file's end token replaced the other's, and the model ran on past its end of turn."""
    assert read(config, generation=generation).eos_ids == ids


@pytest.mark.parametrize(
    ("override", "dtype"),
    [({}, "float32"), ({"dtype": "float16"}, "float16"), ({"torch_dtype": "torch.bfloat16"}, "bfloat16")],
)
def test_dtype_in_either_spelling(override: dict[str, Any], dtype: str) -> None:
    assert read(override).dtype == dtype


def test_context_length_includes_rope_scaling() -> None:
    assert read({"rope_scaling": {"type": "linear", "factor": 4.0}}).context_length == 2048
