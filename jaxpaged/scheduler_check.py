"""The scheduler's checks: of results handed to it, and of its own invariants when idle and in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxpaged.paging import BlockTables
from jaxpaged.plan import RowPlan, StepPlan, StepResult
from jaxpaged.request import Request, Status


def rows_answered(in_flight: Sequence[StepPlan], result: StepResult) -> list[RowPlan]:
    """The rows a result has tokens for. ValueError unless it is that of the oldest plan in flight, and complete."""
    if not in_flight or in_flight[0].step != result.step:
        wanted = in_flight[0].step if in_flight else "none"
        raise ValueError(f"results must come in the order of the plans: wanted step {wanted}, got {result.step}")
    rows = [row for row in in_flight[0].rows if row.samples]
    if not len(rows) == len(result.token_ids) == len(result.logprobs):
        raise ValueError(
            f"step {result.step} samples {len(rows)} tokens, got {len(result.token_ids)} "
            f"and {len(result.logprobs)} log-probabilities"
        )
    return rows


def check_lines(
    waiting: Sequence[Request], running: Sequence[Request], num_requests: int, key: Callable[[Request], tuple[int, int]]
) -> None:
    """Raise AssertionError unless every request is in one of the two lines, in order, with the fitting status."""
    for line in (waiting, running):
        assert list(line) == sorted(line, key=key), "a line is out of order"
    assert len({*waiting, *running}) == len(waiting) + len(running) == num_requests, "a request is in no line or in two"
    for request in waiting:
        assert request.status in (Status.WAITING, Status.PREEMPTED), f"{request.request_id} waits as {request.status}"
        assert request.slot is None and request.num_computed == 0, f"{request.request_id} waits and holds a slot"
    for request in running:
        assert request.status == Status.RUNNING, f"{request.request_id} runs as {request.status}"
        assert request.num_computed <= request.num_tokens, f"{request.request_id} is computed beyond its end"
        assert request.answer is None or request.num_computed == request.num_tokens, f"{request.request_id} is not idle"


def check_slots(running: Sequence[Request], free_slots: Sequence[int], tables: BlockTables) -> None:
    """Raise AssertionError unless slots and blocks belong to the running requests, and to one of them each.

    Full blocks may be shared; the block that a request writes next may not, but for beams, which copy it first.
    """
    slots = [request.slot for request in running if request.slot is not None]
    assert len(slots) == len(running), "a request runs without a slot"
    assert sorted([*slots, *free_slots]) == list(range(len(tables.lengths))), "a slot is lost or has two owners"
    assert tables.lengths.sum() == tables.lengths[slots].sum(), "an idle slot holds blocks"
    for slot, request in zip(slots, running, strict=True):
        full, partial = divmod(request.num_computed, tables.block_size)
        assert tables.lengths[slot] >= full + (partial > 0), f"{request.request_id} lacks blocks"
        if partial and not request.lockstep:
            assert tables.refs[tables.table[slot, full]] == 1, f"{request.request_id} will write a shared block"
