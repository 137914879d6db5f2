"""Tiny random Llama checkpoints (TINY): every config switch, weights from a fixed numpy seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tests.support.checkpoints import layer_shapes, write_checkpoint

# Attention must matter: with these, swapping two early prompt tokens changes the greedy continuation.
_QK_SCALE = 2.5
_HEAD_SCALE = 2.0


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of TINY: 2 layers, hidden 64, 4 query and 2 kv heads of 16, vocabulary 1024; overrides win."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        **overrides,
    }


def tiny_tensors(config: Mapping[str, Any], *, seed: int) -> dict[str, np.ndarray]:
    """float32 tensors by Hugging Face name, torch layout [out, in]; the head is absent when the config ties it."""
    rng = np.random.default_rng(seed)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    head_scale = _HEAD_SCALE / hidden**0.5
    embedding_scale = head_scale if config["tie_word_embeddings"] else 1.0
    tensors = {"model.embed_tokens.weight": _normal(rng, (vocab, hidden), embedding_scale)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config).items():
            tensors[f"model.layers.{layer}.{name}"] = _layer_tensor(rng, name, shape)
    tensors["model.norm.weight"] = 1 + _normal(rng, (hidden,), 0.1)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _normal(rng, (vocab, hidden), head_scale)
    return tensors


def tiny_checkpoint(
    path: Path,
    *,
    seed: int = 0,
    omit: Sequence[str] = (),
    shards: int = 1,
    tokenizer: tokenizers.Tokenizer | None = None,
    generation_eos: int | list[int] | None = None,
    tokenizer_options: Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write TINY as a Hugging Face directory; returns `path`. `omit` names config keys to leave out altogether."""
    config = tiny_config(**config_overrides)
    tensors = tiny_tensors(config, seed=seed)
    return write_checkpoint(
        path,
        {key: value for key, value in config.items() if key not in omit},
        tensors,
        generation_eos=generation_eos,
        tokenizer=tokenizer,
        shards=shards,
        tokenizer_options=tokenizer_options,
    )


def _layer_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("layernorm.weight"):
        return 1 + _normal(rng, shape, 0.1)
    if name.endswith("bias"):
        return _normal(rng, shape, 0.5)
    scale = _QK_SCALE if "q_proj" in name or "k_proj" in name else 1.0
    return _normal(rng, shape, scale / shape[1] ** 0.5)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)
