"""Writes tests/goldens/rope.json: rotary frequencies as transformers computes them.

Run with an interpreter that has torch and transformers:  python scripts/make_rope_goldens.py
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "rope.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> the part of config.json that concerns the embedding (max_position_embeddings 32 unless given)
CASES: dict[str, dict[str, Any]] = {
    "theta absent": {},
    "theta 10000": {"rope_theta": 10000.0},
    "theta 500000": {"rope_theta": 500000.0},
    "theta 500000 as an integer": {"rope_theta": 500000},
    "head_dim 128": {"rope_theta": 1e6, "head_dim": 128},
    "head_dim 80": {"rope_theta": 1e4, "head_dim": 80},
    "rope_parameters default": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "rope_parameters beside a top-level theta": {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 20000.0}},
    "linear, type": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, rope_type": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4}},
    "linear, rope_parameters": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500000.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3, type": {"rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama3 at its real size": {
        "rope_theta": 500000.0,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
    },
    "yarn": {"rope_theta": 500000.0, "rope_scaling": YARN},
    "yarn, type": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn, original length absent": {"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, original length outside": {
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "yarn, null factor": {"max_position_embeddings": 256, "rope_scaling": {**YARN, "factor": None}},
    "yarn, attention_factor": {"rope_scaling": {**YARN, "attention_factor": 0.75}},
    "yarn, both mscales": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn, one mscale": {"rope_scaling": {**YARN, "mscale": 0.707}},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2.0}},
    "yarn, no truncation": {"rope_scaling": {**YARN, "truncate": False}, "head_dim": 128},
    "yarn at a real size": {
        "rope_theta": 1e6,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn, rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 500000.0}},
}
# "dynamic": frequencies at each sequence length, from the module's forward pass
DYNAMIC_CASES: dict[str, dict[str, Any]] = {
    "dynamic, type": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "dynamic, rope_type": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "dynamic, rope_parameters": {
        "head_dim": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
    },
}
LENGTHS = (1, 5, 31, 32, 33, 34, 64, 100, 127, 128, 4096)


def base_config(case: dict[str, Any]) -> dict[str, Any]:
    """A Llama config around the case."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    return {**sizes, "vocab_size": 8, "max_position_embeddings": 32, "head_dim": 16, **json.loads(json.dumps(case))}


def static_golden(case: dict[str, Any]) -> dict[str, Any]:
    """The module's frequencies and the factor of cos and sin."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(**base_config(case)))
    return {"config": base_config(case), "inv_freq": rotary.inv_freq.tolist(), "scale": float(rotary.attention_scaling)}


def dynamic_golden(case: dict[str, Any]) -> dict[str, Any]:
    """Frequencies after a forward pass over a sequence of each length, with a fresh module each time."""
    frequencies = []
    for length in LENGTHS:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**base_config(case)))
        rotary(torch.zeros(1), torch.arange(length)[None])
        frequencies.append(rotary.inv_freq.tolist())
    grown = LlamaRotaryEmbedding(LlamaConfig(**base_config(case)))
    on_a_cache = []  # a prompt of 30 tokens, then one token at a time, as cached generation does
    grown(torch.zeros(1), torch.arange(30)[None])
    for position in range(30, 40):
        grown(torch.zeros(1), torch.tensor([[position]]))
        on_a_cache.append(grown.inv_freq.tolist())
    return {"config": base_config(case), "lengths": LENGTHS, "inv_freq": frequencies, "on_a_cache": on_a_cache}


def main() -> None:
    warnings.simplefilter("ignore")
    goldens = {
        "transformers": transformers.__version__,
        "static": {name: static_golden(case) for name, case in CASES.items()},
        "dynamic": {name: dynamic_golden(case) for name, case in DYNAMIC_CASES.items()},
    }
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(goldens, indent=None, separators=(",", ":")) + "\n")
    print(f"wrote {OUTPUT} ({OUTPUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
