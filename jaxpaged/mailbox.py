"""From the engine's thread to the event loops: unread outputs are merged, and a loop is woken once a step."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterable
from typing import final

from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind


def merge(older: RequestOutput, newer: RequestOutput, kind: RequestOutputKind) -> RequestOutput:
    """One output in place of two that follow each other: joined for kind DELTA, else the newer one."""
    if kind != RequestOutputKind.DELTA:
        return newer
    pairs = zip(older.outputs, newer.outputs, strict=True)
    return dataclasses.replace(newer, outputs=[_joined(one, other) for one, other in pairs])


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    logprobs = newer.logprobs if older.logprobs is None else older.logprobs + (newer.logprobs or [])
    return dataclasses.replace(
        newer, text=older.text + newer.text, token_ids=older.token_ids + newer.token_ids, logprobs=logprobs
    )


@final
class Postman:
    """Brings outputs to the mailboxes of one event loop.

    However slow the loop is, at most one call of it is outstanding, and each mailbox holds at most one output.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.num_open = 0  # requests that are read in this loop; guarded by the engine's thread
        self.lock = threading.Lock()  # guards every mailbox of this loop
        self._filled: set[Mailbox] = set()  # since the loop was last woken

    def post(self, letters: Iterable[tuple[Mailbox, RequestOutput | BaseException]]) -> bool:
        """From any thread: fill mailboxes and wake the loop. False if the loop is closed: nobody reads any more."""
        with self.lock:
            asleep = not self._filled
            for mailbox, letter in letters:
                mailbox.put(letter)
                self._filled.add(mailbox)
            if not asleep or not self._filled:
                return True
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            return False
        return True

    def _wake(self) -> None:
        """In the loop: let those who wait for the filled mailboxes go on."""
        with self.lock:
            filled, self._filled = self._filled, set()
        for mailbox in filled:
            mailbox.event.set()


@final
class Mailbox:
    """What one consumer has not read of its request: at most one output, and then perhaps an error."""

    def __init__(self, postman: Postman, kind: RequestOutputKind) -> None:
        self.postman = postman
        self.event = asyncio.Event()
        self._kind = kind
        self._unread: RequestOutput | None = None
        self._error: BaseException | None = None

    def put(self, letter: RequestOutput | BaseException) -> None:
        """Only for the postman, who holds the lock."""
        if isinstance(letter, BaseException):
            self._error = letter
        else:
            self._unread = letter if self._unread is None else merge(self._unread, letter, self._kind)

    async def get(self) -> RequestOutput:
        """Wait for the next output; all that came since the last one is in it. Raises the error that came instead."""
        while True:
            with self.postman.lock:
                unread, self._unread = self._unread, None
            if unread is not None:
                return unread
            if self._error is not None:
                raise self._error
            self.event.clear()
            await self.event.wait()
