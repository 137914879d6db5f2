"""Who waits and who runs: the scheduler's two lines, and the slots and blocks of those that run."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable

from jaxpaged.block_manager import BlockManager
from jaxpaged.request import Request, Status
from jaxpaged.scheduler_check import check_lines, check_slots


class Roster:
    """Moves requests between the queue and the running list. Decides nothing.

    Both lists are sorted by `key`. Forks have their parent's arrival, so a family stands together in both.
    """

    def __init__(self, blocks: BlockManager, key: Callable[[Request], tuple[int, int]], num_slots: int) -> None:
        self._blocks = blocks
        self._key = key
        self._requests: dict[str, Request] = {}
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))  # a heap: the lowest slot is used first
        self._num_arrived = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    @property
    def next_slot(self) -> int | None:
        """The slot that start() will give; None while all are taken."""
        return self._free_slots[0] if self._free_slots else None

    def enter(self, request: Request) -> None:
        """Queue a new request behind all that arrived before."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._blocks.track(request)
        bisect.insort(self.waiting, request, key=self._key)

    def start(self, request: Request, num_computed: int) -> None:
        """Let a request run, no longer in the queue, that was given blocks for next_slot."""
        request.slot = heapq.heappop(self._free_slots)
        request.status = Status.RUNNING
        request.num_computed = num_computed
        bisect.insort(self.running, request, key=self._key)

    def preempt(self, request: Request) -> None:
        """Back to the queue: outputs (also those in flight) are kept, what was computed is computed again."""
        self._vacate(request)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=self._key)

    def leave(self, request: Request, *, trusted: bool) -> None:
        """Out of all lists; its blocks are free. Those of an untrusted request are not found again.

        A fork that an exception kept from coming in has nothing to leave.
        """
        if self._requests.get(request.request_id) is not request:
            return
        if request.slot is None:
            self.waiting.remove(request)
        else:
            if not trusted:
                self._blocks.unlist(request)
            self._vacate(request)
        self._blocks.forget(request)
        del self._requests[request.request_id]

    def fork(self, parent: Request, child: Request) -> None:
        """Let a child, which has its parent's tokens and one more, run on from the parent's blocks, all shared.

        It costs no block until one of the two writes. Without a free slot, or when the parent itself waits, the
        child waits in the queue like a preempted request, and finds in the prefix cache what is there.
        """
        child.arrival, child.num_cached = parent.arrival, parent.num_cached
        self._requests[child.request_id] = child
        self._blocks.track_fork(parent, child)
        slot = self.next_slot
        if parent.slot is None or slot is None:
            child.status = Status.PREEMPTED
            bisect.insort(self.waiting, child, key=self._key)
            return
        self._blocks.share(parent, slot)
        self.start(child, parent.num_computed)

    def make_way(self, request: Request, *, for_anyone: bool) -> Request | None:
        """Send an idle beam back to the queue for a waiting request that lacks a slot or blocks; the beam, if any.

        An idle beam has had its answer and waits for the rest of its family, which may be what lacks the room: only
        the queue's first request can tell, so beams before it keep their place unless nobody else can get on.
        """
        for beam in reversed(self.running):
            if not for_anyone and self._key(beam) < self._key(request):
                return None
            if beam.answer is not None:
                self.preempt(beam)
                return beam
        return None

    def restart(self) -> None:
        """Every unfinished request is in the queue again, and nothing is computed; also if a change was torn in two."""
        self._blocks.restart()
        self._free_slots = list(range(self._num_slots))
        self._requests = {name: request for name, request in self._requests.items() if not request.finished}
        self.running.clear()
        self.waiting[:] = sorted(self._requests.values(), key=self._key)
        for request in self.waiting:
            request.lose_progress()

    def set_priority(self, request: Request, priority: int) -> None:
        """Move a request to its new place."""
        line = self.waiting if request.slot is None else self.running
        line.remove(request)
        request.priority = priority
        bisect.insort(line, request, key=self._key)

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        tables = self._blocks.check()
        check_lines(self.waiting, self.running, len(self._requests), self._key)
        check_slots(self.running, self._free_slots, tables)

    def _vacate(self, request: Request) -> None:
        assert request.slot is not None, f"{request.request_id} runs without a slot"
        self._blocks.release(request)
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
