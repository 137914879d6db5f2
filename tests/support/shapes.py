"""Configs in the shape of well-known models, for compiling without weights; the number of layers can be cut."""

from __future__ import annotations

from typing import Any

_LLAMA_31_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
# The sizes of Qwen3-8B; its norm of queries and keys is left out.
_QWEN3_8B = _LLAMA_31_8B | {
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
}
_SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SHAPES = {"llama-3.1-8b": _LLAMA_31_8B, "qwen3-8b": _QWEN3_8B, "smollm2-135m": _SMOLLM2_135M}


def shaped_config(name: str, *, layers: int | None = None) -> dict[str, Any]:
    """config.json of that shape as a Llama model in bfloat16; layers: as many instead of all."""
    config = SHAPES[name] | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    return config if layers is None else config | {"num_hidden_layers": layers}
