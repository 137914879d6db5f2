"""An engine on a thread of its own: requests and outputs pass to and from any number of event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

from jaxpaged.admission import Ticket
from jaxpaged.engine import Engine
from jaxpaged.errors import EngineDead, QueueFull
from jaxpaged.mailbox import Mailbox, Postman
from jaxpaged.outputs import RequestOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Subscription:
    """An open request and where its outputs go."""

    request_id: str
    num_sequences: int
    mailbox: Mailbox


@final
class EngineThread:
    """The only one to call the engine (check() apart). Sleeps while there is nothing to do.

    Jobs from other threads are done between two steps, in the order they came.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None  # why the thread ended, if not by stop()
        limit = engine.config.max_num_queued_reqs
        self._most_open = None if limit is None else engine.limits.max_num_seqs + limit
        self._change = threading.Condition()  # guards what follows
        self._jobs: list[Callable[[], None]] = []
        self._stopping = False
        self._ended = False
        self._open: dict[str, Subscription] = {}
        self._num_open = 0  # sequences of the open requests
        self._postmen: dict[asyncio.AbstractEventLoop, Postman] = {}
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return not (self._stopping or self._ended)

    def subscribe(self, request_id: str, ticket: Ticket, *, priority: int) -> Subscription:
        """Queue a request whose outputs go to the running event loop.

        Raises ValueError for an id in use, QueueFull, EngineDead.
        """
        loop = asyncio.get_running_loop()
        count = ticket.num_sequences
        with self._change:
            self._check_alive()
            if request_id in self._open:
                raise ValueError(f"request id {request_id!r} is in use; wait for it to finish or take another")
            if self._most_open is not None and self._num_open + count > self._most_open:
                raise QueueFull(
                    f"{self._num_open} sequences are open and at most {self._most_open} may be (max_num_seqs and "
                    f"max_num_queued_reqs together); try again later"
                )
            postman = self._postmen.get(loop)
            if postman is None:
                postman = self._postmen[loop] = Postman(loop)
            postman.num_open += 1
            mailbox = Mailbox(postman, ticket.params.output_kind)
            subscription = Subscription(request_id=request_id, num_sequences=count, mailbox=mailbox)
            self._open[request_id] = subscription
            self._num_open += count
            self._jobs.append(lambda: self._submit(subscription, ticket, priority))
            self._change.notify()
        return subscription

    def cancel(self, subscription: Subscription) -> None:
        """Nobody reads it any more: end the request before the next step. Finished ones are left as they are."""
        with self._change:
            if self._open.get(subscription.request_id) is subscription:
                self._close(subscription)
                self._jobs.append(lambda: self._abort(subscription.request_id))
                self._change.notify()

    def call[Result](self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Have the thread call function(engine) between two steps. Raises EngineDead."""
        future: Future[Result] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except Exception as error:
                    future.set_exception(error)

        with self._change:
            self._check_alive()
            self._jobs.append(job)
            self._change.notify()
        return future

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """End requests; their readers get a last output, with finish reason "abort". Unknown ids are ignored."""
        ids = tuple(request_ids)

        def end(engine: Engine) -> None:
            self._deliver([output for name in ids if (output := engine.abort(name)) is not None])

        return self.call(end)

    def stop(self) -> None:
        """End all requests with "abort", and the thread. Safe to call again, and from the thread itself."""
        with self._change:
            self._stopping = True
            self._change.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- on the thread

    def _run(self) -> None:
        try:
            while self._do_jobs():
                self._deliver(self.engine.step())
            self._deliver([output for name in tuple(self._open) if (output := self.engine.abort(name)) is not None])
        except BaseException as error:  # the engine recovers from errors of its steps by itself: this is one of ours
            logger.exception("the engine's thread ends")
            self.error = error
        finally:
            self._end()

    def _do_jobs(self) -> bool:
        """Wait until there is something to do, and do what is to be done between two steps; False after stop()."""
        with self._change:
            self._change.wait_for(lambda: self._jobs or self._stopping or self.engine.has_unfinished)
            jobs, self._jobs = self._jobs, []
            stopping = self._stopping  # read with the jobs: none comes after it
        for job in jobs:
            job()
        return not stopping

    def _submit(self, subscription: Subscription, ticket: Ticket, priority: int) -> None:
        if self._open.get(subscription.request_id) is not subscription:
            return  # cancelled already
        try:
            self.engine.submit(subscription.request_id, ticket, priority=priority)
        except Exception as error:
            with self._change:
                self._close(subscription)
            subscription.mailbox.postman.post([(subscription.mailbox, error)])

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs to their mailboxes; those of requests that nobody reads any more are dropped."""
        letters: defaultdict[Postman, list[tuple[Mailbox, RequestOutput]]] = defaultdict(list)
        with self._change:
            for output in outputs:
                subscription = self._open.get(output.request_id)
                if subscription is not None:
                    letters[subscription.mailbox.postman].append((subscription.mailbox, output))
                    if output.finished:
                        self._close(subscription)
        for postman, batch in letters.items():
            if not postman.post(batch):
                self._leave(postman)

    def _leave(self, postman: Postman) -> None:
        """Its event loop is closed: end the requests that would be read there."""
        with self._change:
            left = [each for each in self._open.values() if each.mailbox.postman is postman]
            for subscription in left:
                self._close(subscription)
        for subscription in left:
            self.engine.abort(subscription.request_id)

    def _close(self, subscription: Subscription) -> None:
        """Take no more outputs for it. The lock must be held."""
        if self._open.get(subscription.request_id) is subscription:
            del self._open[subscription.request_id]
            self._num_open -= subscription.num_sequences
            postman = subscription.mailbox.postman
            postman.num_open -= 1
            if not postman.num_open:  # the loop may end: it must not be held
                del self._postmen[postman.loop]

    def _end(self) -> None:
        """Tell everyone who still waits; take nothing more."""
        with self._change:
            self._ended = True
            waiting = tuple(self._open.values())
            for subscription in waiting:
                self._close(subscription)
            jobs, self._jobs = self._jobs, []
        dead = self._dead()
        for subscription in waiting:
            subscription.mailbox.postman.post([(subscription.mailbox, dead)])
        for job in jobs:  # after an error: calls are answered, requests are not taken
            job()

    def _check_alive(self) -> None:
        if not self.running:
            raise self._dead()

    def _dead(self) -> EngineDead:
        error = EngineDead("the engine was shut down" if self.error is None else f"the engine has died: {self.error!r}")
        error.__cause__ = self.error
        return error
