"""The attention of one tile of query rows, in loops that LLVM turns into vector code.

An item is a tile of query rows of one sequence and one KV head. Rows are counted through queries and their heads: row m
is query m // G, head m % G, so that every ratio of heads fills the tile. Keys are walked in spans; within a span first
all scores are made, then all weights (the online softmax of FlashAttention, Dao et al., 2022), then their sums.
Products take four rows at a time ("fours"), to load a key or a value once for all of them.

A row reads no key it does not see. Numba's loops index whole arrays: a slice costs as much as a short loop.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numba
import numpy as np

TILE = 16  # query rows of an item, a multiple of 4
SPAN = 256  # keys between two renewals of the maximum, at least; whole blocks
MASKED = np.float32(-1e30)  # finite: the difference of two is 0, never NaN
# Sums may be reordered to fill vectors, but no value is assumed finite: a NaN must stay one.
VECTOR = {"reassoc", "contract", "nsz", "arcp"}


def _make_scores(head_dim: int | None):
    """scores[f, :, at + j] = query[f] · keys[j] for f < fours, j < count. query [F, 4, H], keys [B, H].

    With H known to the compiler the sums stay in registers, which makes it twice as fast.
    """

    @no_type_check
    @numba.njit(fastmath=VECTOR)
    def scores_of_block(query, fours, keys, count, scores, at):
        width = keys.shape[1] if head_dim is None else head_dim
        for f in range(fours):
            for j in range(count):
                a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for h in range(width):
                    x = keys[j, h]
                    a += query[f, 0, h] * x
                    b += query[f, 1, h] * x
                    c += query[f, 2, h] * x
                    d += query[f, 3, h] * x
                scores[f, 0, at + j] = a
                scores[f, 1, at + j] = b
                scores[f, 2, at + j] = c
                scores[f, 3, at + j] = d

    return scores_of_block


_scores_64, _scores_128, _scores_any = _make_scores(64), _make_scores(128), _make_scores(None)


@no_type_check
@numba.njit
def scores_of_block(query, fours, keys, count, scores, at):
    """The product of a block's keys with the tile's queries, by head_dim."""
    if keys.shape[1] == 64:
        _scores_64(query, fours, keys, count, scores, at)
    elif keys.shape[1] == 128:
        _scores_128(query, fours, keys, count, scores, at)
    else:
        _scores_any(query, fours, keys, count, scores, at)


@no_type_check
@numba.njit(fastmath=VECTOR)
def add_block(weights, fours, at, values, count, sums):
    """sums[f] += weights[f, :, at : at + count] · values[:count] for f < fours. values [B, H], sums [F, 4, H].

    Two values a turn: half the reads and writes of sums. An odd count adds its last value with a weight of 0.
    """
    zero = np.float32(0)
    for f in range(fours):
        for j in range(0, count, 2):
            k = min(j + 1, count - 1)
            two = np.float32(k - j)
            a, b, c, d = weights[f, 0, at + j], weights[f, 1, at + j], weights[f, 2, at + j], weights[f, 3, at + j]
            p, q, r, s = weights[f, 0, at + k], weights[f, 1, at + k], weights[f, 2, at + k], weights[f, 3, at + k]
            if two == zero:
                p, q, r, s = zero, zero, zero, zero
            for h in range(values.shape[1]):
                x, y = values[j, h], values[k, h]
                sums[f, 0, h] += a * x + p * y
                sums[f, 1, h] += b * x + q * y
                sums[f, 2, h] += c * x + r * y
                sums[f, 3, h] += d * x + s * y


@no_type_check
@numba.njit(fastmath=True)
def largest(scores, f, i, low, high, top):
    """The largest of top and scores[f, i, low:high]. Where a score is NaN any answer will do: the sums are NaN."""
    for j in range(low, high):
        top = max(top, scores[f, i, j])
    return top


@no_type_check
@numba.njit(fastmath=VECTOR)
def exponentials(scores, f, i, count, top, powers):
    """scores[f, i, j] = exp(scores[f, i, j] - top) for j < count, within 2 units in the last place; 0 below e-38.

    exp x = 2ⁿ · exp r with n the integer nearest to x / ln 2 and |r| <= ln 2 / 2, exp r by Cephes' polynomial.
    powers: int32 scratch [span], where 2ⁿ is built from its bits.
    """
    for j in range(count):
        x = scores[f, i, j] - top
        x = np.float32(-87.0) if x < np.float32(-87.0) else x  # a NaN stays
        n = np.int32(x * np.float32(1.44269504088896341) - np.float32(0.5))
        r = x - np.float32(n) * np.float32(0.693359375)
        r = r + np.float32(n) * np.float32(2.12194440e-4)
        y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
        y = y * r + np.float32(8.3334519073e-3)
        y = y * r + np.float32(4.1665795894e-2)
        y = y * r + np.float32(1.6666665459e-1)
        y = y * r + np.float32(5.0000001201e-1)
        scores[f, i, j] = y * r * r + r + np.float32(1)
        powers[j] = (n + np.int32(127)) << np.int32(23)


@no_type_check
@numba.njit(fastmath=VECTOR)
def weigh_row(scores, f, i, low, high, count, top, powers, floats):
    """Scores to weights relative to the maximum `top`; those outside [low, high) become 0. Returns their sum."""
    exponentials(scores, f, i, count, top, powers)
    total = np.float32(0)
    for j in range(count):
        weight = scores[f, i, j] * floats[j]
        weight = weight if j >= low and j < high else np.float32(0)
        scores[f, i, j] = weight
        total += weight
    return total


@no_type_check
@numba.njit
def bend_row(scores, f, i, count, soft_cap, slope, first_distance):
    """The soft cap, then ALiBi: key j is first_distance + j positions after the query (so mostly negative)."""
    if soft_cap > 0:
        for j in range(count):
            scores[f, i, j] = soft_cap * math.tanh(scores[f, i, j] / soft_cap)
    if slope != 0:
        for j in range(count):
            scores[f, i, j] += slope * np.float32(first_distance + j)


@no_type_check
@numba.njit
def renew(scores, f, i, low, high, count, top, total, sums, powers, floats):
    """One row's turn of the online softmax over a span. Returns its new maximum and total; sums are rescaled."""
    new_top = largest(scores, f, i, low, high, top)
    keep = np.float32(math.exp(top - new_top))
    if keep != 1:
        for h in range(sums.shape[2]):
            sums[f, i, h] *= keep
    weights = weigh_row(scores, f, i, low, high, count, new_top, powers, floats)
    return new_top, total * keep + weights
