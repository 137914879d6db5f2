"""Attention's inner loops over vectors of 16 floats, written for LLVM: loops in Numba reach about half their speed.

Rows are query rows, keys those of one block, H is head_dim, a multiple of 16. Every function takes addresses; arrays
are float32 and contiguous unless a stride (in floats) is given: queries and sums [4, H], keys and values [keys, H],
scores and weights [4, stride].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
ROWS = 4
_FLOAT, _WORD = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_ANY_ORDER = ("reassoc", "contract", "nsz")


class _Code:
    """Addresses, loads and arithmetic over a builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, *terms: Any) -> Any:
        """The address `terms` floats further on; a term is a number, a value, or a tuple of factors."""
        for term in terms:
            factors = term if isinstance(term, tuple) else (term,)
            count = _word(4)
            for factor in factors:
                count = self.builder.mul(count, _word(factor) if isinstance(factor, int) else factor)
            address = self.builder.add(address, count)
        return address

    def load(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, _VECTOR.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def spread(self, address: Any) -> Any:
        """The float at the address in every lane."""
        return self.spread_value(self.builder.load(self.builder.inttoptr(address, _FLOAT.as_pointer())))

    def spread_value(self, value: Any) -> Any:
        first = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, first, [0] * LANES)

    def add_product(self, total: Any, left: Any, right: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(left, right, flags=_ANY_ORDER), total, flags=_ANY_ORDER)

    def variables(self, count: int) -> list[Any]:
        """Vectors that change in a loop; LLVM keeps them in registers."""
        found = [cgutils.alloca_once(self.builder, _VECTOR) for _ in range(count)]
        for variable in found:
            self.builder.store(_ZERO, variable)
        return found

    def grow(self, variable: Any, left: Any, right: Any) -> None:
        self.builder.store(self.add_product(self.builder.load(variable), left, right), variable)

    def lane_sums(self, vectors: Sequence[Any]) -> list[Any]:
        """The sum of the lanes of each of 1, 2, 4, 8 or 16 vectors.

        Two vectors become one, which holds the sums of halves of both: with 4 vectors a, b, c, d first a8 b8 and
        c8 d8, then a4 b4 c4 d4. What is left of each is folded within its lanes.
        """
        size, held = LANES, list(vectors)
        while len(held) > 1:
            size //= 2
            starts = [start + side for side in (0, LANES) for start in range(0, LANES, 2 * size)]
            low = [start + lane for start in starts for lane in range(size)]
            high = [lane + size for lane in low]
            pairs = zip(held[::2], held[1::2], strict=True)
            held = [self._plus(self.shuffle(a, b, low), self.shuffle(a, b, high)) for a, b in pairs]
        (total,), step = held, size
        while step > 1:
            step //= 2
            total = self._plus(total, self.shuffle(total, total, [lane ^ step for lane in range(LANES)]))
        lanes = range(0, LANES, size)
        return [self.builder.extract_element(total, ir.Constant(ir.IntType(32), lane)) for lane in lanes]

    def fold(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """All lanes joined to one float."""
        step = LANES
        while step > 1:
            step //= 2
            vector = join(vector, self.shuffle(vector, vector, [lane ^ step for lane in range(LANES)]))
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    def _plus(self, left: Any, right: Any) -> Any:
        return self.builder.fadd(left, right, flags=_ANY_ORDER)

    def shuffle(self, left: Any, right: Any, lanes: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
        return self.builder.shuffle_vector(left, right, mask)


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _routine(arguments: int, write: Any) -> Any:
    """A function for Numba code that takes words and returns nothing; `write(code, *values)` writes its body."""

    @no_type_check
    def make(context, builder, _signature, values):
        write(_Code(builder), *values)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * arguments)
    return signature, make


def _scores_of_rows(keys: int) -> Any:
    """(queries, keys, scores, stride, H): scores[r, j] = queries[r] · keys[j] for 4 rows and `keys` keys."""

    def write(code: _Code, queries: Any, block: Any, scores: Any, stride: Any, width: Any) -> None:
        sums = code.variables(ROWS * keys)
        with cgutils.for_range_slice(code.builder, _word(0), width, _word(LANES)) as (h, _):
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
        return _routine(5, write)

    return scores_of_rows


def _sums_of_rows(vectors: int) -> Any:
    """(weights, stride, count, values, sums, H): sums[r, :16 v] += Σ_j weights[r, j] · values[j, :16 v], j < count."""

    def write(code: _Code, weights: Any, stride: Any, count: Any, values: Any, sums: Any, width: Any) -> None:
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
        return _routine(6, write)

    return sums_of_rows


def _exponentials(code: _Code, x: Any) -> Any:
    """exp x for x <= 0, within 2 units in the last place; NaN for NaN; about 0 below -87.

    exp x = 2ⁿ · exp r with n the integer nearest to x / ln 2 and |r| <= ln 2 / 2, exp r by Cephes' polynomial.
    """
    builder = code.builder
    integers = ir.VectorType(ir.IntType(32), LANES)

    def every(value: float) -> Any:
        return ir.Constant(_VECTOR, [value] * LANES)

    def all_integers(value: int) -> Any:
        return ir.Constant(integers, [value] * LANES)

    x = builder.select(builder.fcmp_ordered("<", x, every(-87.0)), every(-87.0), x)
    n = builder.fptosi(code.add_product(every(-0.5), x, every(1.44269504088896341)), integers)
    whole = builder.sitofp(n, _VECTOR)
    r = code.add_product(code.add_product(x, whole, every(-0.693359375)), whole, every(2.12194440e-4))
    y = every(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = code.add_product(every(coefficient), y, r)
    y = code.add_product(code.add_product(every(1.0), r, every(1.0)), builder.fmul(y, r), r)
    power = builder.bitcast(builder.shl(builder.add(n, all_integers(127)), all_integers(23)), _VECTOR)
    return builder.fmul(y, power)


def _lanes_from(code: _Code, start: Any, low: Any, high: Any) -> Any:
    """Which of the places start … start + 15 lie in [low, high)."""
    words = ir.VectorType(_WORD, LANES)

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
        code = _Code(builder)
        scores, count, low, high, top = values
        (best,) = code.variables(1)
        builder.store(code.spread_value(top), best)
        with cgutils.for_range_slice(builder, _word(0), count, _word(LANES)) as (j, _):
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
        code = _Code(builder)
        scores, count, low, high, top = values
        (total,) = code.variables(1)
        tops = code.spread_value(top)
        with cgutils.for_range_slice(builder, _word(0), count, _word(LANES)) as (j, _):
            place = code.at(scores, j)
            weight = _exponentials(code, builder.fsub(code.load(place), tops))
            weight = builder.select(_lanes_from(code, j, low, high), weight, _ZERO)
            code.store(weight, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return code.lane_sums([builder.load(total)])[0]

    return types.float32(types.int64, types.int64, types.int64, types.int64, types.float32), make


scores_of_rows_4, scores_of_rows_1 = _scores_of_rows(4), _scores_of_rows(1)
sums_of_rows_4, sums_of_rows_1 = _sums_of_rows(4), _sums_of_rows(1)
