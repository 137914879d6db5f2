"""Splitting float32s into bfloat16s and multiplying tiles of them, written for LLVM.

A float32 holds 24 significant bits and a bfloat16 8, so x = x₀ + x₁ + x₂ exactly, with x₁ below x₀ · 2⁻⁷ and x₂ below
x₀ · 2⁻¹⁵. Of the nine products of a pair's parts the three smallest, below 2⁻²¹ of the whole, are left out, as in
"bfloat16x6" products on other machines with units for bfloat16 (Henry, Tang, Heinecke, 2019); sums are in float32.

A tile is 1 KiB: 16 lines of 32 bfloat16s. Of the weight, a line is a row's 32 entries along the summed axis. Of the
input, a line is two neighbours on the summed axis, of 16 rows. Of sums, a line is 16 float32s. Strides are in floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, VECTOR, WORD, Code, routine, word

DEEP = 32  # of the summed axis in a tile
TILE = 1024  # bytes
PARTS = 3
GROUP = PARTS * 2 * TILE  # bytes: two tiles of each part, which lie together
_BYTE, _HALF = ir.IntType(8), ir.IntType(16)
_BYTES = _BYTE.as_pointer()
_WIDE, _HALVES = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(_HALF, 2 * LANES)
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
    halves = [builder.bitcast(vector, _HALVES) for vector in (low, high)]
    return builder.bitcast(code.shuffle(*halves, range(1, 4 * LANES, 2)), VECTOR)


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
                code.store(values, _place(code, target, 2 * part * TILE + row * TILE // LANES))

    return routine(4, write)


@no_type_check
@intrinsic
def split_inputs(_context, _source, _stride, _target):
    """(source, stride, target): as split_weights, with pairs of neighbours in the lines' place of rows."""

    def write(code: Code, source: Any, stride: Any, target: Any) -> None:
        rows = [_row_parts(code, source, stride, row) for row in range(LANES)]
        for part in range(PARTS):
            for line, values in enumerate(code.transpose([row[part] for row in rows])):
                code.store(values, _place(code, target, 2 * part * TILE + line * TILE // LANES))

    return routine(3, write)


@no_type_check
@intrinsic
def configure(_context, _palette):
    """Makes the thread's tiles 16 lines of 64 bytes, as the 64 bytes at an address say; until release()."""

    def make(context, builder, _signature, arguments):
        _call(builder, "llvm.x86.ldtilecfg", [builder.inttoptr(arguments[0], _BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64), make


@no_type_check
@intrinsic
def release(_context):
    """Gives the thread's tiles back, so that the system need not save them."""

    def make(context, builder, _signature, _arguments):
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), make


def _multiply(wide: int) -> Any:
    """(weights, inputs, sums, count): sums[32, 16 · wide] += Σ over `count` groups. Groups are contiguous, and so are
    sums, with 32 floats to a line."""

    def write(code: Code, weights: Any, inputs: Any, sums: Any, count: Any) -> None:
        builder = code.builder
        totals = [
            (2 * i + j, _place(code, sums, i * LANES * 128 + j * 4 * LANES)) for i in range(2) for j in range(wide)
        ]
        for tile, place in totals:
            _tile(builder, "tileloadd64", tile, place, 128)
        with cgutils.for_range(builder, count) as loop:
            step = builder.mul(loop.index, word(GROUP))
            _products(code, builder.add(weights, step), builder.add(inputs, step), wide)
        for tile, place in totals:
            _tile(builder, "tilestored64", tile, place, 128)

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
                    place = _place(code, source, (2 * wanted[side] + i) * TILE)
                    _tile(code.builder, "tileloadd64", first + i, place, TILE // LANES)
                held[side] = wanted[side]
        for i in range(2):
            for j in range(wide):
                numbers = [ir.Constant(_BYTE, number) for number in (2 * i + j, 4 + i, 6 + j)]
                _call(code.builder, "llvm.x86.tdpbf16ps", numbers)


def _tile(builder: Any, what: str, number: int, address: Any, stride: int) -> None:
    _call(builder, f"llvm.x86.{what}", [ir.Constant(_BYTE, number), builder.inttoptr(address, _BYTES), word(stride)])


def _place(code: Code, address: Any, distance: int) -> Any:
    return code.builder.add(address, ir.Constant(WORD, distance))


def _call(builder: Any, name: str, arguments: Sequence[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


multiply_1, multiply_2 = _multiply(1), _multiply(2)
