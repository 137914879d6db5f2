"""The grouped kernel's body: unpack a tile of words plane by plane, multiply each plane on tensor cores.

A word holds P values. Plane j of a tile of words is its j-th values: one shift and one mask, no shuffle. Values packed
along the inputs make P products that add up; packed along the outputs they make P products side by side.

The scale meets the sum of a tile (scale_sums: few tokens, a tile within one group; nothing is rounded but the result)
or the weights (otherwise; rounded once to x's dtype, and worth it when many tokens share the tile).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import load, store
from jaxpaged.pallas_kernels.quantized_matmul.weight import Layout

# dtype → bits and value of the number whose mantissa counts in ones, and the mantissa's width: an integer OR-ed into
# these bits is added to the value.
_COUNTERS = {"bfloat16": (0x4300, 128.0, 7), "float16": (0x6400, 1024.0, 10)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is static about one call. Sizes of the arrays, then of the tiles."""

    layout: Layout
    group_size: int
    num_tokens: int
    num_inputs: int
    num_outputs: int
    tokens: int  # rows of a tile
    words: int  # of a tile along the packed axis: inputs / P, or outputs / P
    others: int  # of a tile along the other axis of the weight
    splits: int
    scale_sums: bool

    @property
    def tile_inputs(self) -> int:
        """Input features per inner iteration."""
        return self.words * self.layout.per_word if self.layout.axis == "in" else self.others

    @property
    def tile_outputs(self) -> int:
        """Output features of an instance."""
        return self.others if self.layout.axis == "in" else self.words * self.layout.per_word

    @property
    def one_group(self) -> bool:
        """Whether no tile reaches into a second group."""
        return self.group_size % self.tile_inputs == 0

    @property
    def num_tiles(self) -> int:
        """Tiles along the inputs."""
        return -(-self.num_inputs // self.tile_inputs)


def grouped_kernel(x_ref, values_ref, scales_ref, zeros_ref, out_ref, *, plan: Plan) -> None:
    """x_ref [planes, T, I/planes], out_ref [splits, T, O]; grid (output tiles, token tiles, splits)."""
    tokens = pl.program_id(1) * plan.tokens + jnp.arange(plan.tokens, dtype=jnp.int32)
    first, last = jnp.int32(0), jnp.int32(plan.num_tiles)
    if plan.splits > 1:
        each = -(-plan.num_tiles // plan.splits)
        first = pl.program_id(2) * each
        last = jnp.minimum(first + each, plan.num_tiles)
    packed_in = plan.layout.axis == "in"
    columns = plan.others if packed_in else plan.words
    planes = 1 if packed_in else plan.layout.per_word
    step = _sum_inputs if packed_in else _sum_outputs
    start = tuple(jnp.zeros((plan.tokens, columns), jnp.float32) for _ in range(planes))
    split = pl.program_id(2) if plan.splits > 1 else 0
    base = pl.program_id(0) * columns + jnp.arange(columns, dtype=jnp.int32)
    refs = (x_ref, values_ref, scales_ref, zeros_ref)
    sums = lax.fori_loop(first, last, lambda i, carry: step(refs, tokens, base, i, carry, plan), start)
    for place, total in enumerate(sums):
        outputs = base if packed_in else base * plan.layout.per_word + plan.layout.order[place]
        mask = (tokens < plan.num_tokens)[:, None] & (outputs < plan.num_outputs)[None, :]
        store(out_ref.at[split, tokens[:, None], outputs[None, :]], total.astype(out_ref.dtype), mask=mask)


def _sum_inputs(refs, tokens, outputs, i, carry, plan: Plan):
    """Words along the inputs: P planes of x against P planes of the weight, one sum [tokens, outputs]."""
    x_ref, values_ref, scales_ref, zeros_ref = refs
    rows = i * plan.words + jnp.arange(plan.words, dtype=jnp.int32)
    inside = rows < plan.num_inputs // plan.layout.per_word
    words = _load(values_ref, rows, outputs, inside, outputs < plan.num_outputs)
    groups = _groups(rows * plan.layout.per_word, i, plan)
    scales, zeros = _scales_and_zeros(scales_ref, zeros_ref, groups, outputs, plan)

    def product(place: int) -> jax.Array:
        x = load(
            x_ref.at[place, tokens[:, None], rows[None, :]],
            mask=(tokens < plan.num_tokens)[:, None] & inside[None, :],
            other=0.0,
        )
        return _product(x, words, place, scales, zeros, plan)

    part = product(0)
    for place in range(1, plan.layout.per_word):
        part += product(place)
    (total,) = carry
    return (total + part * scales if plan.scale_sums else total + part,)


def _sum_outputs(refs, tokens, columns, i, carry, plan: Plan):
    """Words along the outputs: one tile of x against P planes of the weight, P sums [tokens, outputs / P]."""
    x_ref, values_ref, scales_ref, zeros_ref = refs
    inputs = i * plan.others + jnp.arange(plan.others, dtype=jnp.int32)
    inside = inputs < plan.num_inputs
    words = _load(values_ref, inputs, columns, inside, columns < plan.num_outputs // plan.layout.per_word)
    x = load(
        x_ref.at[0, tokens[:, None], inputs[None, :]],
        mask=(tokens < plan.num_tokens)[:, None] & inside[None, :],
        other=0.0,
    )
    groups = _groups(inputs, i, plan)
    sums = []
    for place, total in enumerate(carry):
        outputs = columns * plan.layout.per_word + plan.layout.order[place]
        scales, zeros = _scales_and_zeros(scales_ref, zeros_ref, groups, outputs, plan)
        part = _product(x, words, place, scales, zeros, plan)
        sums.append(total + part * scales if plan.scale_sums else total + part)
    return tuple(sums)


def _load(ref, rows, columns, row_mask, column_mask) -> jax.Array:
    return load(ref.at[rows[:, None], columns[None, :]], mask=row_mask[:, None] & column_mask[None, :], other=0)


def _groups(inputs, i, plan: Plan) -> jax.Array:
    """The group of each row of the tile, or [1] group for all: a load less per row."""
    if plan.one_group:
        return jnp.broadcast_to(i * plan.tile_inputs // plan.group_size, (1,))
    return inputs // plan.group_size


def _scales_and_zeros(scales_ref, zeros_ref, groups, outputs, plan: Plan):
    """[1 or rows, outputs] each: float32 scales, and zero points as int32 or one Python int for all."""
    layout = plan.layout
    known = groups < plan.num_inputs // plan.group_size
    scales = _load(scales_ref, groups, outputs, known, outputs < plan.num_outputs).astype(jnp.float32)
    if zeros_ref is None:
        return scales, 1 << (layout.bits - 1)
    places = [layout.zero_order.index(value) for value in range(layout.per_word)]
    word = _load(zeros_ref, groups, outputs // layout.per_word, known, outputs < plan.num_outputs)
    shift = _lookup(outputs % layout.per_word, places) * layout.bits
    return scales, ((word >> shift[None, :]) & ((1 << layout.bits) - 1)) + layout.zero_offset


def _lookup(index, table: list[int]) -> jax.Array:
    """table[index] without memory: the identity as it is, any other table as a packed constant of four bits each."""
    if table == list(range(len(table))):
        return index
    packed = sum(entry << (4 * place) for place, entry in enumerate(table))
    return (jnp.int32(packed) >> (index * 4)) & 15


def _product(x, words, place: int, scales, zeros, plan: Plan) -> jax.Array:
    """x · plane `place` of the words, without their scale if that meets the sum."""
    weight = _centred(words, place, zeros, x.dtype, plan.layout)
    if not plan.scale_sums:
        weight = (weight.astype(jnp.float32) * scales).astype(x.dtype)
    return jnp.dot(x, weight, preferred_element_type=jnp.float32)


def _centred(words, place: int, zeros, dtype, layout: Layout) -> jax.Array:
    """Value minus zero point, exact in dtype: at most 256 in size.

    Example, bfloat16: value 5 into the bits of 128.0 makes 133.0; less 136.0 (zero point 8) it is -3.0. Two logical
    operations and half a subtraction, where a conversion from integers runs at a quarter of the rate or less.
    """
    value = (words >> (layout.bits * place)) & ((1 << layout.bits) - 1)
    bits, base, room = _COUNTERS.get(jnp.dtype(dtype).name, (0, 0.0, 0))
    if layout.bits > room:
        return (value - zeros).astype(dtype)
    raised = lax.bitcast_convert_type((value | bits).astype(jnp.int16), dtype)
    offset = base + zeros if isinstance(zeros, int) else (zeros.astype(jnp.float32) + base).astype(dtype)
    return raised - offset
