"""Quantised weights as values: how bits are packed is data, the arrays and that data make one frozen pytree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, no_type_check

import jax
import numpy as np
from jaxtyping import Array, Float, Int

WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How integers lie in memory.

    Value order[j] of a word lies in its bits [j·bits, (j+1)·bits). Consecutive values of a word are consecutive input
    features (axis "in") or output features (axis "out"). A zero point is its stored value plus zero_offset.
    """

    name: str
    bits: int
    axis: Literal["none", "in", "out"]  # "none": one signed integer per element, one scale per output
    order: tuple[int, ...]
    zero_order: tuple[int, ...]  # the same for zero points, which are packed along the outputs in every layout
    zero_offset: int

    @property
    def per_word(self) -> int:
        """P: values in a 32-bit word; 1 where nothing is packed."""
        return len(self.order)

    @property
    def grouped(self) -> bool:
        """Whether scales are per group of inputs, not per output alone."""
        return self.axis != "none"


INT8_CHANNEL = Layout(name="int8", bits=8, axis="none", order=(0,), zero_order=(0,), zero_offset=0)
GPTQ_INT4 = Layout(
    name="gptq-int4", bits=4, axis="in", order=tuple(range(8)), zero_order=tuple(range(8)), zero_offset=1
)
GPTQ_INT8 = Layout(
    name="gptq-int8", bits=8, axis="in", order=tuple(range(4)), zero_order=tuple(range(4)), zero_offset=1
)
AWQ_INT4 = Layout(
    name="awq-int4",
    bits=4,
    axis="out",
    order=(0, 2, 4, 6, 1, 3, 5, 7),
    zero_order=(0, 2, 4, 6, 1, 3, 5, 7),
    zero_offset=0,
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {layout.name: layout for layout in (INT8_CHANNEL, GPTQ_INT4, GPTQ_INT8, AWQ_INT4)}
)


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight of I input and O output features; P = layout.per_word, C = I / group_size groups.

    axis "none": values int8 [O, I], scales [O], no zero points.
    axis "in":   values int32 [I/P, O], scales [C, O], zeros int32 [C, ceil(O/P)].
    axis "out":  values int32 [I, O/P], scales [C, O], zeros int32 [C, O/P].
    The weight of output o and input i is (value - zero point) · scale. Without zeros the zero point is the middle of
    the range: 8 for four bits, 128 for eight.
    """

    values: Int[Array | np.ndarray, "_ _"]
    scales: Float[Array | np.ndarray, "..."]
    zeros: Int[Array | np.ndarray, "_ _"] | None
    layout: Layout = field(metadata={"static": True})
    group_size: int = field(metadata={"static": True})  # inputs that share a scale; I where scales are per output

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.scales.shape[-1]

    @property
    def num_inputs(self) -> int:
        """I."""
        axis = 1 if self.layout.axis == "none" else 0
        return self.values.shape[axis] * (self.layout.per_word if self.layout.axis == "in" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what one product reads of the weight."""
        arrays = (self.values, self.scales) if self.zeros is None else (self.values, self.scales, self.zeros)
        return sum(array.size * array.dtype.itemsize for array in arrays)


def check_weight(weight: QuantizedWeight) -> None:
    """Raises: ValueError naming the first array whose shape or dtype the layout does not allow."""
    layout, values = weight.layout, weight.values
    wanted = "int32" if layout.grouped else "int8"
    if values.ndim != 2 or str(values.dtype) != wanted:
        raise ValueError(f"{layout.name} values: wanted {wanted} of two dimensions, got {values.dtype}{values.shape}")
    inputs, outputs, words = weight.num_inputs, weight.num_outputs, layout.per_word
    if weight.group_size < 1 or inputs % weight.group_size:
        raise ValueError(f"{layout.name} group_size: wanted a divisor of {inputs} inputs, got {weight.group_size}")
    if layout.axis == "in" and weight.group_size % words:
        raise ValueError(f"{layout.name} group_size: wanted a multiple of {words}, got {weight.group_size}")
    if layout.axis == "out" and outputs % words:
        raise ValueError(f"{layout.name} outputs: wanted a multiple of {words}, got {outputs}")
    groups = inputs // weight.group_size
    if not layout.grouped and (groups != 1 or weight.zeros is not None):
        raise ValueError(f"{layout.name}: wanted one group of {inputs} inputs and no zero points, got {groups} groups")
    shapes = {
        "values": (values.shape, _values_shape(layout, inputs, outputs)),
        "scales": (weight.scales.shape, (groups, outputs) if layout.grouped else (outputs,)),
    }
    if weight.zeros is not None:
        shapes["zeros"] = (weight.zeros.shape, (groups, -(-outputs // words)))
        if str(weight.zeros.dtype) != "int32":
            raise ValueError(f"{layout.name} zeros: wanted int32, got {weight.zeros.dtype}")
    for name, (got, want) in shapes.items():
        if tuple(got) != want:
            raise ValueError(f"{layout.name} {name}: wanted shape {want}, got {tuple(got)}")


def _values_shape(layout: Layout, inputs: int, outputs: int) -> tuple[int, int]:
    shapes = {
        "none": (outputs, inputs),
        "in": (inputs // layout.per_word, outputs),
        "out": (inputs, outputs // layout.per_word),
    }
    return shapes[layout.axis]
