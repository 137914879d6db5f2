"""Helper threads for the calls of every CPU kernel, and how a job's items are shared out.

Numba's own parallel loops would keep their threads spinning on the cores that XLA's thread pool wants next. These sleep
on a semaphore between calls. One call at a time has their help; another that runs at the same time works alone.

A job is an array of words that its kernel lays out; it lives while the call runs, so that helpers need nothing but its
address and that of the kernel's task, a function of the job's address that works until nothing is left to do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any, no_type_check

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.frame import words

_DESK = "jaxpaged_desk"
# Words of the desk, which callers and helpers share. The semaphores may take 32 bytes each.
_START, _DONE, _JOB, _TASK, _BUSY, _HELPERS, _DESK_WORDS = 0, 8, 16, 17, 18, 19, 20

_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_post = types.ExternalFunction("sem_post", types.int32(types.intp))


def outside(name: str) -> Any:
    """A function for Numba code that returns the address which publish() gave to a name, also in code from its disk
    cache: addresses change from process to process."""

    @no_type_check
    @intrinsic
    def address(_context):
        def make(_context, builder, _signature, _arguments):
            place = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, ir.IntType(64), name)
            return builder.ptrtoint(place, ir.IntType(64))

        return types.int64(), make

    return address


def publish(name: str, address: int) -> None:
    """Give a name its address; before code that uses it is compiled or read from the disk cache."""
    llvmlite.binding.add_symbol(name, address)


_desk_address = outside(_DESK)


@no_type_check
@intrinsic
def _exchange(_context, _array, _index, _new):
    """Atomically sets array[index] and returns what it was."""

    def make(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("xchg", builder.gep(data, [arguments[1]]), arguments[2], "acq_rel")

    return types.int64(_array, types.int64, types.int64), make


@no_type_check
@intrinsic
def add(_context, _array, _index, _count):
    """Atomically adds to array[index] and returns what it was."""

    def make(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), arguments[2], "acq_rel")

    return types.int64(_array, types.int64, types.int64), make


@no_type_check
@intrinsic
def _call(_context, _function, _argument):
    """Calls the function at an address with a word."""

    def make(context, builder, _signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), make


@no_type_check
@numba.njit
def run(task, job, large):
    """The job, with the helpers if it is large enough to wake them for and they are free."""
    desk = words(_desk_address(), _DESK_WORDS)
    if not large or desk[_HELPERS] == 0 or _exchange(desk, _BUSY, 1) != 0:
        _call(task, job.ctypes.data)
        return
    desk[_JOB], desk[_TASK] = job.ctypes.data, task
    for _ in range(desk[_HELPERS]):
        _post(_desk_address() + 8 * _START)
    _call(task, job.ctypes.data)
    for _ in range(desk[_HELPERS]):
        while _wait(_desk_address() + 8 * _DONE) != 0:
            pass
    _exchange(desk, _BUSY, 0)


def digest(*folders: Path) -> str:
    """Of the sources in the folders. Numba's cache looks at a function's own file and at the variables of its closure;
    a closure over this makes it notice a change in any of the files."""
    found = hashlib.sha256()
    for folder in (Path(__file__).parent, *folders):
        for path in sorted(folder.glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


@no_type_check  # a function that was wrapped for checks has a closure that Numba's cache cannot read
def _compile(sources: str) -> Any:
    """The helpers' loop, compiled or read from Numba's disk cache."""

    def help_for_ever():
        _ = sources
        desk = words(_desk_address(), _DESK_WORDS)
        while True:
            while _wait(_desk_address() + 8 * _START) != 0:
                pass  # a signal came
            _call(desk[_TASK], desk[_JOB])
            _post(_desk_address() + 8 * _DONE)

    return numba.njit(types.void(), nogil=True, cache=True)(help_for_ever)


@cache
def start() -> ctypes.Array:
    """Start a helper for every core but one, once per process; before a kernel is compiled. Returns the desk, which
    lives as long as the process: XLA may call at any time."""
    desk = (ctypes.c_int64 * _DESK_WORDS)()
    publish(_DESK, ctypes.addressof(desk))
    helpers = len(os.sched_getaffinity(0)) - 1 if sys.platform == "linux" else 0
    if helpers:
        libc = ctypes.CDLL(None)
        for word in (_START, _DONE):
            libc.sem_init(ctypes.byref(desk, 8 * word), 0, 0)
        helper = _compile(digest())
        for i in range(helpers):
            threading.Thread(target=helper, name=f"kernel-{i}", daemon=True).start()
    desk[_HELPERS] = helpers
    return desk
