"""Helper threads for a call, and the handler that XLA calls.

Numba's own parallel loops would keep their threads spinning on the cores that XLA's thread pool wants next. These sleep
on a semaphore between calls. One call at a time has their help; another that runs at the same time works alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, no_type_check

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.paged_attention.cpu import work as w
from jaxpaged.pallas_kernels.paged_attention.cpu.frame import (
    answer_question,
    argument,
    dimension,
    floats,
    ints,
    result,
    words,
)

SMALL = 6_000  # pairs of a query row and a key, about 0.1 ms: fewer are not worth waking a thread for
_DESK = "jaxpaged_attention_desk"  # the name by which compiled code finds the desk, also code from the disk cache
# Words of the desk, which callers and helpers share. The semaphores may take 32 bytes each.
_START, _DONE, _JOB, _BUSY, _HELPERS, _DESK_WORDS = 0, 8, 16, 17, 18, 19

_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_post = types.ExternalFunction("sem_post", types.int32(types.intp))


@no_type_check
@intrinsic
def _desk_address(_context):
    """Where the desk is: an outside symbol, given its address by _open_desk()."""

    def make(_context, builder, _signature, _arguments):
        place = builder.module.globals.get(_DESK) or ir.GlobalVariable(builder.module, ir.IntType(64), _DESK)
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(), make


@no_type_check
@intrinsic
def _exchange(_context, _array, _index, _new):
    """Atomically sets array[index] and returns what it was."""

    def make(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("xchg", builder.gep(data, [arguments[1]]), arguments[2], "acq_rel")

    return types.int64(_array, types.int64, types.int64), make


@no_type_check
@numba.njit
def _run(job):
    """The job, with the helpers if it is large and they are free."""
    desk = words(_desk_address(), _DESK_WORDS)
    if desk[_HELPERS] == 0 or _size(job) < SMALL or _exchange(desk, _BUSY, 1) != 0:
        w.work(job)
        return
    desk[_JOB] = job.ctypes.data
    for _ in range(desk[_HELPERS]):
        _post(_desk_address() + 8 * _START)
    w.work(job)
    for _ in range(desk[_HELPERS]):
        while _wait(_desk_address() + 8 * _DONE) != 0:
            pass
    _exchange(desk, _BUSY, 0)


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
    _run(job)


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
    """The handler and the helpers' loop, compiled or read from Numba's disk cache.

    sources: a digest of all source files. Numba's cache looks at a function's own file and at the variables of its
    closure; the closure over this digest makes it notice a change in any of the files.
    """

    def handle(frame_pointer):  # XLA_FFI_Error* (XLA_FFI_CallFrame*)
        _ = sources
        frame = numba.carray(frame_pointer, (21,))
        if not answer_question(frame):
            _handle(frame)
        return 0

    def help_for_ever():
        _ = sources
        desk = words(_desk_address(), _DESK_WORDS)
        while True:
            while _wait(_desk_address() + 8 * _START) != 0:
                pass  # a signal came
            w.work(words(desk[_JOB], w.JOB_WORDS))
            _post(_desk_address() + 8 * _DONE)

    handler = numba.cfunc(types.intp(types.CPointer(types.int64)), cache=True)(handle)
    helper = numba.njit(types.void(), nogil=True, cache=True)(help_for_ever)
    return handler, helper


@dataclass(frozen=True, kw_only=True)
class Handler:
    """The compiled handler and the desk it works at. Both live as long as the process: XLA may call at any time."""

    address: int
    desk: ctypes.Array


@cache
def start() -> Handler:
    """Compile the handler (seconds, the first time on a machine) and start a helper for every core but one."""
    desk = (ctypes.c_int64 * _DESK_WORDS)()
    llvmlite.binding.add_symbol(_DESK, ctypes.addressof(desk))
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    handler, helper = _compile(digest.hexdigest())
    helpers = len(os.sched_getaffinity(0)) - 1 if sys.platform == "linux" else 0
    if helpers:
        libc = ctypes.CDLL(None)
        for word in (_START, _DONE):
            libc.sem_init(ctypes.byref(desk, 8 * word), 0, 0)
    for i in range(helpers):
        threading.Thread(target=helper, name=f"attention-{i}", daemon=True).start()
    desk[_HELPERS] = helpers
    return Handler(address=handler.address, desk=desk)
