"""GGUF metadata as Hugging Face's config.json and generation_config.json would say it."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import numpy as np

from jaxpaged.gguf_file import GGUFFile, Value
from jaxpaged.models.weights.dequantise import KINDS, dequantise

ROPE_FREQS = "rope_freqs.weight"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# (low_freq_factor, high_freq_factor, original context) of the models published with such a table.
_LLAMA3_SHAPES = tuple((1.0, 4.0, original) for original in (8192, 4096, 2048, 16384, 32768))


def _shortest(value: float) -> float:
    """A float32 as the decimal number it was written from: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


class _Keys:
    """Looks up `<architecture>.<key>` in the metadata, with the type checked."""

    def __init__(self, metadata: Mapping[str, Value], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def optional(self, key: str) -> Value | None:
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str) -> int:
        """A whole number; a list of one repeated number (one per layer) counts as that number."""
        value = self.optional(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if not isinstance(value, int):
            raise ValueError(f"GGUF key {self.architecture}.{key}: wanted one whole number, got {value!r}")
        return value

    def number(self, key: str, missing: float | None) -> float:
        value = self.optional(key)
        if value is None and missing is not None:
            return missing
        if not isinstance(value, int | float):
            raise ValueError(f"GGUF key {self.architecture}.{key}: wanted a number, got {value!r}")
        return _shortest(value)


def gguf_architecture(file: GGUFFile) -> str:
    """The GGUF's own architecture name, "llama" or "qwen2"; ValueError for another."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ValueError(f"{file.path}: architecture {architecture!r} is not supported (supported: {supported})")
    return architecture


def _llama3_factors(inverse: np.ndarray, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What each of the inverse frequencies [head_dim/2] is divided by under Llama 3's rule."""
    turns = original * inverse / (2 * np.pi)  # rotations over the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _scaling_from_table(table: np.ndarray, head_dim: int, theta: float) -> dict[str, Any] | None:
    """rope_freqs (the divisors of the inverse frequencies, [head_dim/2]) -> a rope_scaling dictionary.

    A table made by Llama 3's rule gives its parameters back; any other is said as explicit divisors ("longrope").
    """
    if np.all(table == 1):
        return None
    inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = _shortest(float(table.max()))
    for low, high, original in _LLAMA3_SHAPES:
        if np.allclose(_llama3_factors(inverse, factor, low, high, original), table, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    divisors = [_shortest(float(value)) for value in table]
    return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}


def _rope_scaling(keys: _Keys, file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = keys.optional("rope.scaling.type")
    if ROPE_FREQS in file.tensors:
        entry = file.tensors[ROPE_FREQS]
        if entry.shape != (head_dim // 2,):
            raise ValueError(f"{file.path}: {ROPE_FREQS} must have {head_dim // 2} values, has shape {entry.shape}")
        start, stop = entry.offset, entry.offset + 4 * entry.shape[0]
        return _scaling_from_table(dequantise(file.data[start:stop], entry.kind, entry.shape), head_dim, theta)
    if kind in (None, "none", ""):
        factor = keys.number("rope.scale_linear", 1.0)  # the key of older files
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    factor = keys.number("rope.scaling.factor", None)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported (supported: none, linear, yarn)")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if attention != 1:  # the file's factor multiplies yarn's own, Hugging Face's replaces it
        scaling["attention_factor"] = attention * (1 + 0.1 * log(factor))
    for name in ("beta_fast", "beta_slow"):
        if keys.optional(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}", None)
    return scaling


def _dtype(file: GGUFFile) -> str:
    """The 16-bit type when all matrices have it, else float32 (what quantised weights are expanded to)."""
    kinds = {KINDS[entry.kind] for entry in file.tensors.values() if len(entry.shape) > 1}
    return _DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _hf_architecture(architecture: str, file: GGUFFile, window: object) -> str:
    """Files of the llama kind also hold Mistral (a window) and models with biases on q, k, v only (Qwen2's form)."""
    biases = "blk.0.attn_q.bias" in file.tensors and "blk.0.attn_output.bias" not in file.tensors
    if architecture == "llama" and biases:
        return _ARCHITECTURES["qwen2"]
    if architecture == "llama" and window is not None:
        return "MistralForCausalLM"
    return _ARCHITECTURES[architecture]


def config_dict(file: GGUFFile) -> dict[str, Any]:
    """The model's config.json. ValueError names a key that is missing, of the wrong type, or not supported."""
    architecture = gguf_architecture(file)
    keys = _Keys(file.metadata, architecture)
    if keys.optional("expert_count"):
        raise ValueError(f"{file.path}: mixtures of experts are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    kv_heads = heads if keys.optional("attention.head_count_kv") is None else keys.integer("attention.head_count_kv")
    head_dim = (
        hidden // heads if keys.optional("attention.key_length") is None else keys.integer("attention.key_length")
    )
    theta, window = keys.number("rope.freq_base", 10000.0), keys.optional("attention.sliding_window")
    hf_architecture = _hf_architecture(architecture, file, window)
    config: dict[str, Any] = {
        "architectures": [hf_architecture],
        "model_type": hf_architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", None),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, file, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **_token_ids(file, ended_by_turn=False),
    }
    rotary = keys.optional("rope.dimension_count")
    if isinstance(rotary, int) and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if hf_architecture == "LlamaForCausalLM":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if hf_architecture == "MistralForCausalLM":
        config["sliding_window"] = keys.integer("attention.sliding_window")
    return config


def _token_ids(file: GGUFFile, *, ended_by_turn: bool) -> dict[str, Any]:
    """bos/eos/pad ids that the metadata names; with ended_by_turn the end-of-turn ids are ends as well."""
    names = ("eos", "eot", "eom") if ended_by_turn else ("eos",)
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    distinct = list(dict.fromkeys(value for value in ends if isinstance(value, int)))
    ids: dict[str, Any] = {
        f"{name}_token_id": value
        for name, key in (("bos", "bos"), ("pad", "padding"))
        if isinstance(value := file.metadata.get(f"tokenizer.ggml.{key}_token_id"), int)
    }
    if distinct:
        ids["eos_token_id"] = distinct[0] if len(distinct) == 1 else distinct
    return ids


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The model's generation_config.json: token ids, and the sampling values that the file recommends, if any."""
    config = _token_ids(file, ended_by_turn=True)
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            config[name] = _shortest(value) if isinstance(value, float) else value
    return config
