"""Weights of a GGUF file under Hugging Face's names and layouts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jaxpaged.gguf_file import GGUFFile, TensorEntry, read_gguf
from jaxpaged.models.weights.dequantise import block_sizes, dequantise
from jaxpaged.models.weights.gguf_config import ROPE_FREQS, config_dict, generation_config, gguf_architecture

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a tensor's bytes lie. heads is None unless its rows are in the rotary order that must be undone."""

    entry: TensorEntry
    num_bytes: int
    heads: int | None


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; a name without a counterpart stays."""
    if match := _IN_LAYER.fullmatch(name):
        layer, role, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[role]}.{kind}" if role in _LAYER else name
    role, _, kind = name.rpartition(".")
    return f"{_TOP[role]}.{kind}" if role in _TOP else name


def _num_bytes(entry: TensorEntry) -> int:
    elements, size = block_sizes(entry.kind)
    if entry.shape[-1] % elements:
        raise ValueError(f"rows of {entry.shape[-1]} values are no whole number of blocks of {elements}")
    return prod(entry.shape) // elements * size


def _undo_rotary_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] from GGUF's order back to Hugging Face's.

    Files of the llama kind keep the two numbers that a rotation mixes side by side, Hugging Face half a head apart.
    Head of 4 rows: stored a0 b0 a1 b1 -> a0 a1 b0 b1.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class GGUFSource:
    """TensorSource over a GGUF file: Hugging Face names, torch's [out, in] layout, float32 values.

    Raises ValueError when the file is not a whole GGUF file of a supported architecture and storage type.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: GGUFFile | None = read_gguf(path)
        self._path = self._file.path
        sizes = {entry.name: _checked_bytes(self._file, entry) for entry in self._file.tensors.values()}
        self._config = config_dict(self._file)
        self._generation_config = generation_config(self._file)
        self._stored = self._locate(self._file, sizes)

    def _locate(self, file: GGUFFile, sizes: dict[str, int]) -> dict[str, _Stored]:
        permuted = {}
        if gguf_architecture(file) == "llama":
            permuted = {"q_proj": self._config["num_attention_heads"], "k_proj": self._config["num_key_value_heads"]}
        stored = {}
        for entry in file.tensors.values():
            name = _hf_name(entry.name)
            role = name.split(".")[-2] if "." in name else name
            heads = permuted.get(role)
            if heads is not None and entry.shape[0] % (2 * heads):
                raise ValueError(
                    f"{file.path}: {entry.name} has {entry.shape[0]} rows, not an even number for each of {heads} heads"
                )
            stored[name] = _Stored(entry=entry, num_bytes=sizes[entry.name], heads=heads)
        stored.pop(ROPE_FREQS, None)  # part of the config
        return stored

    def config_dict(self) -> dict[str, Any]:
        """The model's config as Hugging Face's config.json would hold it."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """Begin, end and padding ids and recommended sampling values, as in generation_config.json."""
        return dict(self._generation_config)

    def names(self) -> tuple[str, ...]:
        """Hugging Face names, in the file's order; tensors without a counterpart keep their GGUF name."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch's layout. ValueError for an unknown name."""
        return self._find(name).entry.shape

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, a read-only view of the file where it is stored so.

        ValueError for an unknown name, and after close().
        """
        if self._file is None:
            raise ValueError(f"{self._path} was closed: open it again to read {name}")
        stored = self._find(name)
        start = stored.entry.offset
        data, shape = self._file.data[start : start + stored.num_bytes], stored.entry.shape
        if stored.heads is not None:  # whole rows move, so move the (smaller) stored bytes
            data = _undo_rotary_order(data.reshape(shape[0], -1), stored.heads).reshape(-1)
        return dequantise(data, stored.entry.kind, shape)

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            raise ValueError(f"{self._path} has no tensor {name}")
        return self._stored[name]

    def close(self) -> None:
        """Let go of the file; arrays read before stay valid."""
        self._file = None


def _checked_bytes(file: GGUFFile, entry: TensorEntry) -> int:
    try:
        size = _num_bytes(entry)
    except ValueError as error:
        raise ValueError(f"{file.path}: tensor {entry.name}: {error}") from error
    if entry.offset + size > len(file.data):
        raise ValueError(
            f"{file.path} is cut short: tensor {entry.name} ends at byte {entry.offset + size}, "
            f"the file at {len(file.data)}; fetch it again"
        )
    return size
