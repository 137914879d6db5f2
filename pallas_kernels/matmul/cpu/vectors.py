"""The product's inner loops over vectors of 16 floats, written for LLVM. Strides and counts are in floats."""

from __future__ import annotations

from typing import Any, no_type_check

import numba
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, Code, routine, word

_STEPS = 8  # of the summed axis that are unrolled, half a cache line


@no_type_check
def _rows(wide):
    """Rows of the weight in a tile: up to 24 vectors of sums stay in registers. Not 24 rows to one vector: where rows
    are a power of two apart, they would not fit the first-level cache's sets."""
    return min(12, 24 // wide)


tile_rows = numba.njit(_rows)


def _tile(wide: int) -> Any:
    """(weights, stride, inputs, sums, depth, ahead, far): sums[n, m] += Σ_k weights[n, k] · inputs[k, m].

    n < tile_rows(wide), m < 16 · wide, k < depth, a multiple of 16. weights [n, stride]; inputs and sums contiguous.
    Meanwhile `depth` floats of each of as many rows, which begin at `ahead` and lie `far` apart, are fetched: rows
    that are summed later. They need not exist.
    """
    rows = _rows(wide)

    def write(code: Code, weights: Any, stride: Any, inputs: Any, sums: Any, depth: Any, ahead: Any, far: Any) -> None:
        builder = code.builder
        places = [code.at(sums, (r * wide + i) * LANES) for r in range(rows) for i in range(wide)]
        totals = code.variables(len(places))
        for total, place in zip(totals, places, strict=True):
            builder.store(code.load(place), total)
        with cgutils.for_range_slice(builder, word(0), depth, word(_STEPS)) as (k, _):
            fetch_some(code, k, ahead, far)
            for step in range(_STEPS):
                values = [code.load(code.at(inputs, (k, wide * LANES), (step * wide + i) * LANES)) for i in range(wide)]
                for r in range(rows):
                    weight = code.spread(code.at(weights, k, (r, stride), step))
                    for i in range(wide):
                        code.grow(totals[r * wide + i], weight, values[i])
        for total, place in zip(totals, places, strict=True):
            code.store(builder.load(total), place)

    def fetch_some(code: Code, k: Any, ahead: Any, far: Any) -> None:
        """Half of the rows' lines at k, in turns: a line serves two rounds of the loop."""
        builder = code.builder
        line = builder.and_(k, word(-LANES))
        first = builder.mul(builder.and_(builder.udiv(k, word(_STEPS)), word(1)), word(rows // 2))
        for r in range(rows // 2):
            code.fetch(code.at(ahead, line, (builder.add(first, word(r)), far)))

    @no_type_check
    @intrinsic
    def tile(_context, _weights, _stride, _inputs, _sums, _depth, _ahead, _far):
        return routine(7, write)

    return tile


@no_type_check
@intrinsic
def turn(_context, _source, _from_stride, _target, _to_stride):
    """(source, stride, target, stride): the transpose of 16 rows of 16 floats."""

    def write(code: Code, source: Any, from_stride: Any, target: Any, to_stride: Any) -> None:
        rows = [code.load(code.at(source, (r, from_stride))) for r in range(LANES)]
        for r, row in enumerate(code.transpose(rows)):
            code.store(row, code.at(target, (r, to_stride)))

    return routine(4, write)


tile_1, tile_2, tile_3, tile_4 = _tile(1), _tile(2), _tile(3), _tile(4)
