"""The scheduler: decides what each step computes, and what its results mean for the requests."""

from __future__ import annotations

from collections import deque

from jaxpaged import scheduler_policy as rules
from jaxpaged.block_manager import BlockManager
from jaxpaged.plan import StepPlan, StepResult, TokenLogprobs
from jaxpaged.request import FinishReason, Request, Status
from jaxpaged.roster import Roster
from jaxpaged.scheduler_check import rows_answered
from jaxpaged.scheduler_stats import SchedulerStats
from jaxpaged.step_builder import StepBuilder


class Scheduler:
    """Spends a token budget per step so that every request's num_computed catches up with its num_tokens.

    There are no phases: decode, (chunked) prefill and recomputing after a preemption are one thing.
    Every plan schedule() returns must be run, in order. Plans may be made ahead of their predecessors' results:
    tokens sampled but not yet read are counted (num_pending) and stay on the device.

    Both the queue and the running list are sorted by the policy's key: arrival, or (priority, arrival).
    The last running request is therefore the one to preempt, a preempted one finds itself before all younger ones
    in the queue, and the first running request always gets on: nobody is stuck.

    Beams (Request.lockstep) are answered with log-probabilities instead of a token. Somebody else then extends, forks
    and finishes them, all beams of a family together; an answered beam is idle, and gives way to others when it must.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str,
        enable_prefix_caching: bool,
        max_num_read: int = 1,  # positions of prompts read in a step, see Request.readout
    ) -> None:
        rules.check_sizes(max_num_seqs, max_num_batched_tokens, max_model_len)
        # A running request must be able to get a token in every step: no more of them than the budget has tokens.
        num_slots = min(max_num_seqs, max_num_batched_tokens)
        self._blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._budgets = max_num_batched_tokens, max_num_read
        self._limits = rules.LengthLimits(max_model_len=max_model_len, num_blocks=num_blocks, block_size=block_size)
        self._roster = Roster(self._blocks, rules.order(policy), num_slots)
        self._waiting, self._running = self._roster.waiting, self._roster.running
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been absorbed."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        return len(self._roster) > 0

    @property
    def stats(self) -> SchedulerStats:
        """A reading of the gauges and counters."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            preemptions=self._roster.num_preemptions,
            **self._blocks.figures(),
        )

    def check_prompt(self, num_prompt: int, *, generates: bool = True) -> None:
        """Raise ValueError when a prompt of so many tokens can never be served; changes nothing."""
        self._limits.check_prompt(num_prompt, generates=generates)

    def add(self, request: Request) -> None:
        """Queue a request. ValueError, and nothing queued, for a prompt that can never fit or an id in use.

        max_tokens is cut to what max_model_len and the whole KV pool leave (the newest token needs no KV), so that
        a request that runs alone always gets its blocks and ends with "length".
        """
        self.check_prompt(request.num_prompt, generates=request.generates)
        if self._roster.find(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id!r} is in use; wait for it to finish or take another")
        if request.sibling is not None and request.sibling.prompt_ids != request.prompt_ids:
            raise ValueError(f"request {request.request_id!r} and its sibling must have the same prompt")
        request.max_tokens = min(request.max_tokens, self._limits.output_room(request.num_prompt))
        self._roster.enter(request)

    def extend(self, request: Request, token: int) -> None:
        """Give an answered beam its next token."""
        assert request.answer is not None, f"{request.request_id} has not been answered"
        request.answer = None
        request.output_ids.append(token)

    def fork(self, parent: Request, child: Request) -> None:
        """Take in a further beam: an answered beam's tokens and one more. It shares the parent's blocks, which are
        copied when one of the two writes to them. To be called before the parent is extended.
        """
        assert parent.answer is not None and child.lockstep, f"{parent.request_id} cannot be forked now"
        assert child.output_ids[:-1] == parent.output_ids, f"{child.request_id} does not continue its parent"
        self._roster.fork(parent, child)

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a request another priority; unknown (or finished) ids are ignored."""
        request = self._roster.find(request_id)
        if request is not None:
            self._roster.set_priority(request, priority)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nothing can be done now (absorb what is in flight, or add requests).

        1. Running requests, in order: one token for each that decodes, chunks from what the budget has over.
           When blocks run out the last running request is preempted.
        2. Waiting requests, in order, unless a request was preempted.
        """
        step = StepBuilder(*self._budgets)
        self._plan_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        if not step:
            return None
        for request in step.filling(self._blocks.block_size):
            self._blocks.index(request)  # only now: within one step nobody may hit what it writes
        plan = step.build(self._num_steps, self._blocks.commit().table)
        self._num_steps += 1
        self._in_flight.append(plan)
        return plan

    def absorb(self, result: StepResult) -> list[Request]:
        """Take in the results of the oldest plan in flight; the requests that were answered or ended, in row order.

        Tokens of requests that have finished meanwhile, or were forced to others, are dropped; a preempted request
        still gets its token. A request that failed ends with "error", whatever it has got so far stays.
        """
        rows = rows_answered(self._in_flight, result)
        updated: list[Request] = []
        for request, failed in rules.take_readings(self._in_flight.popleft(), result.readings):
            self.finish(request, FinishReason.ERROR if failed else FinishReason.LENGTH, None)
            updated.append(request)
        answers = zip(rows, result.token_ids.tolist(), result.logprobs, strict=True)
        for index, (row, token, logprobs) in enumerate(answers):
            if row.request.finished or row.request.disregards_sample():
                continue
            if index in result.failed:
                row.request.error = result.failed[index]
                self.finish(row.request, FinishReason.ERROR, None)
            elif row.request.lockstep:
                row.request.num_pending -= 1
                row.request.answer = logprobs
            else:
                self._append(row.request, token, logprobs)
            updated.append(row.request)
        return updated

    def force(self, request: Request, token: int) -> None:
        """Give a request its next token unsampled. All before it must be known; the one in flight will not count."""
        request.num_disregarded += request.num_pending
        request.num_pending = 1
        self._append(request, token, None)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a request and take its slot and blocks back; a finished one is left as it is."""
        if request.finished:
            return
        self._roster.leave(request, trusted=reason != FinishReason.ERROR)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.num_pending = 0

    def abort(self, request_id: str) -> Request | None:
        """End a request with reason "abort" and return it; None for an unknown (or finished) id."""
        request = self._roster.find(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT, None)
        return request

    def restart(self) -> None:
        """Begin anew with every unfinished request in the queue: the cache is lost, or a step was torn in two.

        Outputs are kept, all else is computed again. Plans in flight are void; what they sampled is sampled again.
        """
        self._in_flight.clear()
        self._roster.restart()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing done, while a request is running."""
        return self._blocks.reset_cache()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self._roster.check()

    def _plan_running(self, step: StepBuilder) -> None:
        running = self._running
        wanted = [rules.tokens_wanted(request) for request in running]
        # One token is set aside for each of these that is still to come; there are no more slots than tokens.
        decoding = wanted.count(1)
        index = 0
        while index < len(running):  # shrinks from its end by preemption
            request, want = running[index], wanted[index]
            index += 1
            if want == 1:
                decoding -= 1
            count = step.readable(request, want if want <= step.budget - decoding else step.budget - decoding)
            if count > 0 and self._make_room(request, count, step):
                step.add(request, count)

    def _make_room(self, request: Request, count: int, step: StepBuilder) -> bool:
        """Give a running request blocks for its next tokens, preempting from the end; False if it had to go."""
        if count == 1 and request.num_computed % self._blocks.block_size and not request.lockstep:
            return True  # the block holds the token before, too
        copies = self._blocks.claim(request, count)
        while copies is None:
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
            copies = self._blocks.claim(request, count)
        step.copies.extend(copies)
        return True

    def _preempt(self, request: Request, step: StepBuilder) -> None:
        self._roster.preempt(request)
        step.preempted.append(request.request_id)

    def _admit_waiting(self, step: StepBuilder) -> None:
        index = 0
        while index < len(self._waiting) and step.budget > 0:
            request = self._waiting[index]
            sibling = rules.sibling_to_share(request)
            if request.answer is not None or (sibling is not None and not step.can_share(sibling)):
                index += 1
                continue
            # A token still in flight is in no slot that the request could read it from: wait for the host to have it.
            if request.on_its_way or not step.reads(request) or not self._admit(request, sibling, step):
                return

    def _admit(self, request: Request, sibling: Request | None, step: StepBuilder) -> bool:
        """Try to make a waiting request run, in this step; False when slots or blocks are short."""
        computed = self._place(request, sibling, step)
        while computed is None:
            stuck = not step and not self._in_flight
            beam = self._roster.make_way(request, for_anyone=stuck)
            if beam is None:
                return False
            step.preempted.append(beam.request_id)
            computed = self._place(request, sibling, step)
        if request.status == Status.WAITING:
            request.num_cached = computed
        self._waiting.remove(request)
        self._roster.start(request, computed)
        step.add(request, step.readable(request, min(rules.tokens_wanted(request), step.budget)))
        return True

    def _place(self, request: Request, sibling: Request | None, step: StepBuilder) -> int | None:
        """Give a waiting request blocks for the next slot: its computed tokens; None, and nothing changed, if short."""
        slot = self._roster.next_slot
        if slot is None:
            return None
        if sibling is None or sibling.slot is None:
            return self._blocks.admit(request, slot)
        copies = self._blocks.fork(sibling.slot, request, slot)
        step.copies.extend(copies or ())
        return None if copies is None else request.num_prompt - 1

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        """Give a request its next token and end it if that ends it."""
        end = rules.take(request, token, logprobs)
        if end is not None:
            self.finish(request, *end)
