"""A call's work, cut into items that threads claim one by one.

A job is an array of words: addresses of the arrays, their sizes, and the number of items claimed so far. It lives while
the call runs, so that helper threads need nothing but its address.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.paged_attention.cpu.frame import floats, ints, prefetch
from jaxpaged.pallas_kernels.paged_attention.cpu.kernel import (
    MASKED,
    SPAN,
    TILE,
    add_block,
    bend_row,
    renew,
    scores_of_block,
)

# Words of a job.
QUERY, KEYS, VALUES, TABLES, LENS, STARTS, SCALARS, WINDOW, SINKS, SLOPES, OUT = range(11)  # addresses
TOKENS, KV_HEADS, GROUPS, HEAD_DIM, BLOCK, WIDTH, ROWS, NUM_SINKS, NUM_SLOPES = range(11, 20)  # sizes
CLAIMED, JOB_WORDS = 20, 21


@no_type_check
@intrinsic
def claim(_context, _array, _index):
    """Atomically adds one to array[index] and returns what it was."""

    def make(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), arguments[1].type(1), "acq_rel")

    return types.int64(_array, types.int64), make


@no_type_check
@numba.njit
def work(job):
    """Claims items and computes them until none is left. Any number of threads may do so at once."""
    scratch = (
        np.zeros((TILE // 4, 4, job[HEAD_DIM]), np.float32),  # queries
        np.zeros((TILE // 4, 4, job[HEAD_DIM]), np.float32),  # sums
        np.zeros((TILE // 4, 4, SPAN + job[BLOCK]), np.float32),  # scores
        np.zeros((4, TILE), np.int64),  # per row: first key, one past the last key, head, position
        np.zeros((2, TILE), np.float32),  # per row: maximum, total
        np.zeros(SPAN + job[BLOCK], np.int32),  # powers of two
    )
    starts = ints(job[STARTS], (job[ROWS] + 1,))
    mine, item = claim(job, CLAIMED), 0
    for row in range(job[ROWS]):
        tiles = ((starts[row + 1] - starts[row]) * job[GROUPS] + TILE - 1) // TILE
        last = item + tiles * job[KV_HEADS]
        while mine < last:
            tile, head = divmod(mine - item, job[KV_HEADS])
            attend(job, row, tile * TILE, head, scratch)
            mine = claim(job, CLAIMED)
        item = last


@no_type_check
@numba.njit
def attend(job, row, first_row, head, scratch):
    """One item: query rows first_row … first_row + TILE - 1 of a sequence, for one KV head."""
    query, sums, scores, rows, state, powers = scratch
    groups, size, head_dim = job[GROUPS], job[BLOCK], job[HEAD_DIM]
    starts, lens = ints(job[STARTS], (job[ROWS] + 1,)), ints(job[LENS], (job[ROWS],))
    count = starts[row + 1] - starts[row]
    used = min(TILE, count * groups - first_row)
    fours = (used + 3) // 4
    _load(job, starts[row], lens[row] - count, first_row, used, head, query, sums, rows, state)
    table = ints(job[TABLES], (job[ROWS], job[WIDTH]))
    scalars, slopes = floats(job[SCALARS], (2,)), floats(job[SLOPES], (job[NUM_SLOPES],))
    block_bytes = size * head_dim * 4
    span = max(1, SPAN // size) * size
    begin, end = rows[0, 0] // size * size, rows[1, used - 1]
    for base in range(begin, end, span):
        keys = min(span, end - base)
        for at in range(0, keys, size):
            where = (np.int64(table[row, (base + at) // size]) * job[KV_HEADS] + head) * block_bytes
            prefetch(job[VALUES] + where, block_bytes)
            if base + at + size < end:
                after = (np.int64(table[row, (base + at) // size + 1]) * job[KV_HEADS] + head) * block_bytes
                prefetch(job[KEYS] + after, block_bytes)
            block = floats(job[KEYS] + where, (size, head_dim))
            scores_of_block(query, fours, block, min(size, keys - at), scores, at)
        for m in range(4 * fours):
            f, i = divmod(m, 4)
            low, high = max(rows[0, m] - base, 0), min(rows[1, m] - base, keys)
            if scalars[1] > 0 or job[NUM_SLOPES] > 0:
                slope = slopes[head * groups + rows[2, m]] if job[NUM_SLOPES] > 0 else np.float32(0)
                bend_row(scores, f, i, keys, scalars[1], slope, base - rows[3, m])
            state[0, m], state[1, m] = renew(
                scores, f, i, low, high, keys, state[0, m], state[1, m], sums, powers, powers.view(np.float32)
            )
        for at in range(0, keys, size):
            where = (np.int64(table[row, (base + at) // size]) * job[KV_HEADS] + head) * block_bytes
            add_block(scores, fours, at, floats(job[VALUES] + where, (size, head_dim)), min(size, keys - at), sums)
    _store(job, starts[row], first_row, used, head, sums, state)


@no_type_check
@numba.njit
def _load(job, start, first_position, first_row, used, head, query, sums, rows, state):
    """Scaled queries, empty sums and each row's keys; the rows of the last four that are not used see no key."""
    groups, head_dim = job[GROUPS], job[HEAD_DIM]
    source = floats(job[QUERY], (job[TOKENS], job[KV_HEADS], groups, head_dim))
    scale = floats(job[SCALARS], (2,))[0]
    window = ints(job[WINDOW], (1,))[0]
    sinks = floats(job[SINKS], (job[NUM_SINKS],))
    for m in range((used + 3) // 4 * 4):
        f, i = divmod(m, 4)
        token, group = divmod(first_row + min(m, used - 1), groups)
        position = first_position + token
        for h in range(head_dim):
            query[f, i, h] = source[start + token, head, group, h] * scale
            sums[f, i, h] = 0
        rows[0, m] = max(0, position + 1 - window) if window > 0 else 0
        rows[1, m] = position + 1 if m < used else 0
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
            out[start + token, head, group, h] = sums[m // 4, m % 4, h] / state[1, m]
