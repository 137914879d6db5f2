"""Collects the rows of one step and turns them into a StepPlan."""

from __future__ import annotations

import numpy as np

from jaxpaged.plan import RowPlan, StepPlan
from jaxpaged.request import Request, Status

type _Entry = tuple[Request, int, bool]  # request, start, samples


class StepBuilder:
    """One step in the making: the token budget left and the rows so far."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[str] = []
        self._entries: dict[Request, tuple[int, bool]] = {}  # start and "samples" of each row

    def __bool__(self) -> bool:
        """True when the step has a row."""
        return bool(self._entries)

    def add(self, request: Request, count: int) -> None:
        """Plan the next count tokens of a request: its counters move on as if they were computed."""
        assert 0 < count <= self.budget, f"{count} tokens do not fit the budget of {self.budget}"
        start = request.num_computed
        samples = start + count == request.num_tokens
        self._entries[request] = (start, samples)
        self.budget -= count
        request.num_computed = start + count
        if samples:
            request.num_pending += 1

    def can_share(self, sibling: Request) -> bool:
        """Whether earlier steps have computed the sibling's prompt up to its last token: this step's do not count."""
        entry = self._entries.get(sibling)
        computed = sibling.num_computed if entry is None else entry[0]
        return sibling.status == Status.RUNNING and computed >= sibling.num_prompt - 1

    def filling(self, block_size: int) -> list[Request]:
        """The planned requests that may have filled a block whose tokens the host knows.

        A chunk may fill any; a single token's block is looked at one token later, when its last token has been read.
        """
        return [r for r, (start, _) in self._entries.items() if start % block_size == 0 or r.num_computed > start + 1]

    def build(self, step: int, block_tables: np.ndarray) -> StepPlan:
        """The plan. Rows of one token first, longest context first, then chunks as they were added."""
        single: list[_Entry] = []
        chunks: list[_Entry] = []
        for request, (start, samples) in self._entries.items():
            (single if request.num_computed == start + 1 else chunks).append((request, start, samples))
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
    for i, (request, start, samples) in enumerate(entries):
        output = start - len(request.prompt_ids)
        on_device = output >= len(request.output_ids)
        if not on_device:
            ids[i] = request.output_ids[output] if output >= 0 else request.prompt_ids[start]
        rows.append(_row(request, start, 1, ids[i : i + 1], on_device, samples))
    return rows


def _chunk_row(request: Request, start: int, samples: bool) -> RowPlan:
    count = request.num_computed - start
    tokens = np.array(request.known_tokens(start, start + count), np.int32)
    assert len(tokens) == count, f"{request.request_id}: a chunk of several tokens reaches into the unknown"
    return _row(request, start, count, tokens, False, samples)


def _row(request: Request, start: int, count: int, tokens: np.ndarray, on_device: bool, samples: bool) -> RowPlan:
    assert request.slot is not None, f"{request.request_id} is planned without a slot"
    return RowPlan(
        request=request,
        slot=request.slot,
        start=start,
        count=count,
        tokens=tokens,
        token_on_device=on_device,
        samples=samples,
    )
