"""Making code that Numba compiled known to XLA:CPU, and whether Numba is there."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable
from functools import cache

import jax

_ONE_AT_A_TIME = threading.Lock()  # programs are traced in several threads; XLA takes a handler once


def numba_is_missing() -> str | None:
    """What to do about it; None: it is installed. Numba is not imported."""
    return "it wants Numba: pip install 'jaxpaged[cpu]'" if importlib.util.find_spec("numba") is None else None


def make_known(target: str, handler: Callable[[], int]) -> None:
    """Give XLA the handler at the address handler(), under a name, once per process.

    handler: compiles it, or reads it from Numba's disk cache; what it compiled must live as long as the process.
    """
    with _ONE_AT_A_TIME:
        _register(target, handler)


@cache
def _register(target: str, handler: Callable[[], int]) -> None:
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(ctypes.c_void_p(handler())), platform="cpu")
