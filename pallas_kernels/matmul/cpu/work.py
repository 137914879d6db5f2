"""A product's work, cut into items that threads claim one by one.

First the rows of the input are transposed, 16 at a time, so that a vector holds one column of 16 rows. Then an item is
a panel of rows of the weight, of which each row gives one column of the result.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np

from jaxpaged.pallas_kernels.cpu.frame import floats
from jaxpaged.pallas_kernels.cpu.workers import add
from jaxpaged.pallas_kernels.matmul.cpu import vectors as v

# Words of a job: addresses, sizes, and the counts of what has been claimed and finished.
INPUT, WEIGHT, OUT, TURNED = range(4)
ROWS, DEPTH, COLUMNS, PADDED, SLAB, PANEL = range(4, 10)  # PADDED: the depth, up to a multiple of 16
TURNS, TURNS_DONE, PANELS, JOB_WORDS = range(10, 14)


@no_type_check
@numba.njit
def strips(job):
    """Groups of 16 rows of the input."""
    return (job[ROWS] + v.LANES - 1) // v.LANES


@no_type_check
@numba.njit
def blocks(job):
    """Blocks of up to 4 strips, as equal as can be."""
    return (strips(job) + 3) // 4


@no_type_check
@numba.njit
def first_strip(job, block):
    """Of a block; the strips are spread evenly."""
    return strips(job) * block // blocks(job)


@no_type_check
@numba.njit
def work(job):
    """Claims items and computes them until none is left. Any number of threads may do so at once."""
    _turn_inputs(job)
    panel, columns = job[PANEL], job[COLUMNS]
    memory = np.empty(panel * v.STRIDE + panel * v.LANES * strips(job) + 3 * v.LANES * v.LANES, np.float32)
    weights = (memory.ctypes.data + 63) // 64 * 64
    sums = weights + 4 * panel * v.STRIDE
    square = sums + 4 * panel * v.LANES * strips(job)
    count = (columns + panel - 1) // panel
    mine = add(job, PANELS, 1)
    while mine < count:
        following = add(job, PANELS, 1)
        _make_panel(job, mine * panel, following * panel, weights, sums)
        _store(job, mine * panel, sums, square)
        mine = following
    memory[0] = 0  # keeps it alive until here


@no_type_check
@numba.njit
def _turn_inputs(job):
    """The input's transpose: by block, [PADDED, rows of the block], zeros where the input has nothing."""
    count = strips(job)
    source = floats(job[INPUT], (job[ROWS], job[DEPTH]))
    mine = add(job, TURNS, 1)
    while mine < count:
        block = 0
        while first_strip(job, block + 1) <= mine:
            block += 1
        first = first_strip(job, block)
        wide = (first_strip(job, block + 1) - first) * v.LANES
        place = job[TURNED] + 4 * (first * v.LANES * job[PADDED] + (mine - first) * v.LANES)
        whole = job[DEPTH] // v.LANES * v.LANES if (mine + 1) * v.LANES <= job[ROWS] else 0
        for k in range(0, whole, v.LANES):
            v.turn(source.ctypes.data + 4 * (mine * v.LANES * job[DEPTH] + k), job[DEPTH], place + 4 * k * wide, wide)
        target = floats(place, (job[PADDED] * wide,))
        rows = min(v.LANES, job[ROWS] - mine * v.LANES)
        for k in range(whole, job[PADDED]):
            for m in range(v.LANES):
                some = m < rows and k < job[DEPTH]
                target[k * wide + m] = source[mine * v.LANES + m, k] if some else np.float32(0)
        add(job, TURNS_DONE, 1)
        mine = add(job, TURNS, 1)
    while add(job, TURNS_DONE, 0) < count:
        pass


@no_type_check
@numba.njit
def _make_panel(job, first, following, weights, sums):
    """Sums of a panel: by block, [PANEL, rows of the block]."""
    panel, depth = job[PANEL], job[DEPTH]
    held = floats(sums, (panel * v.LANES * strips(job),))
    held[:] = 0
    for k in range(0, job[PADDED], job[SLAB]):
        slab = min(job[SLAB], job[PADDED] - k)
        direct = k + slab <= depth and first + panel <= job[COLUMNS]
        stride = depth if direct else v.STRIDE
        start = job[WEIGHT] + 4 * (first * depth + k) if direct else weights
        if not direct:
            _pack(job, first, k, slab, weights)
        last = k + slab >= job[PADDED]
        ahead = job[WEIGHT] + 4 * (following * depth if last else first * depth + k + slab)
        for block in range(blocks(job)):
            strip = first_strip(job, block)
            wide = first_strip(job, block + 1) - strip
            inputs = job[TURNED] + 4 * v.LANES * (strip * job[PADDED] + k * wide)
            rows = v.GROUP // wide
            for n in range(0, panel, rows):
                some, into = start + 4 * n * stride, sums + 4 * v.LANES * (panel * strip + n * wide)
                if wide == 4:
                    v.tile_4(some, inputs, into, slab, ahead + 4 * n * depth, depth, stride)
                elif wide == 3:
                    v.tile_3(some, inputs, into, slab, ahead + 4 * n * depth, depth, stride)
                elif wide == 2:
                    v.tile_2(some, inputs, into, slab, ahead + 4 * n * depth, depth, stride)
                else:
                    v.tile_1(some, inputs, into, slab, ahead + 4 * n * depth, depth, stride)


@no_type_check
@numba.njit
def _pack(job, first, k, slab, weights):
    """A slab of a panel's rows side by side; zeros where the weight has nothing."""
    depth = job[DEPTH]
    some = min(slab, depth - k)
    whole = some // v.LANES * v.LANES
    source = floats(job[WEIGHT], (job[COLUMNS] * depth,))
    target = floats(weights, (job[PANEL] * v.STRIDE,))
    for n in range(job[PANEL]):
        have = first + n < job[COLUMNS]
        begin = (first + n) * depth + k
        if have:
            v.copy(job[WEIGHT] + 4 * begin, weights + 4 * n * v.STRIDE, whole)
        for i in range(whole if have else 0, slab):
            target[n * v.STRIDE + i] = source[begin + i] if have and i < some else np.float32(0)


@no_type_check
@numba.njit
def _store(job, first, sums, square):
    """Sums to the result, of which a panel is some columns."""
    columns, panel = job[COLUMNS], job[PANEL]
    out = floats(job[OUT], (job[ROWS], columns))
    corner = floats(square, (v.LANES, v.LANES))
    for block in range(blocks(job)):
        strip = first_strip(job, block)
        wide = (first_strip(job, block + 1) - strip) * v.LANES
        for row in range(strip * v.LANES, strip * v.LANES + wide, v.LANES):
            for n in range(0, min(panel, columns - first), v.LANES):
                source = sums + 4 * (panel * strip * v.LANES + n * wide + row - strip * v.LANES)
                many, some = min(v.LANES, job[ROWS] - row), min(v.LANES, min(panel - n, columns - first - n))
                if many == v.LANES and some == v.LANES:
                    v.turn(source, wide, job[OUT] + 4 * (row * columns + first + n), columns)
                else:
                    v.turn(source, wide, square, v.LANES)
                    for m in range(many):
                        for i in range(some):
                            out[row + m, first + n + i] = corner[m, i]
