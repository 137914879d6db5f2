"""Stepping an engine in its callers' own thread: outputs go to whom they belong, whoever makes the step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Generator, Sequence

from jaxpaged.admission import Ticket
from jaxpaged.engine import Engine
from jaxpaged.interrupts import undivided
from jaxpaged.outputs import RequestOutput


class Driver:
    """One engine, several calls and streams over it. Every step serves all of them.

    A call steps until its own requests have finished. What the steps give for requests that others wait for (open
    streams) is kept in their mail.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._mail: dict[str, deque[RequestOutput]] = {}

    def run(
        self, tickets: Sequence[Ticket], priority: Sequence[int], progress: Callable[[], object]
    ) -> list[RequestOutput]:
        """The final outputs (kind FINAL_ONLY), in the order of the tickets; progress() after each that comes.

        After an error or Ctrl-C nothing of the call stays queued.
        """
        ids = self._new_ids(len(tickets))
        done: dict[str, RequestOutput] = {}
        try:
            self._submit(ids, tickets, priority)
            own = frozenset(ids)
            while len(done) < len(ids):
                for output in self.step(own):
                    done[output.request_id] = output
                    progress()
        finally:
            self.abandon(ids)  # those of an interrupted call; finished ones are unknown and ignored
        return [done[request_id] for request_id in ids]

    def stream(self, ticket: Ticket) -> Generator[RequestOutput]:
        """The outputs of one request as they come. Closing the generator aborts the request."""
        (request_id,) = self._new_ids(1)
        mail = self._mail[request_id] = deque()
        finished = False
        try:
            self._submit([request_id], [ticket], [0])
            while not finished and (mail or self.engine.has_unfinished):
                for output in [mail.popleft()] if mail else self.step([request_id]):
                    finished = output.finished
                    yield output
        finally:
            self.abandon([request_id])
            del self._mail[request_id]

    def step(self, own: Container[str]) -> list[RequestOutput]:
        """One engine step: the outputs of the caller's own requests. Those of others are kept for them."""
        mine: list[RequestOutput] = []
        with undivided():
            for output in self.engine.step():
                if output.request_id in own:
                    mine.append(output)
                elif output.request_id in self._mail:
                    self._mail[output.request_id].append(output)
        return mine

    def abandon(self, ids: Sequence[str]) -> None:
        """End requests, their outputs unwanted; unknown (or finished) ones are ignored."""
        with undivided():
            for request_id in ids:
                self.engine.abort(request_id)

    def _new_ids(self, count: int) -> list[str]:
        return [str(next(self._ids)) for _ in range(count)]

    def _submit(self, ids: Sequence[str], tickets: Sequence[Ticket], priority: Sequence[int]) -> None:
        with undivided():
            for request_id, ticket, rank in zip(ids, tickets, priority, strict=True):
                self.engine.submit(request_id, ticket, priority=rank)
