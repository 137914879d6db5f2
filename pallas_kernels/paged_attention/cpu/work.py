"""A call's work, cut into items that threads claim one by one.

A job is an array of words: addresses of the arrays, their sizes, and the number of items claimed so far. It lives while
the call runs, so that helper threads need nothing but its address.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numba
import numpy as np

from jaxpaged.pallas_kernels.cpu.code import LANES
from jaxpaged.pallas_kernels.cpu.frame import floats, ints
from jaxpaged.pallas_kernels.cpu.workers import add
from jaxpaged.pallas_kernels.paged_attention.cpu import vectors as v

TILE = 16  # query rows of an item, a multiple of 4
SPAN = 256  # keys between two renewals of the maximum, at least; whole blocks
MASKED = np.float32(-1e30)  # a row's maximum before its first key; finite: the difference of two is 0, never NaN

# Words of a job.
QUERY, KEYS, VALUES, TABLES, LENS, STARTS, SCALARS, WINDOW, SINKS, SLOPES, OUT = range(11)  # addresses
TOKENS, KV_HEADS, GROUPS, HEAD_DIM, BLOCK, WIDTH, ROWS, NUM_SINKS, NUM_SLOPES = range(11, 20)  # sizes
CLAIMED, JOB_WORDS = 20, 21


@no_type_check
@numba.njit
def work(job):
    """Claims items and computes them until none is left. Any number of threads may do so at once."""
    stride = (SPAN + job[BLOCK] + LANES) // LANES * LANES  # a span, and what whole vectors read beyond it
    scratch = (
        np.zeros((TILE, job[HEAD_DIM]), np.float32),  # queries
        np.zeros((TILE, job[HEAD_DIM]), np.float32),  # sums
        np.zeros((TILE, stride), np.float32),  # scores
        np.zeros((4, TILE), np.int64),  # per row: first key, one past the last key, head, position
        np.zeros((2, TILE), np.float32),  # per row: maximum, total
    )
    starts = ints(job[STARTS], (job[ROWS] + 1,))
    mine, item = add(job, CLAIMED, 1), 0
    for row in range(job[ROWS]):
        tiles = ((starts[row + 1] - starts[row]) * job[GROUPS] + TILE - 1) // TILE
        last = item + tiles * job[KV_HEADS]
        while mine < last:
            tile, head = divmod(mine - item, job[KV_HEADS])
            attend(job, row, tile * TILE, head, scratch)
            mine = add(job, CLAIMED, 1)
        item = last


@no_type_check
@numba.njit
def attend(job, row, first_row, head, scratch):
    """One item: query rows first_row … first_row + TILE - 1 of a sequence, for one KV head."""
    query, sums, scores, rows, state = scratch
    starts, lens = ints(job[STARTS], (job[ROWS] + 1,)), ints(job[LENS], (job[ROWS],))
    count, size = starts[row + 1] - starts[row], job[BLOCK]
    used = min(TILE, count * job[GROUPS] - first_row)
    _load(job, starts[row], lens[row] - count, first_row, used, head, query, sums, rows, state)
    span = max(1, SPAN // size) * size
    base, end = rows[0, 0] // size * size, rows[1, used - 1]
    # Spans end at multiples of span, and a key's lane comes from its position, wherever the tile begins to see keys:
    # a query's sums are then the same bits whichever queries share its tile.
    while base < end:
        keys, shift = min(span - base % span, end - base), base % v.LANES
        _make_scores(job, row, head, base, keys, used, query, scores, shift)
        for m in range(used):
            low, high = shift + max(rows[0, m] - base, 0), shift + min(rows[1, m] - base, keys)
            _bend(job, scores, m, low, high, head * job[GROUPS] + rows[2, m], base - shift - rows[3, m])
            _renew(scores, m, low, high, shift + keys, sums, state)
        _add_values(job, row, head, base, keys, used, scores, shift, sums)
        base += keys
    _store(job, starts[row], first_row, used, head, sums, state)


@no_type_check
@numba.njit
def _place(job, row, head, position):
    """Of the block that holds a position of a sequence, for one KV head: the offset in the cache, in bytes."""
    table = ints(job[TABLES], (job[ROWS], job[WIDTH]))
    return (np.int64(table[row, position // job[BLOCK]]) * job[KV_HEADS] + head) * job[BLOCK] * job[HEAD_DIM] * 4


@no_type_check
@numba.njit
def _make_scores(job, row, head, base, keys, used, query, scores, shift):
    """The products of queries and keys of a span, from scores[:, shift] on. A block's last places may lie beyond
    `keys`: they are not used.
    """
    size, head_dim, stride = job[BLOCK], job[HEAD_DIM], scores.shape[1]
    for at in range(0, keys, size):
        block, count = job[KEYS] + _place(job, row, head, base + at), min(size, keys - at)
        for f in range(0, used, v.ROWS):
            some, into = query.ctypes.data + 4 * f * head_dim, scores.ctypes.data + 4 * (f * stride + shift + at)
            if size % 4 == 0:
                for j in range(0, count, 4):
                    v.scores_of_rows_4(some, block + 4 * j * head_dim, into + 4 * j, stride, head_dim)
            else:
                for j in range(count):
                    v.scores_of_rows_1(some, block + 4 * j * head_dim, into + 4 * j, stride, head_dim)


@no_type_check
@numba.njit
def _bend(job, scores, m, low, high, query_head, first_distance):
    """The soft cap, then ALiBi: key j is first_distance + j positions after the query, so mostly before it."""
    soft_cap = floats(job[SCALARS], (2,))[1]
    if soft_cap > 0:
        for j in range(low, high):
            scores[m, j] = soft_cap * np.float32(math.tanh(scores[m, j] / soft_cap))
    if job[NUM_SLOPES] > 0:
        slope = floats(job[SLOPES], (job[NUM_SLOPES],))[query_head]
        for j in range(low, high):
            scores[m, j] += slope * np.float32(first_distance + j)


@no_type_check
@numba.njit
def _renew(scores, m, low, high, keys, sums, state):
    """One row's turn of the online softmax (FlashAttention, Dao et al., 2022): scores to weights relative to the new
    maximum, to which the sums are rescaled; 0 for the keys of the span that the row does not see."""
    place = scores.ctypes.data + 4 * m * scores.shape[1]
    top = v.largest(place, keys, low, high, state[0, m])
    keep = np.float32(math.exp(state[0, m] - top))
    if keep != 1:
        for h in range(sums.shape[1]):
            sums[m, h] *= keep
    state[0, m], state[1, m] = top, state[1, m] * keep + v.weigh(place, keys, low, high, top)


@no_type_check
@numba.njit
def _add_values(job, row, head, base, keys, used, scores, shift, sums):
    """The weighted sums of a span's values, whose weights begin at scores[:, shift]. No value beyond `keys` is read:
    0 times NaN is NaN.
    """
    size, head_dim, stride = job[BLOCK], job[HEAD_DIM], scores.shape[1]
    wide = head_dim // 64 * 64
    for at in range(0, keys, size):
        values, count = job[VALUES] + _place(job, row, head, base + at), min(size, keys - at)
        for f in range(0, used, v.ROWS):
            weights, into = scores.ctypes.data + 4 * (f * stride + shift + at), sums.ctypes.data + 4 * f * head_dim
            for h in range(0, wide, 64):
                v.sums_of_rows_4(weights, stride, count, values + 4 * h, into + 4 * h, head_dim)
            for h in range(wide, head_dim, 16):
                v.sums_of_rows_1(weights, stride, count, values + 4 * h, into + 4 * h, head_dim)


@no_type_check
@numba.njit
def _load(job, start, first_position, first_row, used, head, query, sums, rows, state):
    """Scaled queries, empty sums and each row's keys; the rows of the last four that are not used are copies."""
    groups, head_dim = job[GROUPS], job[HEAD_DIM]
    source = floats(job[QUERY], (job[TOKENS], job[KV_HEADS], groups, head_dim))
    scale = floats(job[SCALARS], (2,))[0]
    window = ints(job[WINDOW], (1,))[0]
    sinks = floats(job[SINKS], (job[NUM_SINKS],))
    for m in range((used + 3) // 4 * 4):
        token, group = divmod(first_row + min(m, used - 1), groups)
        position = first_position + token
        for h in range(head_dim):
            query[m, h] = source[start + token, head, group, h] * scale
            sums[m, h] = 0
        rows[0, m] = max(0, position + 1 - window) if window > 0 else 0
        rows[1, m] = position + 1
        rows[2, m], rows[3, m] = group, position
        has_sink = job[NUM_SINKS] > 0
        state[0, m] = sinks[head * groups + group] if has_sink else MASKED
        state[1, m] = np.float32(1) if has_sink else np.float32(0)


@no_type_check
@numba.njit
def _store(job, start, first_row, used, head, sums, state):
    """Weighted sums to means."""
    groups, head_dim = job[GROUPS], job[HEAD_DIM]
    out = floats(job[OUT], (job[TOKENS], job[KV_HEADS], groups, head_dim))
    for m in range(used):
        token, group = divmod(first_row + m, groups)
        for h in range(head_dim):
            out[start + token, head, group, h] = sums[m, h] / state[1, m]
