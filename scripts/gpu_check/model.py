"""A Llama-shaped model without weights: a folder with its config, which load_format="dummy" makes a model of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from scripts.gpu_check.sizes import Sizes


def llama_config(sizes: Sizes) -> dict[str, Any]:
    """A Hugging Face config.json; at full size that of an 8B model."""
    num_heads, groups, head_dim = sizes.heads
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": num_heads * groups,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": sizes.dtype,
    }


def write_folder(folder: Path, sizes: Sizes) -> None:
    """config.json, and a file of weights that holds one number nobody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config(sizes)), "utf-8")
    safetensors.numpy.save_file({"unused": np.zeros(1, np.float32)}, folder / "model.safetensors")


def prompts(sizes: Sizes, count: int) -> list[list[int]]:
    """Different random prompts: none finds another's blocks in the prefix cache."""
    rng = np.random.default_rng(count)
    return rng.integers(3, sizes.vocabulary, (count, sizes.prompt)).tolist()
