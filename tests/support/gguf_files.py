"""Writes GGUF files as llama.cpp's converter does: its names, its order of q and k rows, its metadata keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_ROLES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """model.layers.1.mlp.up_proj.weight -> blk.1.ffn_up.weight."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    return f"blk.{parts[2]}.{_ROLES[parts[-2]]}.{parts[-1]}"


def converter_permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to the q and k tensors of the llama architecture."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a model with the given Hugging Face config and tensors; returns path.

    Matrices are stored as `kind`, the rest as F32. metadata: further keys ("{arch}" in a key is the architecture).
    raw: tensors by GGUF name that are stored as they are, bytes uint8[rows, bytes per row] or float32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    add_metadata(writer, {key.replace("{arch}", architecture): value for key, value in (metadata or {}).items()})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        role = name.split(".")[-2]
        if architecture == "llama" and role in heads:
            tensor = converter_permute(tensor, heads[role])
        stored_as = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), stored_as)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored_as)
    for name, (data, stored_as) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=stored_as)
    return finish(writer)


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add keys with Python values: bool, int (uint32), float (float32), str or a list of one of them."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> Path:
    """Write the file out; returns its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert writer.path is not None
    return Path(writer.path)
