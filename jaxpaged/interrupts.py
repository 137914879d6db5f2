"""Ctrl-C between steps, never inside one: what must not be torn in two is finished first."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """A Ctrl-C inside raises KeyboardInterrupt at the end of the block; a second one raises it at once.

    Nothing is changed in other threads than the main one, and where the program handles SIGINT in its own way.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def on_interrupt(signum: int, frame: types.FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
