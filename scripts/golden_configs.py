"""The tiny checkpoints of the golden outputs: one per switch of a Llama-family config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TinyCase:
    """A tiny checkpoint and the lengths of the prompts it is asked with.

    config holds the keys that replace those of the support module's default tiny config.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = (1, 9, 14, 40)
    seed: int = 0


_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_NO_WINDOW = {"sliding_window": None}
# A window of 4 with prompts shorter than, equal to and longer than the window.
_WINDOW_PROMPTS = (1, 3, 4, 5, 14, 40)
# Trained on 32 positions: three prompts pass them while generating, two start beyond; 88 + 40 steps is 4 x 32.
_ROPE_PROMPTS = (3, 20, 32, 50, 88)


def _heads(query: int, kv: int) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "hidden_size": 16 * query}


def _rope(**scaling: Any) -> TinyCase:
    """A case in the older spelling: rope_theta and rope_scaling at the top level."""
    name = scaling.pop("name")
    positions = scaling.pop("max_position_embeddings", 256)
    theta = scaling.pop("rope_theta", 10000.0)
    config = {"rope_theta": theta, "max_position_embeddings": positions, "rope_scaling": scaling}
    return TinyCase(name=name, config=config, prompt_lengths=_ROPE_PROMPTS)


def _rope_cases() -> tuple[TinyCase, ...]:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return (
        _rope(name="rope-linear", rope_type="linear", factor=4.0),
        _rope(name="rope-linear-old-key", type="linear", factor=2.5),
        # Dynamic NTK: max_position_embeddings is the trained length.
        _rope(name="rope-dynamic", rope_type="dynamic", factor=8.0, max_position_embeddings=32),
        _rope(name="rope-llama3", **llama3, original_max_position_embeddings=32, rope_theta=500000.0),
        _rope(name="rope-yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
        _rope(
            name="rope-yarn-options",
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.3,
        ),
        _rope(
            name="rope-yarn-mscale",
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            mscale=1.0,
            mscale_all_dim=0.8,
        ),
        TinyCase(  # the newer spelling: everything under rope_parameters
            name="rope-parameters-yarn",
            config={
                "max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 20000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "truncate": False,
                },
            },
            prompt_lengths=_ROPE_PROMPTS,
        ),
        TinyCase(name="rope-theta", config={"rope_theta": 100000.0}, prompt_lengths=(9, 88)),
    )


def tiny_cases() -> tuple[TinyCase, ...]:
    """All cases, in the order in which the golden file lists them."""
    return (
        TinyCase(name="default"),
        TinyCase(name="gqa-1", config=_heads(4, 4)),
        TinyCase(name="gqa-2", config=_heads(4, 2), seed=1),
        TinyCase(name="gqa-3", config=_heads(6, 2)),
        TinyCase(name="gqa-4", config=_heads(8, 2)),
        TinyCase(name="mqa", config=_heads(4, 1)),
        TinyCase(name="three-kv-heads", config=_heads(9, 3)),
        TinyCase(name="head-dim-32", config={"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}),
        TinyCase(  # Mistral, since transformers' Llama refuses a hidden size that its heads do not divide
            name="head-dim-16-hidden-60",
            config={**_MISTRAL, **_NO_WINDOW, "hidden_size": 60, "num_attention_heads": 8, "head_dim": 16},
        ),
        TinyCase(name="head-dim-null", config={"head_dim": None}),
        TinyCase(name="tied", config={"tie_word_embeddings": True}),
        TinyCase(name="attention-bias", config={"attention_bias": True}),
        TinyCase(name="mlp-bias", config={"mlp_bias": True}),
        TinyCase(name="both-biases", config={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        TinyCase(name="norm-eps", config={"rms_norm_eps": 1e-2}),
        TinyCase(name="gelu", config={"hidden_act": "gelu_pytorch_tanh"}),
        *_rope_cases(),
        TinyCase(name="window-4", config={**_MISTRAL, "sliding_window": 4}, prompt_lengths=_WINDOW_PROMPTS),
        TinyCase(name="window-5", config={**_MISTRAL, "sliding_window": 5}, prompt_lengths=_WINDOW_PROMPTS),
        TinyCase(name="window-null", config={**_MISTRAL, **_NO_WINDOW}, prompt_lengths=(3, 14, 40)),
        TinyCase(name="window-wide", config={**_MISTRAL, "sliding_window": 4096}, prompt_lengths=(14, 40)),
        TinyCase(
            name="window-off",
            config={**_QWEN2, "use_sliding_window": False, "sliding_window": 4},
            prompt_lengths=(3, 14, 40),
        ),
        TinyCase(  # full attention in layer 0, a window in layer 1
            name="window-second-layer",
            config={**_QWEN2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            prompt_lengths=_WINDOW_PROMPTS,
        ),
    )
