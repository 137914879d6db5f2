"""Writing a Hugging Face model directory from a config and numpy tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from tests.support.tokenizers import save_tokenizer


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    generation_eos: int | list[int] | None,
    tokenizer: tokenizers.Tokenizer | None,
    shards: int,
    tokenizer_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json, weights (one file, or `shards` files and an index) and, where given, the rest; returns path.

    tokenizer_options are save_tokenizer's keywords (bos_token, eos_token, chat_template).
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config), indent=1))
    if generation_eos is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    if tokenizer is not None:
        save_tokenizer(path, tokenizer, **(tokenizer_options or {}))
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if shards == 1:
        save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
        return path
    files = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    placed = {name: files[index * shards // len(contiguous)] for index, name in enumerate(contiguous)}
    for file in files:
        part = {name: array for name, array in contiguous.items() if placed[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    total = sum(array.nbytes for array in contiguous.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names (inside model.layers.N.) and torch shapes [out, in] of one layer's tensors for a Llama-like config."""
    hidden, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    biased = []
    if config.get("attention_bias") or config["model_type"] == "qwen2":
        biased += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if config.get("attention_bias"):
        biased += ["self_attn.o_proj"]
    if config.get("mlp_bias"):
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
