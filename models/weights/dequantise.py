"""GGML block formats to float32, in pieces that stay in the processor's cache."""

from __future__ import annotations

from math import prod

import numpy as np

# GGML's number of each storage type that is read here.
KINDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
}
_PIECE = 1 << 16  # elements: 256 KB of float32


def block_sizes(kind: int) -> tuple[int, int]:
    """(elements, bytes) of one block of a storage type. ValueError for a type that is not read here."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in KINDS:
        supported = ", ".join(KINDS.values())
        raise ValueError(f"storage type {kind} is not supported: re-quantise the file to one of {supported}")
    return GGML_QUANT_SIZES[GGMLQuantizationType(kind)]


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """A block is scale f16, minimum f16, 16 bytes of nibbles; the low nibbles are the first half of its 32 values."""
    scale_and_minimum = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    scale, minimum = scale_and_minimum[:, :1], scale_and_minimum[:, 1:]
    codes = blocks[:, 4:]
    out[:, :16] = codes & 15
    out[:, 16:] = codes >> 4
    out *= scale
    out += minimum


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """A block is scale f16 and 16 bytes of nibbles offset by 8, laid out as in Q4_1."""
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    codes = blocks[:, 2:]
    out[:, :16] = codes & 15
    out[:, 16:] = codes >> 4
    out -= 8
    out *= scale


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """A block is scale f16 and 32 signed bytes."""
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    out[...] = blocks[:, 2:].view(np.int8)
    out *= scale


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    """The upper half of a float32."""
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


# The commonest types; the others go through the gguf package, which takes two to four times as long.
_FAST = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "F16": _f16, "BF16": _bf16}


def _dequantise_piece(blocks: np.ndarray, kind: int, out: np.ndarray) -> None:
    """uint8[blocks, bytes] -> float32[blocks, elements] written into out."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    fast = _FAST.get(KINDS[kind])
    if fast is None:
        # As one row: the package works through groups of rows, so many short ones would be slow.
        out[...] = dequantize(blocks.reshape(1, -1), GGMLQuantizationType(kind)).reshape(out.shape)
    else:
        fast(blocks, out)


def dequantise(data: np.ndarray, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    """Stored bytes (uint8, contiguous) of a tensor of that shape -> float32 of that shape.

    F32 is a view of `data`; every other type is a fresh array.
    """
    if KINDS[kind] == "F32":
        return data.view(np.float32).reshape(shape)
    elements, size = block_sizes(kind)
    rows = data.reshape(-1, size)
    out = np.empty((prod(shape) // elements, elements), np.float32)
    step = max(1, _PIECE // elements)
    for start in range(0, len(rows), step):
        _dequantise_piece(rows[start : start + step], kind, out[start : start + step])
    return out.reshape(shape)
