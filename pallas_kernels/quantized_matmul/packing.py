"""Packing integers into words and back, quantising and dequantising: plain jnp, for loading and the reference."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.pallas_kernels.quantized_matmul.weight import WORD_BITS, Layout, QuantizedWeight


def pack(values: Int[Array, "A V"], order: tuple[int, ...]) -> Int[Array, "A W"]:
    """Unsigned integers along the last axis into int32 words of len(order) values; the last word is filled with 0.

    Example: order (0, …, 7) and values 1, 2, 3: one word, 0x321.
    """
    per_word = len(order)
    bits = WORD_BITS // per_word
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    grouped = padded.reshape(values.shape[0], -1, per_word).astype(jnp.uint32)
    word = jnp.zeros(grouped.shape[:2], jnp.uint32)
    for place, value in enumerate(order):
        word |= grouped[:, :, value] << (bits * place)
    return word.view(jnp.int32)


def unpack(words: Int[Array, "A W"], order: tuple[int, ...], count: int) -> Int[Array, "A V"]:
    """The first `count` values of each row of words, as int32: pack's inverse."""
    per_word = len(order)
    bits = WORD_BITS // per_word
    places = [order.index(value) for value in range(per_word)]
    values = jnp.stack([(words >> (bits * place)) & ((1 << bits) - 1) for place in places], -1)
    return values.reshape(words.shape[0], -1)[:, :count]


def quantize(w: Float[Array, "O I"], layout: Layout, group_size: int, *, zero_points: bool) -> QuantizedWeight:
    """w rounded to the nearest value of its group's grid; group_size is I for a layout without groups.

    Raises: ValueError when the inputs are no multiple of the group.
    """
    outputs, inputs = w.shape
    if inputs % group_size:
        raise ValueError(f"quantize: wanted inputs that are a multiple of group_size {group_size}, got {inputs}")
    grouped = w.astype(jnp.float32).reshape(outputs, -1, group_size)
    if not layout.grouped:
        scale = _positive(jnp.abs(grouped).max((1, 2)) / 127)
        values = jnp.round(w / scale[:, None]).astype(jnp.int8)
        return QuantizedWeight(values=values, scales=scale, zeros=None, layout=layout, group_size=group_size)
    top, middle = (1 << layout.bits) - 1, 1 << (layout.bits - 1)
    if zero_points:
        low, high = jnp.minimum(grouped.min(-1), 0), jnp.maximum(grouped.max(-1), 0)  # [O, C]
        scale = _positive((high - low) / top)
        zero = jnp.clip(jnp.round(-low / scale), layout.zero_offset, top)
    else:
        scale = _positive(jnp.abs(grouped).max(-1) / (middle - 1))
        zero = jnp.full_like(scale, middle)
    values = jnp.clip(jnp.round(grouped / scale[..., None]) + zero[..., None], 0, top).astype(jnp.int32)
    values = values.reshape(outputs, inputs)
    stored = zero.astype(jnp.int32).T - layout.zero_offset
    return QuantizedWeight(
        values=pack(values, layout.order).T if layout.axis == "in" else pack(values.T, layout.order),
        scales=scale.T,
        zeros=pack(stored, layout.zero_order) if zero_points else None,
        layout=layout,
        group_size=group_size,
    )


def _positive(scale: Array) -> Array:
    """A scale that can be divided by: 1 for a group of zeros."""
    return jnp.where(scale > 0, scale, 1.0)


def dequantize(weight: QuantizedWeight, dtype: jnp.dtype) -> Float[Array, "O I"]:
    """The weight in full, rounded to dtype."""
    layout, outputs, inputs = weight.layout, weight.num_outputs, weight.num_inputs
    scales = jnp.asarray(weight.scales).astype(jnp.float32)
    values = jnp.asarray(weight.values)
    if not layout.grouped:
        return (values.astype(jnp.float32) * scales[:, None]).astype(dtype)
    if layout.axis == "in":
        integers = unpack(values.T, layout.order, inputs)
    else:
        integers = unpack(values, layout.order, outputs).T
    if weight.zeros is None:
        zero = jnp.full(scales.shape, 1 << (layout.bits - 1), jnp.int32)
    else:
        zero = unpack(jnp.asarray(weight.zeros), layout.zero_order, outputs) + layout.zero_offset
    grouped = integers.reshape(outputs, -1, weight.group_size) - zero.T[:, :, None]
    return (grouped.astype(jnp.float32) * scales.T[:, :, None]).reshape(outputs, inputs).astype(dtype)
