"""Attention's inner loops over vectors of 16 floats, written for LLVM: loops in Numba reach about half their speed.

Rows are query rows, keys those of one block, H is head_dim, a multiple of 16. Every function takes addresses; arrays
are float32 and contiguous unless a stride (in floats) is given: queries and sums [4, H], keys and values [keys, H],
scores and weights [4, stride].
"""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, VECTOR, WORD, ZERO, Code, routine, word

ROWS = 4


def _scores_of_rows(keys: int) -> Any:
    """(queries, keys, scores, stride, H): scores[r, j] = queries[r] · keys[j] for 4 rows and `keys` keys."""

    def write(code: Code, queries: Any, block: Any, scores: Any, stride: Any, width: Any) -> None:
        sums = code.variables(ROWS * keys)
        with cgutils.for_range_slice(code.builder, word(0), width, word(LANES)) as (h, _):
            vectors = [code.load(code.at(block, h, (j, width))) for j in range(keys)]
            for r in range(ROWS):
                query = code.load(code.at(queries, h, (r, width)))
                for j in range(keys):
                    code.grow(sums[r * keys + j], query, vectors[j])
        totals = code.lane_sums([code.builder.load(total) for total in sums])
        for index, total in enumerate(totals):
            code.store(total, code.at(scores, (index // keys, stride), index % keys))

    @no_type_check
    @intrinsic
    def scores_of_rows(_context, _queries, _keys, _scores, _stride, _width):
        return routine(5, write)

    return scores_of_rows


def _sums_of_rows(vectors: int) -> Any:
    """(weights, stride, count, values, sums, H): sums[r, :16 v] += Σ_j weights[r, j] · values[j, :16 v], j < count."""

    def write(code: Code, weights: Any, stride: Any, count: Any, values: Any, sums: Any, width: Any) -> None:
        places = [code.at(sums, (r, width), v * LANES) for r in range(ROWS) for v in range(vectors)]
        totals = code.variables(len(places))
        for total, place in zip(totals, places, strict=True):
            code.builder.store(code.load(place), total)
        with cgutils.for_range(code.builder, count) as loop:
            value = [code.load(code.at(values, (loop.index, width), v * LANES)) for v in range(vectors)]
            for r in range(ROWS):
                weight = code.spread(code.at(weights, loop.index, (r, stride)))
                for v in range(vectors):
                    code.grow(totals[r * vectors + v], weight, value[v])
        for total, place in zip(totals, places, strict=True):
            code.store(code.builder.load(total), place)

    @no_type_check
    @intrinsic
    def sums_of_rows(_context, _weights, _stride, _count, _values, _sums, _width):
        return routine(6, write)

    return sums_of_rows


def _exponentials(code: Code, x: Any) -> Any:
    """exp x for x <= 0, within 2 units in the last place; NaN for NaN; about 0 below -87.

    exp x = 2ⁿ · exp r with n the integer nearest to x / ln 2 and |r| <= ln 2 / 2, exp r by Cephes' polynomial.
    """
    builder = code.builder
    integers = ir.VectorType(ir.IntType(32), LANES)

    def every(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * LANES)

    def all_integers(value: int) -> Any:
        return ir.Constant(integers, [value] * LANES)

    x = builder.select(builder.fcmp_ordered("<", x, every(-87.0)), every(-87.0), x)
    n = builder.fptosi(code.add_product(every(-0.5), x, every(1.44269504088896341)), integers)
    whole = builder.sitofp(n, VECTOR)
    r = code.add_product(code.add_product(x, whole, every(-0.693359375)), whole, every(2.12194440e-4))
    y = every(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = code.add_product(every(coefficient), y, r)
    y = code.add_product(code.add_product(every(1.0), r, every(1.0)), builder.fmul(y, r), r)
    power = builder.bitcast(builder.shl(builder.add(n, all_integers(127)), all_integers(23)), VECTOR)
    return builder.fmul(y, power)


def _lanes_from(code: Code, start: Any, low: Any, high: Any) -> Any:
    """Which of the places start … start + 15 lie in [low, high)."""
    words = ir.VectorType(WORD, LANES)

    def spread(value: Any) -> Any:
        first = code.builder.insert_element(ir.Constant(words, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return code.shuffle(first, first, [0] * LANES)

    places = code.builder.add(spread(start), ir.Constant(words, list(range(LANES))))
    above = code.builder.icmp_signed(">=", places, spread(low))
    return code.builder.and_(above, code.builder.icmp_signed("<", places, spread(high)))


@no_type_check
@intrinsic
def largest(_context, _scores, _count, _low, _high, _top):
    """(scores, count, low, high, top): the largest of top and scores[low:high]; whole vectors up to count are read.

    Where a score is NaN any answer will do: the sums are NaN.
    """

    def make(_context, builder, _signature, values):
        code = Code(builder)
        scores, count, low, high, top = values
        (best,) = code.variables(1)
        builder.store(code.spread_value(top), best)
        with cgutils.for_range_slice(builder, word(0), count, word(LANES)) as (j, _):
            seen, score = _lanes_from(code, j, low, high), code.load(code.at(scores, j))
            more = builder.and_(seen, builder.fcmp_ordered(">", score, builder.load(best)))
            builder.store(builder.select(more, score, builder.load(best)), best)
        return code.fold(builder.load(best), lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(types.int64, types.int64, types.int64, types.int64, types.float32), make


@no_type_check
@intrinsic
def weigh(_context, _scores, _count, _low, _high, _top):
    """(scores, count, low, high, top): scores to weights exp(score - top), 0 outside [low, high). Returns their sum."""

    def make(_context, builder, _signature, values):
        code = Code(builder)
        scores, count, low, high, top = values
        (total,) = code.variables(1)
        tops = code.spread_value(top)
        with cgutils.for_range_slice(builder, word(0), count, word(LANES)) as (j, _):
            place = code.at(scores, j)
            weight = _exponentials(code, builder.fsub(code.load(place), tops))
            weight = builder.select(_lanes_from(code, j, low, high), weight, ZERO)
            code.store(weight, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return code.lane_sums([builder.load(total)])[0]

    return types.float32(types.int64, types.int64, types.int64, types.int64, types.float32), make


scores_of_rows_4, scores_of_rows_1 = _scores_of_rows(4), _scores_of_rows(1)
sums_of_rows_4, sums_of_rows_1 = _sums_of_rows(4), _sums_of_rows(1)
