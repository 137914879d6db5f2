"""Rounding activations to integers and multiplying tiles of int8s, written for LLVM.

A row of activations becomes integers by a scale of its own. One part: -127 … 127, int8s. Two parts: -32512 … 32512, as
256 · high + low, both int8s, which the tiles treat as two rows.

A tile is 16 lines of 64 int8s. Of the weight, a line is 64 entries of a row along the summed axis. Of the input, a line
is four neighbours on the summed axis, of 16 rows. Of sums, a line is 16 int32s.
"""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, VECTOR, ZERO, Code, routine, word
from jaxpaged.pallas_kernels.cpu.tiles import (
    LINE,
    TILE,
    beyond,
    clear_tile,
    load_tile,
    multiply_tiles,
    store_tile,
)

DEEP = 64  # of the summed axis in a tile
GROUP = 2 * TILE  # bytes: two tiles, which lie together
LARGEST = (127.0, 127.0 * 256)  # integer, by parts - 1
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_QUARTER, _HALF, _BYTES = (ir.VectorType(ir.IntType(8), LANES * size) for size in (1, 2, 4))


@no_type_check
@intrinsic
def largest(_context, _source, _count, _target):
    """(source, count, target): the largest magnitude of `count` floats, a multiple of 16, to a float at target; NaN if
    there is a NaN or an infinity."""

    def write(code: Code, source: Any, count: Any, target: Any) -> None:
        builder = code.builder
        most, odd = code.variables(2)  # odd: sums of zeros, unless something is not finite
        with cgutils.for_range_slice(builder, word(0), count, word(LANES)) as (i, _):
            values = code.load(code.at(source, i))
            size = _call_vector(code, "llvm.fabs.v16f32", values)
            builder.store(_call_vector(code, "llvm.maxnum.v16f32", builder.load(most), size), most)
            builder.store(builder.fadd(builder.load(odd), builder.fmul(values, ZERO)), odd)
        found = code.fold(builder.load(most), lambda a, b: _call_vector(code, "llvm.maxnum.v16f32", a, b))
        code.store(builder.fadd(found, code.fold(builder.load(odd), builder.fadd)), target)

    return routine(3, write)


def _call_vector(code: Code, name: str, *values: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(values))
    return code.builder.call(cgutils.get_or_insert_function(code.builder.module, kind, name), values)


def _round_inputs(parts: int) -> Any:
    """(source, stride, factors, target): 16 rows of 64 floats, each times its row's factor, rounded to integers, to the
    first tile of a group at target; with two parts the high ones there and the low ones to the second tile."""

    def write(code: Code, source: Any, stride: Any, factors: Any, target: Any) -> None:
        builder = code.builder
        rows: list[list[Any]] = [[] for _ in range(parts)]
        for row in range(LANES):
            factor = code.spread(code.at(factors, row))
            quarters: list[list[Any]] = [[] for _ in range(parts)]
            for i in range(0, DEEP, LANES):
                scaled = builder.fmul(code.load(code.at(source, (row, stride), i)), factor)
                for part, integers in enumerate(_integers(code, scaled, parts)):
                    quarters[part].append(builder.trunc(integers, _QUARTER))
            for part in range(parts):
                rows[part].append(builder.bitcast(_joined(code, quarters[part]), VECTOR))
        for part in range(parts):
            for line, values in enumerate(code.transpose(rows[part])):
                code.store(values, beyond(code, target, part * TILE + line * LINE))

    @no_type_check
    @intrinsic
    def round_inputs(_context, _source, _stride, _factors, _target):
        return routine(4, write)

    return round_inputs


def _integers(code: Code, values: Any, parts: int) -> list[Any]:
    """Floats rounded to the nearest integers (to even), whole or as high and low ones; of a NaN whatever comes."""
    builder, number = code.builder, ir.IntType(32)
    kind = ir.FunctionType(_INTEGERS, [VECTOR, _INTEGERS, ir.IntType(16), number])
    convert = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.cvtps2dq.512")
    nothing, all_lanes = ir.Constant(_INTEGERS, [0] * LANES), ir.Constant(ir.IntType(16), -1)
    whole = builder.call(convert, [values, nothing, all_lanes, ir.Constant(number, 4)])  # 4: as the thread rounds
    if parts == 1:
        return [whole]
    high = builder.ashr(builder.add(whole, _all(128)), _all(8))  # so that low is -128 … 127
    return [high, builder.sub(whole, builder.shl(high, _all(8)))]


def _all(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * LANES)


def _joined(code: Code, quarters: list[Any]) -> Any:
    """Four vectors of 16 int8s as one of 64."""
    low, high = (code.shuffle(quarters[i], quarters[i + 1], range(2 * LANES)) for i in (0, 2))
    return code.shuffle(low, high, range(4 * LANES))


@no_type_check
@intrinsic
def pack_weights(_context, _source, _stride, _target, _ahead):
    """(source, stride, target, ahead): 16 rows of 64 int8s, `stride` bytes apart, to a tile. The same rows at `ahead`,
    which need not exist, are asked for meanwhile."""

    def write(code: Code, source: Any, stride: Any, target: Any, ahead: Any) -> None:
        builder = code.builder
        for row in range(LANES):
            distance = builder.mul(stride, word(row))
            code.fetch(builder.add(ahead, distance))
            code.store(code.load(builder.add(source, distance)), beyond(code, target, row * LINE))

    return routine(4, write)


def _multiply(wide: int) -> Any:
    """(weights, inputs, sums, count): sums[32, 16 · wide] = Σ over `count` groups. Groups are contiguous, and so are
    sums, with 32 int32s to a line."""

    def write(code: Code, weights: Any, inputs: Any, sums: Any, count: Any) -> None:
        builder = code.builder
        totals = [(i, j) for i in range(2) for j in range(wide)]
        for i, j in totals:
            clear_tile(code, 2 * i + j)
        with cgutils.for_range(builder, count) as loop:
            step = builder.mul(loop.index, word(GROUP))
            for first, source, tiles in ((4, weights, 2), (6, inputs, wide)):
                for tile in range(tiles):
                    load_tile(code, first + tile, beyond(code, builder.add(source, step), tile * TILE), LINE)
            for i, j in totals:
                multiply_tiles(code, "tdpbssd", 2 * i + j, 4 + i, 6 + j)
        for i, j in totals:
            store_tile(code, 2 * i + j, beyond(code, sums, i * LANES * 2 * LINE + j * LINE), 2 * LINE)

    @no_type_check
    @intrinsic
    def multiply(_context, _weights, _inputs, _sums, _count):
        return routine(4, write)

    return multiply


def _finish(parts: int) -> Any:
    """(sums, row_scales, scales, target, stride): 16 outputs by 16 rows of integers, with two parts the low ones 16
    further on, become floats: times both scales, transposed, to lines `stride` floats apart."""

    def write(code: Code, sums: Any, row_scales: Any, scales: Any, target: Any, stride: Any) -> None:
        builder = code.builder
        by_row = code.load(row_scales)
        lines = []
        for output in range(LANES):
            line = beyond(code, sums, output * 2 * LINE)
            values = _floats(code, line)
            if parts == 2:
                high = builder.fmul(values, ir.Constant(VECTOR, [256.0] * LANES))
                values = builder.fadd(high, _floats(code, beyond(code, line, LINE)))
            values = builder.fmul(values, by_row)
            lines.append(builder.fmul(values, code.spread(code.at(scales, output))))
        for row, values in enumerate(code.transpose(lines)):
            code.store(values, code.at(target, (row, stride)))

    @no_type_check
    @intrinsic
    def finish(_context, _sums, _row_scales, _scales, _target, _stride):
        return routine(5, write)

    return finish


def _floats(code: Code, address: Any) -> Any:
    return code.builder.sitofp(code.builder.bitcast(code.load(address), _INTEGERS), VECTOR)


multiply_1, multiply_2 = _multiply(1), _multiply(2)
round_inputs_1, round_inputs_2 = _round_inputs(1), _round_inputs(2)
finish_1, finish_2 = _finish(1), _finish(2)
