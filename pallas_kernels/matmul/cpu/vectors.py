"""The product's inner loops over vectors of 16 floats, written for LLVM. All functions take addresses."""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, Code, routine, word

STRIDE = 272  # floats from one packed row of the weight to the next: a slab of up to 256, and off the powers of two
GROUP = 24  # rows of the weight, of which a tile takes as many as leave room for its vectors of the input
UNROLLED = 8


def _tile(vectors: int) -> Any:
    """(weights, inputs, sums, depth, ahead, far): sums[n, m] += Σ_k weights[n, k] · inputs[k, m].

    m < 16 · vectors, n < 24 / vectors: 24 vectors of sums stay in registers. weights [n, STRIDE], the others contiguous; depth is a
    multiple of 16. Meanwhile depth floats of each of the rows that lie `ahead`, `far` floats apart, are fetched.
    """
    rows, wide = GROUP // vectors, LANES * vectors

    def write(code: Code, weights: Any, inputs: Any, sums: Any, depth: Any, ahead: Any, far: Any, stride: Any) -> None:
        builder = code.builder
        places = [code.at(sums, r * wide + v * LANES) for r in range(rows) for v in range(vectors)]
        totals = code.variables(len(places))
        for total, place in zip(totals, places, strict=True):
            builder.store(code.load(place), total)
        one = code.at(word(0), stride)
        three, five, seven = (builder.mul(one, word(n)) for n in (3, 5, 7))
        def sh(x,n): return builder.shl(x, word(n))
        multiples = [word(0), one, sh(one,1), three, sh(one,2), five, sh(three,1), seven]
        with cgutils.for_range_slice(builder, word(0), depth, word(UNROLLED)) as (k, _):
            line = builder.and_(k, word(-16))
            half = builder.mul(builder.and_(builder.lshr(k, word(3)), word(1)), word(rows // 2))
            for r in range(rows // 2):
                code.fetch(code.at(ahead, (builder.add(half, word(r)), far), line))
            bases = [code.at(weights, k, (8 * i, stride)) for i in range(-(-rows // 8))]
            for u in range(UNROLLED):
                values = [code.load(code.at(inputs, (k, wide), u * wide + v * LANES)) for v in range(vectors)]
                for r in range(rows):
                    weight = code.spread(builder.add(builder.add(bases[r // 8], word(4 * u)), multiples[r % 8]))
                    for v in range(vectors):
                        code.grow(totals[r * vectors + v], weight, values[v])
        for total, place in zip(totals, places, strict=True):
            code.store(builder.load(total), place)

    @no_type_check
    @intrinsic
    def tile(_context, _weights, _inputs, _sums, _depth, _ahead, _far, _stride):
        return routine(7, write)

    return tile


def _turn(code: Code, source: Any, from_stride: Any, target: Any, to_stride: Any) -> None:
    rows = [code.load(code.at(source, (r, from_stride))) for r in range(LANES)]
    step = LANES // 2
    while step:  # swaps the off-diagonal squares of `step` rows and columns
        low = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        high = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        turned = list(rows)
        for r in range(LANES):
            if not r & step:
                turned[r] = code.shuffle(rows[r], rows[r + step], low)
                turned[r + step] = code.shuffle(rows[r], rows[r + step], high)
        rows, step = turned, step // 2
    for r, row in enumerate(rows):
        code.store(row, code.at(target, (r, to_stride)))


@no_type_check
@intrinsic
def turn(_context, _source, _from_stride, _target, _to_stride):
    """(source, stride, target, stride): the transpose of 16 rows of 16 floats; strides are in floats."""
    return routine(4, _turn)


@no_type_check
@intrinsic
def copy(_context, _source, _target, _count):
    """(source, target, count): copies count floats, a multiple of 16."""

    def write(code: Code, source: Any, target: Any, count: Any) -> None:
        with cgutils.for_range_slice(code.builder, word(0), count, word(LANES)) as (i, _):
            code.store(code.load(code.at(source, i)), code.at(target, i))

    return routine(3, write)


tile_1, tile_2, tile_3, tile_4 = _tile(1), _tile(2), _tile(3), _tile(4)
