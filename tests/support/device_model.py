"""A device that runs step plans in plain Python and knows, for every KV position, which tokens it was made from.

The content of a KV position is a number for the whole token sequence up to it (and the request's cache key), because
that is what keys and values depend on. A row that sees anything but its own history is found at once: a block
freed too early, shared wrongly, hit falsely, written by two rows, or not copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxpaged.plan import Reading, RowPlan, StepPlan, StepResult, TokenLogprobs
from jaxpaged.request import Request

ANSWER = TokenLogprobs(
    ranked=True,
    top_ids=np.zeros(1, np.int32),
    top_logprobs=np.zeros(1, np.float32),
    sampled_logprob=0.0,
    sampled_rank=1,
)


class History:
    """What the device has seen of one request: all its tokens, also those the host has not read."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.marks: list[int] = []  # marks[p] stands for tokens[0..p]
        self._last = zlib.crc32(request.cache_key) + 1
        self.extend(request.prompt_ids)

    def continued(self, request: Request) -> History:
        """The history of a fork: this one and the fork's newest token."""
        twin = History(request)
        twin.extend(self.tokens[request.num_prompt :])
        twin.extend(request.output_ids[-1:])
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._last = hash((self._last, token, len(self.tokens))) & (2**62 - 1) | 1
            self.tokens.append(token)
            self.marks.append(self._last)


class DeviceModel:
    """Runs plans in the order they are made. Every broken rule is an AssertionError."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, budget: int) -> None:
        self.content = np.zeros((num_blocks, block_size), np.int64)  # 0: never written
        self.block_size = block_size
        self.budget = budget
        self.last_tokens = [0] * max_num_seqs
        self.sequences: dict[Request, History] = {}
        self.computed: dict[Request, int] = {}  # requests that hold blocks: KV positions written
        self.slots: dict[Request, int] = {}
        self.num_held = 0  # distinct blocks held after the last plan

    def add(self, request: Request) -> None:
        self.sequences[request] = History(request)

    def fork(self, parent: Request, child: Request) -> None:
        """The scheduler has forked: what the parent computed is computed for the child, if that got a slot."""
        self.sequences[child] = self.sequences[parent].continued(child)
        if child.slot is not None:
            self.computed[child], self.slots[child] = self.computed[parent], child.slot

    def extend(self, request: Request, token: int) -> None:
        """A beam was given its next token."""
        self.sequences[request].extend([token])

    def is_idle(self, request: Request) -> bool:
        """A beam all of whose tokens are computed."""
        return request.lockstep and self.computed[request] == len(self.sequences[request].tokens)

    def leave(self, request: Request) -> None:
        """The request was finished: it holds no blocks any more."""
        self.computed.pop(request, None)
        self.slots.pop(request, None)

    def lose_everything(self, read: Mapping[Request, Sequence[int]]) -> None:
        """As after a failed step: no KV is left, and of each request's outputs those that were read."""
        self.content[:] = 0
        self.last_tokens = [0] * len(self.last_tokens)
        self.computed.clear()
        self.slots.clear()
        for request in self.sequences:
            self.sequences[request] = History(request)
            self.sequences[request].extend(read[request])

    def run(self, plan: StepPlan, sample: Callable[[Request], int]) -> StepResult:
        """Run a plan; sample gives the next token of a request."""
        self._check_plan(plan)
        before = dict(self.computed)
        preempted = [r for r in self.computed if r.request_id in plan.preempted]
        if not all(self.is_idle(request) for request in preempted):
            assert all(row.request in before for row in plan.rows), "a preempting step admitted a request"
        for request in preempted:
            self.leave(request)
        self._copy(plan)
        for row in plan.rows:
            self._check_context(plan, row.request, row.slot, row.start)  # before this plan writes anything
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            self._write(plan, row, before, written)
        for request, length in self.computed.items():
            self._check_context(plan, request, self.slots[request], length)
        self._check_ownership(plan)
        tokens = [self._sample(row, sample) for row in plan.rows if row.samples]
        logprobs = tuple(ANSWER if row.request.lockstep else None for row in plan.rows if row.samples)
        readings = tuple(self._read(row) for row in plan.reading_rows)
        return StepResult(step=plan.step, token_ids=np.array(tokens, np.int32), logprobs=logprobs, readings=readings)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.rows, "an empty plan"
        assert 0 < plan.num_tokens <= self.budget, "token budget exceeded"
        requests = [row.request for row in plan.rows]
        assert len(set(requests)) == len(requests), "a request has two rows"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows share a slot"
        single = [row.kv_len for row in plan.rows if row.count == 1]
        assert [row.count == 1 for row in plan.rows] == sorted((row.count == 1 for row in plan.rows), reverse=True)
        assert single == sorted(single, reverse=True), "single-token rows are not longest first"
        assert not plan.block_tables.flags.writeable, "the plan's tables can change under the device"

    def _copy(self, plan: StepPlan) -> None:
        sources = [source for source, _ in plan.copies]
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets), "a block is copied to twice"
        assert 0 not in sources and 0 not in targets, "the trash block is copied"
        # All sources are read before a target is written; a source that was freed since may be a later pair's target.
        for index, source in enumerate(sources):
            assert source not in targets[:index], "copies depend on their order"
        self.content[targets] = self.content[sources]

    def _check_context(self, plan: StepPlan, request: Request, slot: int, length: int) -> None:
        """Positions [0, length) of the row hold the request's own history."""
        used = -(-length // self.block_size)
        blocks = plan.block_tables[slot, :used]
        assert (blocks > 0).all(), f"{request.request_id} lacks a block"
        seen = self.content[blocks].reshape(-1)[:length]
        wanted = np.array(self.sequences[request].marks[:length], np.int64)
        assert (seen == wanted).all(), f"{request.request_id} sees foreign KV at {np.flatnonzero(seen != wanted)}"

    def _write(self, plan: StepPlan, row: RowPlan, before: dict[Request, int], written: set[tuple[int, int]]) -> None:
        sequence = self.sequences[row.request]
        assert len(row.tokens) == row.count > 0 and row.tokens.dtype == np.int32
        assert row.kv_len <= len(sequence.tokens), "a row computes a token that does not exist"
        if row.request in before:
            assert row.start == before[row.request], "computed positions have a gap or overlap"
            assert row.slot == self.slots[row.request], "a row changed its slot"
        complete = row.request.generates and row.kv_len == len(sequence.tokens)
        assert row.samples == complete, "sampled too early, or not at all"
        tokens = row.tokens.tolist()
        if row.token_on_device:
            assert row.samples, "a token on the device is the newest token"
            assert not row.request.lockstep, "a beam takes the token that was sampled instead of the one chosen"
            tokens[-1] = self.last_tokens[row.slot]
        assert tokens == sequence.tokens[row.start : row.kv_len], "the row computes other tokens than its own"
        for position in range(row.start, row.kv_len):
            block = int(plan.block_tables[row.slot, position // self.block_size])
            place = (block, position % self.block_size)
            assert np.count_nonzero(plan.block_tables == block) == 1, f"{row.request.request_id} writes a shared block"
            assert block != 0 and place not in written, "KV is written to the trash block or twice"
            written.add(place)
            self.content[place] = sequence.marks[position]
        self.computed[row.request] = row.kv_len
        self.slots[row.request] = row.slot

    def _check_ownership(self, plan: StepPlan) -> None:
        """Only requests with blocks have table rows; a shared block has equal content for its holders.

        It is full, or partly filled, and then its holders are beams that wait.
        """
        size = self.block_size
        owners: dict[int, tuple[int, int, int | None]] = {}
        idle = np.ones(len(plan.block_tables), bool)
        for request, length in self.computed.items():
            slot = self.slots[request]
            assert idle[slot], "two requests hold one slot"
            idle[slot] = False
            marks = self.sequences[request].marks
            row = plan.block_tables[slot]
            held = int(np.count_nonzero(row))
            assert held <= -(-len(marks) // size), f"{request.request_id} holds more blocks than it has tokens for"
            for i, block in enumerate(row[:held].tolist()):
                end = min((i + 1) * size, length) if request.lockstep else (i + 1) * size
                mark = marks[end - 1] if i * size < end <= length else None
                if block in owners:
                    assert mark is not None and owners[block] == (i, end, mark), f"block {block} is shared wrongly"
                owners[block] = (i, end, mark)
        assert not plan.block_tables[idle].any(), "a slot nobody uses holds blocks"
        self.num_held = len(owners)

    def _read(self, row: RowPlan) -> Reading:
        """What is read tells which positions these were, in place of log-probabilities."""
        readout = row.request.readout
        assert readout is not None, "a request that asked for nothing is read"
        assert row.start <= row.read.start and row.read.stop <= row.kv_len, "a position is read that is not computed"
        assert readout.first <= row.read.start and row.read.stop <= readout.stop, "a position is read unasked"
        return Reading(count=len(row.read), logprobs=np.array(row.read))

    def _sample(self, row: RowPlan, sample: Callable[[Request], int]) -> int:
        token = sample(row.request)
        if row.request.lockstep:
            return token  # the search chooses another
        self.sequences[row.request].extend([token])
        self.last_tokens[row.slot] = token
        return token
