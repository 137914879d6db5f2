"""LLVM code over vectors of 16 floats, written through a builder: loops in Numba reach about half its speed.

Addresses are words, arrays are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16
_FLOAT, WORD = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(_FLOAT, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
_ANY_ORDER = ("reassoc", "contract", "nsz")


class Code:
    """Addresses, loads and arithmetic over a builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, *terms: Any) -> Any:
        """The address `terms` floats further on; a term is a number, a value, or a tuple of factors."""
        for term in terms:
            factors = term if isinstance(term, tuple) else (term,)
            count = word(4)
            for factor in factors:
                count = self.builder.mul(count, word(factor) if isinstance(factor, int) else factor)
            address = self.builder.add(address, count)
        return address

    def load(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, VECTOR.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def fetch(self, address: Any) -> None:
        """Asks for the cache line at the address, which need not exist, in the second-level cache."""
        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        read, locality, data = (ir.Constant(number, value) for value in (0, 2, 1))
        self.builder.call(prefetch, [self.builder.inttoptr(address, byte), read, locality, data])

    def spread(self, address: Any) -> Any:
        """The float at the address in every lane."""
        return self.spread_value(self.builder.load(self.builder.inttoptr(address, _FLOAT.as_pointer())))

    def spread_value(self, value: Any) -> Any:
        first = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, first, [0] * LANES)

    def add_product(self, total: Any, left: Any, right: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(left, right, flags=_ANY_ORDER), total, flags=_ANY_ORDER)

    def variables(self, count: int) -> list[Any]:
        """Vectors that change in a loop; LLVM keeps them in registers."""
        found = [cgutils.alloca_once(self.builder, VECTOR) for _ in range(count)]
        for variable in found:
            self.builder.store(ZERO, variable)
        return found

    def grow(self, variable: Any, left: Any, right: Any) -> None:
        self.builder.store(self.add_product(self.builder.load(variable), left, right), variable)

    def transpose(self, rows: Sequence[Any]) -> list[Any]:
        """Of 16 vectors: squares of 8 rows and lanes off the diagonal change places, then those of 4, of 2, of 1."""
        held, size = list(rows), LANES // 2
        while size:
            low = [lane - size + LANES if lane & size else lane for lane in range(LANES)]
            high = [lane + LANES if lane & size else lane + size for lane in range(LANES)]
            for r in (r for r in range(LANES) if not r & size):
                a, b = held[r], held[r + size]
                held[r], held[r + size] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            size //= 2
        return held

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


def word(value: int) -> Any:
    """A constant."""
    return ir.Constant(WORD, value)


def routine(arguments: int, write: Any) -> Any:
    """A function for Numba code that takes words and returns nothing; `write(code, *values)` writes its body."""

    @no_type_check
    def make(context, builder, _signature, values):
        write(Code(builder), *values)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * arguments)
    return signature, make
