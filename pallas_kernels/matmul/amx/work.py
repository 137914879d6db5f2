"""A product's work on tiles, cut into items that threads claim one by one.

First the input is split and laid out in tiles, 16 rows (a strip) at a time; two strips make a pair, 32 columns of
sums. Then an item is a panel of 32 rows of the weight: a slab of it at a time is split, and meets every pair.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np

from jaxpaged.pallas_kernels.cpu.code import LANES
from jaxpaged.pallas_kernels.cpu.frame import floats
from jaxpaged.pallas_kernels.cpu.tiles import TILE, configure, release
from jaxpaged.pallas_kernels.cpu.workers import add
from jaxpaged.pallas_kernels.matmul.amx import tiles as t
from jaxpaged.pallas_kernels.matmul.cpu.vectors import turn

PANEL = 32  # rows of the weight in an item: two tiles
SLAB = 4  # groups at a time: a panel's, split, take half of the first-level cache
SUMS = PANEL * PANEL  # floats of a pair's sums

# Words of a job: addresses, sizes, and the counts of what has been claimed and finished.
INPUT, WEIGHT, OUT, SPLIT, PALETTE = range(5)
ROWS, DEPTH, COLUMNS = range(5, 8)
STRIPS, STRIPS_DONE, PANELS, JOB_WORDS = range(8, 12)


@no_type_check
@numba.njit
def groups(job):
    """Tiles along the summed axis."""
    return (job[DEPTH] + t.DEEP - 1) // t.DEEP


@no_type_check
@numba.njit
def strips(job):
    """Groups of 16 rows of the input."""
    return (job[ROWS] + LANES - 1) // LANES


@no_type_check
@numba.njit
def pairs(job):
    """Groups of 32 rows of the input."""
    return (strips(job) + 1) // 2


@no_type_check
@numba.njit
def work(job):
    """Claims items and computes them until none is left. Any number of threads may do so at once."""
    square = np.empty(LANES * t.DEEP, np.float32)
    memory = np.empty(PANEL * SLAB * t.DEEP + SLAB * t.GROUP // 4 + pairs(job) * SUMS + LANES, np.float32)
    copied = (memory.ctypes.data + 63) // 64 * 64
    split = copied + 4 * PANEL * SLAB * t.DEEP
    sums = split + SLAB * t.GROUP
    split_all_inputs(job, square)
    configure(job[PALETTE])
    mine = add(job, PANELS, 1)
    while mine * PANEL < job[COLUMNS]:
        following = add(job, PANELS, 1)  # known early, so that its weights can be fetched
        make_panel(job, mine * PANEL, following * PANEL, copied, split, sums)
        store(job, mine * PANEL, sums, square)
        mine = following
    release()
    memory[0] = 0  # keeps it alive until here


@no_type_check
@numba.njit
def split_all_inputs(job, square):
    """The input's tiles: by pair and group, zeros where the input has nothing.

    Returns when all of them are there, also those that other threads make.
    """
    mine = add(job, STRIPS, 1)
    while mine < strips(job):
        _split_strip(job, mine, square)
        add(job, STRIPS_DONE, 1)
        mine = add(job, STRIPS, 1)
    while add(job, STRIPS_DONE, 0) < strips(job):
        pass


@no_type_check
@numba.njit
def _split_strip(job, strip, square):
    depth, row = job[DEPTH], strip * LANES
    place = job[SPLIT] + strip // 2 * groups(job) * t.GROUP + strip % 2 * TILE
    whole = depth // t.DEEP if row + LANES <= job[ROWS] else 0
    for g in range(whole):
        t.split_inputs(job[INPUT] + 4 * (row * depth + g * t.DEEP), depth, place + g * t.GROUP)
    for g in range(whole, groups(job)):
        _copy(job[INPUT], job[ROWS], depth, row, LANES, g * t.DEEP, t.DEEP, square.ctypes.data)
        t.split_inputs(square.ctypes.data, t.DEEP, place + g * t.GROUP)


@no_type_check
@numba.njit
def _copy(address, rows, depth, row, count, k, deep, target):
    """[count, deep] of [rows, depth] from (row, k) on, with zeros where there is nothing."""
    source, to = floats(address, (rows, depth)), floats(target, (count, deep))
    for r in range(count):
        some = max(0, min(deep, depth - k)) if row + r < rows else 0
        for i in range(some):
            to[r, i] = source[row + r, k + i]
        for i in range(some, deep):
            to[r, i] = 0


@no_type_check
@numba.njit
def make_panel(job, first, following, copied, split, sums):
    """Sums of a panel: by pair, [PANEL, 32]. `following`: the panel that this thread does next."""
    depth = job[DEPTH]
    floats(sums, (pairs(job) * SUMS,))[:] = 0
    for g in range(0, groups(job), SLAB):
        count, k = min(SLAB, groups(job) - g), g * t.DEEP
        ahead = first * depth + k + count * t.DEEP if g + count < groups(job) else following * depth
        _split_panel(job, first, k, count, job[WEIGHT] + 4 * ahead, copied, split)
        for pair in range(pairs(job)):
            inputs, into = job[SPLIT] + (pair * groups(job) + g) * t.GROUP, sums + 4 * pair * SUMS
            if 2 * pair + 1 < strips(job):
                t.multiply_2(split, inputs, into, count)
            else:
                t.multiply_1(split, inputs, into, count)


@no_type_check
@numba.njit
def _split_panel(job, first, k, count, ahead, copied, split):
    """A slab of a panel: by group, two tiles of each part."""
    depth, deep = job[DEPTH], count * t.DEEP
    source, stride = job[WEIGHT] + 4 * (first * depth + k), depth
    if first + PANEL > job[COLUMNS] or k + deep > depth:
        _copy(job[WEIGHT], job[COLUMNS], depth, first, PANEL, k, deep, copied)
        source, stride = copied, deep
    for half in range(2):
        for g in range(count):
            distance = 4 * (half * LANES * stride + g * t.DEEP)
            later = ahead + 4 * (half * LANES * depth + g * t.DEEP)
            t.split_weights(source + distance, stride, split + g * t.GROUP + half * TILE, later)


@no_type_check
@numba.njit
def store(job, first, sums, square):
    """A panel's sums to its columns of the result."""
    columns = job[COLUMNS]
    out, corner = floats(job[OUT], (job[ROWS], columns)), floats(square.ctypes.data, (LANES, LANES))
    for row in range(0, job[ROWS], LANES):
        for n in range(0, min(PANEL, columns - first), LANES):
            strip = row // LANES
            source = sums + 4 * (strip // 2 * SUMS + n * PANEL + strip % 2 * LANES)
            rows, some = min(LANES, job[ROWS] - row), min(LANES, columns - first - n)
            if rows == LANES and some == LANES:
                turn(source, PANEL, job[OUT] + 4 * (row * columns + first + n), columns)
                continue
            turn(source, PANEL, corner.ctypes.data, LANES)
            for m in range(rows):
                for i in range(some):
                    out[row + m, first + n + i] = corner[m, i]
