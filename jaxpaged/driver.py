"""Stepping an engine in its callers' own thread: outputs go to whom they belong, whoever makes the step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence

from jaxpaged.admission import Ticket
from jaxpaged.engine import Engine
from jaxpaged.interrupts import undivided
from jaxpaged.outputs import RequestOutput


class Driver:
    """One engine, several calls and streams over it. Every step serves all of them.

    What a step gives is put into its request's mail, where a call, a stream or wait() takes it out.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._mail: dict[str, deque[RequestOutput]] = {}
        self._enqueued: dict[str, None] = {}  # ids that are to be waited for, in order

    def run(
        self, tickets: Sequence[Ticket], priority: Sequence[int], progress: Callable[[], object]
    ) -> list[RequestOutput]:
        """The final outputs (kind FINAL_ONLY), in the order of the tickets; progress() after each that comes.

        After an error or Ctrl-C nothing of the call stays queued.
        """
        ids = self._new_ids(len(tickets))
        try:
            self._submit(ids, tickets, priority)
            return self._collect(ids, progress)
        finally:
            self._abandon(ids)

    def stream(self, ticket: Ticket) -> Generator[RequestOutput]:
        """The outputs of one request as they come. Closing the generator aborts the request."""
        ids = self._new_ids(1)
        try:
            self._submit(ids, [ticket], [0])
            mail, finished = self._mail[ids[0]], False
            while not finished and (mail or self.engine.has_unfinished):
                if mail:
                    output = mail.popleft()
                    finished = output.finished
                    yield output
                else:
                    self._step()
        finally:
            self._abandon(ids)

    def enqueue(self, tickets: Sequence[Ticket], priority: Sequence[int]) -> list[str]:
        """Queue requests of kind FINAL_ONLY and return their ids at once; wait() gives the outputs."""
        ids = self._new_ids(len(tickets))
        try:
            self._submit(ids, tickets, priority)
        except BaseException:
            self._abandon(ids)
            raise
        self._enqueued |= dict.fromkeys(ids)
        return ids

    @property
    def enqueued(self) -> list[str]:
        """The ids that enqueue() gave and wait() has not answered, in order."""
        return list(self._enqueued)

    def wait(self, ids: Sequence[str], progress: Callable[[], object]) -> list[RequestOutput]:
        """The outputs of enqueued requests, in the order of ids, each given once; progress() after each that comes.

        After Ctrl-C all stays as it is: wait() may be called again.
        Raises: ValueError, changing nothing, for an id that is not enqueued or is there twice.
        """
        wrong = [request_id for request_id in ids if request_id not in self._enqueued]
        if wrong or len(set(ids)) < len(ids):
            raise ValueError(
                f"request ids: wanted some that enqueue() gave and that were not waited for yet, each once, got "
                f"{wrong or list(ids)}"
            )
        outputs = self._collect(ids, progress)
        self._abandon(ids)
        return outputs

    def abort(self, ids: Iterable[str]) -> None:
        """End enqueued requests; wait() gives what they have got so far. Others, and finished ones, are ignored."""
        with undivided():
            for request_id in self._enqueued.keys() & set(ids):
                output = self.engine.abort(request_id)
                if output is not None:
                    self._mail[request_id].append(output)

    def _collect(self, ids: Sequence[str], progress: Callable[[], object]) -> list[RequestOutput]:
        """Step until each of the requests has its output in its mail, and stays there."""
        missing = {request_id for request_id in ids if not self._mail[request_id]}
        for _ in range(len(ids) - len(missing)):
            progress()
        while missing:
            if not self.engine.has_unfinished:
                self._abandon(list(missing))
                raise RuntimeError(f"requests {sorted(missing)} were ended on the engine itself: use LLM.abort")
            for request_id in missing.intersection(self._step()):
                missing.discard(request_id)
                progress()
        return [self._mail[request_id][0] for request_id in ids]

    def _step(self) -> list[str]:
        """One engine step; the ids of the requests that got mail."""
        reached: list[str] = []
        with undivided():
            for output in self.engine.step():
                if output.request_id in self._mail:  # not one that was added to the engine itself
                    self._mail[output.request_id].append(output)
                    reached.append(output.request_id)
        return reached

    def _new_ids(self, count: int) -> list[str]:
        return [str(next(self._ids)) for _ in range(count)]

    def _submit(self, ids: Sequence[str], tickets: Sequence[Ticket], priority: Sequence[int]) -> None:
        with undivided():
            for request_id, ticket, rank in zip(ids, tickets, priority, strict=True):
                self.engine.submit(request_id, ticket, priority=rank)
                self._mail[request_id] = deque()

    def _abandon(self, ids: Sequence[str]) -> None:
        """End and forget requests, their outputs unwanted; unknown (or finished) ones are ignored."""
        with undivided():
            for request_id in ids:
                self.engine.abort(request_id)
                self._mail.pop(request_id, None)
                self._enqueued.pop(request_id, None)
