"""The function that XLA calls for a product."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np
from numba import types

from jaxpaged.pallas_kernels.cpu.frame import answer_question, argument, dimension, result, words
from jaxpaged.pallas_kernels.cpu.tiles import PALETTE_BYTES, write_palette
from jaxpaged.pallas_kernels.cpu.workers import digest, outside, publish, run, start
from jaxpaged.pallas_kernels.matmul.amx import work as w
from jaxpaged.pallas_kernels.matmul.amx.tiles import GROUP

LARGE = 2_000_000  # multiplications, about 0.03 ms: fewer are not worth waking a thread for
_TASK = "jaxpaged_matmul_amx_task"
_task = outside(_TASK)


@no_type_check
@numba.njit
def _handle(frame):
    """The job of a call; shapes were checked while tracing."""
    job = np.zeros(w.JOB_WORDS, np.int64)
    job[w.INPUT], job[w.WEIGHT], job[w.OUT] = argument(frame, 0), argument(frame, 1), result(frame, 0)
    job[w.ROWS], job[w.DEPTH], job[w.COLUMNS] = dimension(frame, 0, 0), dimension(frame, 0, 1), dimension(frame, 1, 0)
    tiles = np.empty(w.pairs(job) * w.groups(job) * GROUP + 64 + PALETTE_BYTES, np.uint8)
    job[w.SPLIT] = (tiles.ctypes.data + 63) // 64 * 64
    job[w.PALETTE] = tiles.ctypes.data + tiles.size - PALETTE_BYTES
    write_palette(tiles[-PALETTE_BYTES:])
    run(_task(), job, job[w.ROWS] * job[w.DEPTH] * job[w.COLUMNS] >= LARGE)
    tiles[0] = 0  # keeps it alive until here


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
    return _compile(digest(Path(__file__).parent, Path(__file__).parent.parent / "cpu"))
