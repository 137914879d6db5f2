"""Splitting float32s into bfloat16s and multiplying tiles of them, written for LLVM.

A float32 holds 24 significant bits and a bfloat16 8, so x = x₀ + x₁ + x₂ exactly, with x₁ below x₀ · 2⁻⁷ and x₂ below
x₀ · 2⁻¹⁵. Of the nine products of a pair's parts the three smallest, below 2⁻²¹ of the whole, are left out, as in
"bfloat16x6" products on other machines with units for bfloat16 (Henry, Tang, Heinecke, 2019); sums are in float32.

A tile is 16 lines of 32 bfloat16s. Of the weight, a line is a row's 32 entries along the summed axis. Of the
input, a line is two neighbours on the summed axis, of 16 rows. Of sums, a line is 16 float32s. Strides are in floats.
"""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, VECTOR, Code, routine, word
from jaxpaged.pallas_kernels.cpu.tiles import LINE, TILE, beyond, load_tile, multiply_tiles, store_tile

DEEP = 32  # of the summed axis in a tile
PARTS = 3
GROUP = PARTS * 2 * TILE  # bytes: two tiles of each part, which lie together
_WIDE, _HALVES = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
_TOP = ir.Constant(_WIDE, [-0x10000] * LANES)  # the bits of a float32 that a bfloat16 has
# Parts of the weight and of the input that meet, so ordered that consecutive products share one of them.
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0))


def _parts(code: Code, low: Any, high: Any) -> list[Any]:
    """Two vectors of floats as PARTS vectors of 32 bfloat16s, largest part first."""
    found = []
    for part in range(PARTS):
        found.append(_joined(code, low, high))
        if part < PARTS - 1:
            low, high = (_rest(code, vector) for vector in (low, high))
    return found


def _rest(code: Code, vector: Any) -> Any:
    """What is left of floats without their upper halves; exact."""
    builder = code.builder
    top = builder.bitcast(builder.and_(builder.bitcast(vector, _WIDE), _TOP), VECTOR)
    return builder.fsub(vector, top)


def _joined(code: Code, low: Any, high: Any) -> Any:
    """The upper halves of two vectors of floats, one after the other, as a vector of floats' size."""
    builder = code.builder
    first, second = (builder.bitcast(vector, _HALVES) for vector in (low, high))
    return builder.bitcast(code.shuffle(first, second, range(1, 4 * LANES, 2)), VECTOR)


def _row_parts(code: Code, source: Any, stride: Any, row: int) -> list[Any]:
    low, high = (code.load(code.at(source, (row, stride), half)) for half in (0, LANES))
    return _parts(code, low, high)


@no_type_check
@intrinsic
def split_weights(_context, _source, _stride, _target, _ahead):
    """(source, stride, target, ahead): 16 rows of 32 floats to the first or second tile of each part at target.

    The same lines at `ahead`, which need not exist, are asked for meanwhile.
    """

    def write(code: Code, source: Any, stride: Any, target: Any, ahead: Any) -> None:
        for row in range(LANES):
            for half in (0, LANES):
                code.fetch(code.at(ahead, (row, stride), half))
            for part, values in enumerate(_row_parts(code, source, stride, row)):
                code.store(values, beyond(code, target, 2 * part * TILE + row * LINE))

    return routine(4, write)


@no_type_check
@intrinsic
def split_inputs(_context, _source, _stride, _target):
    """(source, stride, target): as split_weights, with pairs of neighbours in the lines' place of rows."""

    def write(code: Code, source: Any, stride: Any, target: Any) -> None:
        rows = [_row_parts(code, source, stride, row) for row in range(LANES)]
        for part in range(PARTS):
            for line, values in enumerate(code.transpose([row[part] for row in rows])):
                code.store(values, beyond(code, target, 2 * part * TILE + line * LINE))

    return routine(3, write)


def _multiply(wide: int) -> Any:
    """(weights, inputs, sums, count): sums[32, 16 · wide] += Σ over `count` groups. Groups are contiguous, and so are
    sums, with 32 floats to a line."""

    def write(code: Code, weights: Any, inputs: Any, sums: Any, count: Any) -> None:
        builder = code.builder
        totals = [
            (2 * i + j, beyond(code, sums, i * LANES * 128 + j * 4 * LANES)) for i in range(2) for j in range(wide)
        ]
        for tile, place in totals:
            load_tile(code, tile, place, 128)
        with cgutils.for_range(builder, count) as loop:
            step = builder.mul(loop.index, word(GROUP))
            _products(code, builder.add(weights, step), builder.add(inputs, step), wide)
        for tile, place in totals:
            store_tile(code, tile, place, 128)

    @no_type_check
    @intrinsic
    def multiply(_context, _weights, _inputs, _sums, _count):
        return routine(4, write)

    return multiply


def _products(code: Code, weights: Any, inputs: Any, wide: int) -> None:
    """One group of each. Tiles 0 to 3 are sums, 4 and 5 of the weight, 6 and 7 of the input."""
    held: list[int | None] = [None, None]
    for wanted in _PRODUCTS:
        for side, (source, first, tiles) in enumerate(((weights, 4, 2), (inputs, 6, wide))):
            if held[side] != wanted[side]:
                for i in range(tiles):
                    load_tile(code, first + i, beyond(code, source, (2 * wanted[side] + i) * TILE), LINE)
                held[side] = wanted[side]
        for i in range(2):
            for j in range(wide):
                multiply_tiles(code, "tdpbf16ps", 2 * i + j, 4 + i, 6 + j)


multiply_1, multiply_2 = _multiply(1), _multiply(2)
