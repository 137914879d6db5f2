"""A product's work on tiles of int8s, cut into items that threads claim one by one.

First the input is rounded and laid out in tiles, 16 rows (a strip) at a time. With one part two strips make a pair, 32
columns of sums; with two parts the high and the low integers of one strip do. Then an item is a panel of 32 rows of the
weight, which are laid out in tiles and meet every pair.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np

from jaxpaged.pallas_kernels.cpu.code import LANES
from jaxpaged.pallas_kernels.cpu.frame import bytes_at, floats
from jaxpaged.pallas_kernels.cpu.tiles import TILE, configure, release
from jaxpaged.pallas_kernels.cpu.workers import add
from jaxpaged.pallas_kernels.quantized_matmul.amx import tiles as t

PANEL = 32  # rows of the weight in an item: two tiles
SUMS = 4 * PANEL * PANEL  # bytes of a pair's sums

# Words of a job: addresses, sizes, and the counts of what has been claimed and finished.
INPUT, WEIGHT, SCALES, OUT, ROUNDED, ROW_SCALES, PALETTE = range(7)
ROWS, DEPTH, COLUMNS, PARTS = range(7, 11)
STRIPS, STRIPS_DONE, PANELS, JOB_WORDS = range(11, 15)


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
    """Groups of 32 columns of sums."""
    return (strips(job) * job[PARTS] + 1) // 2


@no_type_check
@numba.njit
def work(job):
    """Claims items and computes them until none is left. Any number of threads may do so at once."""
    deep = groups(job) * t.DEEP
    memory = np.empty(4 * LANES * deep + PANEL * deep + pairs(job) * SUMS + TILE + 4 * PANEL + 64, np.uint8)
    rows = (memory.ctypes.data + 63) // 64 * 64  # of a strip, where the input's own will not do
    packed = rows + 4 * LANES * deep
    sums = packed + PANEL * deep
    square = sums + pairs(job) * SUMS
    scales = square + TILE
    round_all_inputs(job, rows)
    configure(job[PALETTE])
    mine = add(job, PANELS, 1)
    while mine * PANEL < job[COLUMNS]:
        following = add(job, PANELS, 1)  # known early, so that its weights can be fetched
        _pack_panel(job, mine * PANEL, following * PANEL, packed)
        for pair in range(pairs(job)):
            inputs, into = job[ROUNDED] + pair * groups(job) * t.GROUP, sums + pair * SUMS
            if 2 * pair + 1 < strips(job) * job[PARTS]:
                t.multiply_2(packed, inputs, into, groups(job))
            else:
                t.multiply_1(packed, inputs, into, groups(job))
        store(job, mine * PANEL, sums, scales, square)
        mine = following
    release()
    memory[0] = 0  # keeps it alive until here


@no_type_check
@numba.njit
def round_all_inputs(job, rows):
    """The input's tiles and its rows' scales. Returns when all are there, also those that other threads make."""
    mine = add(job, STRIPS, 1)
    while mine < strips(job):
        _round_strip(job, mine, rows)
        add(job, STRIPS_DONE, 1)
        mine = add(job, STRIPS, 1)
    while add(job, STRIPS_DONE, 0) < strips(job):
        pass


@no_type_check
@numba.njit
def _round_strip(job, strip, rows):
    """Rows that do not exist are zeros, with scale 0; and so are inputs beyond the last."""
    depth, deep, first, most = job[DEPTH], groups(job) * t.DEEP, strip * LANES, t.LARGEST[job[PARTS] - 1]
    source, stride = job[INPUT] + 4 * first * depth, depth
    if depth != deep or first + LANES > job[ROWS]:
        given, padded = floats(job[INPUT], (job[ROWS], depth)), floats(rows, (LANES, deep))
        padded[:] = 0
        for row in range(min(LANES, job[ROWS] - first)):
            padded[row, :depth] = given[first + row]
        source, stride = rows, deep
    scales, factors = floats(job[ROW_SCALES] + 4 * first, (LANES,)), np.empty(LANES, np.float32)
    for row in range(LANES):
        t.largest(source + 4 * row * stride, deep, scales.ctypes.data + 4 * row)
        factors[row] = most / scales[row] if scales[row] != 0 else 0
        scales[row] = scales[row] / most
    for g in range(groups(job)):
        if job[PARTS] == 2:
            place = job[ROUNDED] + (strip * groups(job) + g) * t.GROUP
            t.round_inputs_2(source + 4 * g * t.DEEP, stride, factors.ctypes.data, place)
        else:
            place = job[ROUNDED] + (strip // 2 * groups(job) + g) * t.GROUP + strip % 2 * TILE
            t.round_inputs_1(source + 4 * g * t.DEEP, stride, factors.ctypes.data, place)
    factors[0] = 0  # keeps it alive until here


@no_type_check
@numba.njit
def _pack_panel(job, first, following, packed):
    """A panel's tiles: by group, two. `following`: the panel that this thread does next."""
    depth, columns = job[DEPTH], job[COLUMNS]
    for g in range(groups(job)):
        for half in range(2):
            row, target = first + half * LANES, packed + g * t.GROUP + half * TILE
            place = row * depth + g * t.DEEP
            if row + LANES <= columns and (g + 1) * t.DEEP <= depth:
                ahead = job[WEIGHT] + place + (following - first) * depth
                t.pack_weights(job[WEIGHT] + place, depth, target, ahead)
                continue
            source, tile = bytes_at(job[WEIGHT], (columns, depth)), bytes_at(target, (LANES, t.DEEP))
            tile[:] = 0
            for r in range(max(0, min(LANES, columns - row))):
                for k in range(min(t.DEEP, depth - g * t.DEEP)):
                    tile[r, k] = source[row + r, g * t.DEEP + k]


@no_type_check
@numba.njit
def store(job, first, sums, scales, square):
    """A panel's sums, scaled, to its columns of the result."""
    columns = job[COLUMNS]
    count = min(PANEL, columns - first)
    own = floats(scales, (PANEL,))
    own[:] = 0
    own[:count] = floats(job[SCALES], (columns,))[first : first + count]
    out, corner = floats(job[OUT], (job[ROWS], columns)), floats(square, (LANES, LANES))
    for strip in range(strips(job)):
        column = strip * job[PARTS]
        for n in range(0, count, LANES):
            source = sums + column // 2 * SUMS + 4 * (n * PANEL + column % 2 * LANES)
            row = strip * LANES
            rows, some = min(LANES, job[ROWS] - row), min(LANES, count - n)
            whole = rows == LANES and some == LANES
            target, stride = (job[OUT] + 4 * (row * columns + first + n), columns) if whole else (square, LANES)
            if job[PARTS] == 2:
                t.finish_2(source, job[ROW_SCALES] + 4 * row, scales + 4 * n, target, stride)
            else:
                t.finish_1(source, job[ROW_SCALES] + 4 * row, scales + 4 * n, target, stride)
            if not whole:
                for m in range(rows):
                    for i in range(some):
                        out[row + m, first + n + i] = corner[m, i]
