"""A product's work, cut into items that threads claim one by one.

First the input is transposed, 16 rows at a time, so that a vector holds one column of 16 rows: with it an entry of the
weight, which lies along the summed axis, meets 16 rows at once, and no part of the weight has to be rearranged. Then
an item is a panel of rows of the weight, each of which gives a column of the result.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np

from jaxpaged.pallas_kernels.cpu.code import LANES
from jaxpaged.pallas_kernels.cpu.frame import floats
from jaxpaged.pallas_kernels.cpu.workers import add
from jaxpaged.pallas_kernels.matmul.cpu import vectors as v

PANEL = 24  # rows of the weight in an item, a multiple of every tile's
SLAB = 128  # of the summed axis at a time, a multiple of 16: 64 rows' part of the input fits the first-level cache
SPARE = -PANEL % LANES * 4 * LANES  # store() turns whole squares: it reads, and drops, rows beyond a panel's
STRIDE = SLAB + LANES  # from one copied row to the next: no power of two, which would crowd a few sets of the cache

# Words of a job: addresses, sizes, and the counts of what has been claimed and finished.
INPUT, WEIGHT, OUT, TURNED = range(4)
ROWS, DEPTH, COLUMNS = range(4, 7)
TURNS, TURNS_DONE, PANELS, JOB_WORDS = range(7, 11)


@no_type_check
@numba.njit
def padded(job):
    """Length of the summed axis, up to a multiple of 16."""
    return (job[DEPTH] + LANES - 1) // LANES * LANES


@no_type_check
@numba.njit
def strips(job):
    """Groups of 16 rows of the input."""
    return (job[ROWS] + LANES - 1) // LANES


@no_type_check
@numba.njit
def _blocks(job):
    """Blocks of up to 4 strips."""
    return (strips(job) + 3) // 4


@no_type_check
@numba.njit
def _first(job, block):
    """First strip of a block. Blocks are as equal as can be: 5 strips are 2 and 3."""
    return strips(job) * block // _blocks(job)


@no_type_check
@numba.njit
def work(job):
    """Claims items and computes them until none is left. Any number of threads may do so at once."""
    turn_inputs(job)
    memory = np.empty(PANEL * (STRIDE + LANES * strips(job)) + SPARE + LANES * LANES + LANES, np.float32)
    copied = (memory.ctypes.data + 63) // 64 * 64
    sums = copied + 4 * PANEL * STRIDE
    square = sums + 4 * PANEL * LANES * strips(job)
    mine = add(job, PANELS, 1)
    while mine * PANEL < job[COLUMNS]:
        following = add(job, PANELS, 1)  # known early, so that its weights can be fetched
        make_panel(job, mine * PANEL, following * PANEL, copied, sums)
        store(job, mine * PANEL, sums, square)
        mine = following
    memory[0] = 0  # keeps it alive until here


@no_type_check
@numba.njit
def turn_inputs(job):
    """The input's transpose: by block, [padded, rows of the block], zeros where the input has nothing.

    Returns when all of it is there, also the parts that other threads do.
    """
    mine = add(job, TURNS, 1)
    while mine < strips(job):
        block = 0
        while _first(job, block + 1) <= mine:
            block += 1
        _turn_strip(job, mine, _first(job, block), (_first(job, block + 1) - _first(job, block)) * LANES)
        add(job, TURNS_DONE, 1)
        mine = add(job, TURNS, 1)
    while add(job, TURNS_DONE, 0) < strips(job):
        pass


@no_type_check
@numba.njit
def _turn_strip(job, strip, first, wide):
    """One strip of the block that begins with strip `first` and has `wide` rows."""
    depth, row = job[DEPTH], strip * LANES
    place = job[TURNED] + 4 * (first * LANES * padded(job) + (strip - first) * LANES)
    rows = min(LANES, job[ROWS] - row)
    whole = depth // LANES * LANES if rows == LANES else 0
    for k in range(0, whole, LANES):
        v.turn(job[INPUT] + 4 * (row * depth + k), depth, place + 4 * k * wide, wide)
    source, target = floats(job[INPUT], (job[ROWS], depth)), floats(place, (padded(job) * wide,))
    for k in range(whole, padded(job)):
        for m in range(LANES):
            target[k * wide + m] = source[row + m, k] if m < rows and k < depth else np.float32(0)


@no_type_check
@numba.njit
def make_panel(job, first, following, copied, sums):
    """Sums of a panel: by block, [PANEL, rows of the block]. `following`: the panel that this thread does next."""
    depth = job[DEPTH]
    floats(sums, (PANEL * LANES * strips(job),))[:] = 0
    for k in range(0, padded(job), SLAB):
        slab = min(SLAB, padded(job) - k)
        weights, stride = job[WEIGHT] + 4 * (first * depth + k), depth
        if first + PANEL > job[COLUMNS] or k + slab > depth:
            _copy(job, first, k, slab, copied)
            weights, stride = copied, STRIDE
        ahead = first * depth + k + slab if k + slab < depth else following * depth
        for block in range(_blocks(job)):
            strip, wide = _first(job, block), _first(job, block + 1) - _first(job, block)
            inputs = job[TURNED] + 4 * LANES * (strip * padded(job) + k * wide)
            _add_slab(
                wide, weights, stride, inputs, sums + 4 * LANES * PANEL * strip, slab, job[WEIGHT] + 4 * ahead, depth
            )


@no_type_check
@numba.njit
def _add_slab(wide, weights, stride, inputs, sums, slab, ahead, far):
    """A block's sums grow by a slab's products. wide: strips; ahead, far: see vectors."""
    rows = v.tile_rows(wide)
    for n in range(0, PANEL, rows):
        some, into, later = weights + 4 * n * stride, sums + 4 * n * LANES * wide, ahead + 4 * n * far
        if wide == 4:
            v.tile_4(some, stride, inputs, into, slab, later, far)
        elif wide == 3:
            v.tile_3(some, stride, inputs, into, slab, later, far)
        elif wide == 2:
            v.tile_2(some, stride, inputs, into, slab, later, far)
        else:
            v.tile_1(some, stride, inputs, into, slab, later, far)


@no_type_check
@numba.njit
def _copy(job, first, k, slab, copied):
    """A slab of the last rows or of the last columns, with zeros where the weight has nothing."""
    source, target = floats(job[WEIGHT], (job[COLUMNS], job[DEPTH])), floats(copied, (PANEL, STRIDE))
    for n in range(PANEL):
        some = max(0, min(slab, job[DEPTH] - k)) if first + n < job[COLUMNS] else 0
        for i in range(some):
            target[n, i] = source[first + n, k + i]
        for i in range(some, slab):
            target[n, i] = 0


@no_type_check
@numba.njit
def store(job, first, sums, square):
    """A panel's sums to its columns of the result."""
    columns = job[COLUMNS]
    out, corner = floats(job[OUT], (job[ROWS], columns)), floats(square, (LANES, LANES))
    for block in range(_blocks(job)):
        strip = _first(job, block)
        wide = (_first(job, block + 1) - strip) * LANES
        for row in range(strip * LANES, min(strip * LANES + wide, job[ROWS]), LANES):
            for n in range(0, min(PANEL, columns - first), LANES):
                source = sums + 4 * (PANEL * strip * LANES + n * wide + row - strip * LANES)
                rows, some = min(LANES, job[ROWS] - row), min(LANES, PANEL - n, columns - first - n)
                if rows == LANES and some == LANES:
                    v.turn(source, wide, job[OUT] + 4 * (row * columns + first + n), columns)
                    continue
                v.turn(source, wide, square, LANES)
                for m in range(rows):
                    for i in range(some):
                        out[row + m, first + n + i] = corner[m, i]
