"""The function that XLA calls for paged attention."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np
from numba import types

from jaxpaged.pallas_kernels.cpu.frame import answer_question, argument, dimension, floats, ints, result, words
from jaxpaged.pallas_kernels.cpu.workers import digest, outside, publish, run, start
from jaxpaged.pallas_kernels.paged_attention.cpu import work as w

LARGE = 6_000  # pairs of a query row and a key, about 0.1 ms: fewer are not worth waking a thread for
_TASK = "jaxpaged_paged_attention_task"
_task = outside(_TASK)


@no_type_check
@numba.njit
def _size(job):
    """Pairs of a query row and a key, at most: windows and causality are not counted."""
    starts, lens = ints(job[w.STARTS], (job[w.ROWS] + 1,)), ints(job[w.LENS], (job[w.ROWS],))
    pairs = 0
    for row in range(job[w.ROWS]):
        pairs += np.int64(starts[row + 1] - starts[row]) * lens[row]
    return pairs * job[w.KV_HEADS] * job[w.GROUPS]


@no_type_check
@numba.njit
def _handle(frame):
    """The job of a call. Inputs come as the first words of a job say; shapes were checked while tracing."""
    job = np.zeros(w.JOB_WORDS, np.int64)
    for i in range(w.OUT):
        job[i] = argument(frame, i)
    job[w.OUT] = result(frame, 0)
    job[w.TOKENS], job[w.KV_HEADS] = dimension(frame, w.QUERY, 0), dimension(frame, w.QUERY, 1)
    job[w.GROUPS], job[w.HEAD_DIM] = dimension(frame, w.QUERY, 2), dimension(frame, w.QUERY, 3)
    job[w.BLOCK], job[w.ROWS] = dimension(frame, w.KEYS, 2), dimension(frame, w.TABLES, 0)
    job[w.WIDTH] = dimension(frame, w.TABLES, 1)
    job[w.NUM_SINKS], job[w.NUM_SLOPES] = dimension(frame, w.SINKS, 0), dimension(frame, w.SLOPES, 0)
    _clear_padding(job)
    run(_task(), job, _size(job) >= LARGE)


@no_type_check
@numba.njit
def _clear_padding(job):
    """Zeros for the tokens after the last row's: XLA gives the result's memory as it is."""
    row = job[w.KV_HEADS] * job[w.GROUPS] * job[w.HEAD_DIM]
    out = floats(job[w.OUT], (job[w.TOKENS] * row,))
    for i in range(ints(job[w.STARTS], (job[w.ROWS] + 1,))[job[w.ROWS]] * row, job[w.TOKENS] * row):
        out[i] = 0


@no_type_check  # a function that was wrapped for checks has a closure that Numba's cache cannot read
def _compile(sources: str) -> tuple[Any, Any]:
    """The handler and the task, compiled or read from Numba's disk cache. sources: see digest()."""

    def handle(address):  # XLA_FFI_Error* (XLA_FFI_CallFrame*)
        _ = sources
        frame = words(address, 21)
        if not answer_question(frame):
            _handle(frame)
        return 0

    def task(job):
        _ = sources
        w.work(words(job, w.JOB_WORDS))

    do = numba.cfunc(types.void(types.intp), cache=True)(task)
    publish(_TASK, do.address)
    return numba.cfunc(types.intp(types.intp), cache=True)(handle), do


@cache
def compiled() -> tuple[Any, Any]:
    """The handler and the task; seconds, the first time on a machine. Kept: XLA may call at any time."""
    start()
    return _compile(digest(Path(__file__).parent))
