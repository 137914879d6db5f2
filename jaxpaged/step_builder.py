"""Collects the rows of one step and turns them into a StepPlan."""

from __future__ import annotations

import numpy as np

from jaxpaged.plan import RowPlan, StepPlan
from jaxpaged.request import Request, Status

type _Entry = tuple[Request, int, bool, range]  # request, start, samples, positions read


class StepBuilder:
    """One step in the making: the budgets left, of tokens and of positions to read, and the rows so far."""

    def __init__(self, budget: int, read_budget: int) -> None:
        self.budget = budget
        self._read_budget = read_budget
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[str] = []
        self._entries: dict[Request, tuple[int, bool, range]] = {}  # start, "samples" and positions read of each row

    def __bool__(self) -> bool:
        """True when the step has a row."""
        return bool(self._entries)

    def reads(self, request: Request) -> bool:
        """Whether the step can read something more, or the request has nothing to be read."""
        return self._read_budget > 0 or request.next_to_read is None

    def readable(self, request: Request, count: int) -> int:
        """As many of the request's next count tokens as what is to be read of them still fits the step.

        Example: positions 0-99 are to be read, 40 tokens are computed, 16 more may be read: 16 of the next 50.
        """
        first = request.next_to_read
        if first is None or request.readout is None:
            return count
        fitting = first + self._read_budget
        return count if fitting >= request.readout.stop else max(0, min(count, fitting - request.num_computed))

    def add(self, request: Request, count: int) -> None:
        """Plan the next count tokens of a request: its counters move on as if they were computed."""
        assert 0 < count <= self.budget, f"{count} tokens do not fit the budget of {self.budget}"
        start = request.num_computed
        samples = request.generates and start + count == request.num_tokens
        read = self._read(request, start + count)
        self._entries[request] = (start, samples, read)
        self.budget -= count
        request.num_computed = start + count
        if samples:
            request.num_pending += 1

    def _read(self, request: Request, end: int) -> range:
        """The positions before `end` that are read now."""
        first = request.next_to_read
        if first is None or first >= end or request.readout is None:
            return range(0)
        assert first >= request.num_computed, f"{request.request_id}: position {first} was computed and never read"
        read = range(first, min(end, request.readout.stop))
        assert len(read) <= self._read_budget, f"{len(read)} positions are read, {self._read_budget} fit the step"
        self._read_budget -= len(read)
        request.num_read += len(read)
        return read

    def can_share(self, sibling: Request) -> bool:
        """Whether earlier steps have computed the sibling's prompt up to its last token: this step's do not count."""
        entry = self._entries.get(sibling)
        computed = sibling.num_computed if entry is None else entry[0]
        return sibling.status == Status.RUNNING and computed >= sibling.num_prompt - 1

    def filling(self, block_size: int) -> list[Request]:
        """The planned requests that may have filled a block whose tokens the host knows.

        A chunk may fill any; a single token's block is looked at one token later, when its last token has been read.
        """
        return [r for r, (start, *_) in self._entries.items() if start % block_size == 0 or r.num_computed > start + 1]

    def build(self, step: int, block_tables: np.ndarray) -> StepPlan:
        """The plan. Rows of one token first, longest context first, then chunks as they were added."""
        single: list[_Entry] = []
        chunks: list[_Entry] = []
        for request, entry in self._entries.items():
            (single if request.num_computed == entry[0] + 1 else chunks).append((request, *entry))
        single.sort(key=lambda entry: -entry[1])
        rows = _single_rows(single) + [_chunk_row(*entry) for entry in chunks]
        return StepPlan(
            step=step,
            rows=tuple(rows),
            block_tables=block_tables,
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
        )


def _single_rows(entries: list[_Entry]) -> list[RowPlan]:
    """Rows of one token each; their token arrays are views of one array, which is cheaper to make."""
    ids = np.zeros(len(entries), np.int32)
    rows: list[RowPlan] = []
    for i, (request, start, samples, read) in enumerate(entries):
        output = start - len(request.prompt_ids)
        on_device = output >= len(request.output_ids)
        if not on_device:
            ids[i] = request.output_ids[output] if output >= 0 else request.prompt_ids[start]
        rows.append(_row(request, start, ids[i : i + 1], on_device, samples, read))
    return rows


def _chunk_row(request: Request, start: int, samples: bool, read: range) -> RowPlan:
    count = request.num_computed - start
    tokens = np.array(request.known_tokens(start, start + count), np.int32)
    assert len(tokens) == count, f"{request.request_id}: a chunk of several tokens reaches into the unknown"
    return _row(request, start, tokens, False, samples, read)


def _row(request: Request, start: int, tokens: np.ndarray, on_device: bool, samples: bool, read: range) -> RowPlan:
    assert request.slot is not None, f"{request.request_id} is planned without a slot"
    return RowPlan(
        request=request,
        slot=request.slot,
        start=start,
        count=len(tokens),
        tokens=tokens,
        token_on_device=on_device,
        samples=samples,
        read=read,
    )
