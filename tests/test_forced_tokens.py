"""Tokens given to a request without sampling: computed as one chunk in any company, and ended where they end it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxpaged.plan import StepPlan
from jaxpaged.request import FinishReason, Request
from tests.support.scheduling import Loop, make_request, serve


class ForcingLoop(Loop):
    """Before a step's samples are drawn, all earlier ones are read and some rows get runs of forced tokens instead.

    The device still draws a token for such rows, and that must not count.
    """

    def __init__(self, *, runs: random.Random, **shape: Any) -> None:
        super().__init__(sample=lambda request: 100 + len(self.device.sequences[request].tokens), **shape)
        self._runs = runs
        self.num_forced = 0

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is not None:
            while len(self.flight) > 1:
                self.absorb()
            for row in plan.rows:
                if row.samples and not row.request.finished and self._runs.random() < 0.4:
                    self.force(row.request, self._runs.randint(2, 7))
        return plan

    def force(self, request: Request, count: int) -> None:
        history = self.device.sequences[request]
        drawn = history.tokens.pop()
        history.marks.pop()
        history._last = history.marks[-1]
        for token in range(drawn + 500, drawn + 500 + count):
            if not request.finished:
                self.scheduler.force(request, token)
                history.extend([token])
                self.num_forced += 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"num_blocks": 14}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 2}])
def test_runs_are_computed_whole_in_any_company(shape: dict[str, int], depth: int) -> None:
    """With short pools (preemption), small budgets (chunks) and few slots, every row computes its own tokens."""
    for seed in range(5):
        runs = random.Random(seed)
        loop = ForcingLoop(runs=runs, depth=depth, **shape)
        prompts = [range(runs.randint(1, 9)) for _ in range(6)]
        requests = serve(loop, *prompts, max_tokens=20)
        assert loop.num_forced
        for request in requests:
            assert len(request.output_ids) == len(request.logprobs) == 20
            assert loop.device.sequences[request].tokens[: request.num_prompt + 20] == [
                *request.prompt_ids,
                *request.output_ids,
            ]


def test_a_run_is_one_row_of_the_next_step() -> None:
    loop = ForcingLoop(runs=random.Random(0))
    loop._runs.random = lambda: 1.0  # none by itself
    request = loop.add(make_request("a", [1, 2, 3], max_tokens=10))
    loop.schedule()
    loop.force(request, 4)
    assert request.num_disregarded == 1 and request.num_pending == 0
    plan = loop.schedule()
    assert plan is not None
    (row,) = plan.rows
    assert (row.start, row.count, row.samples, row.token_on_device) == (3, 4, True, False)
    assert request.num_disregarded == 0, "the sample that was drawn beside the run was not dropped"
    loop.finish()
    assert len(request.output_ids) == 10


@pytest.mark.parametrize(
    ("max_tokens", "stop", "reason"), [(3, None, FinishReason.LENGTH), (9, [504], FinishReason.STOP)]
)
def test_a_run_ends_where_a_sampled_token_would(max_tokens: int, stop: list[int] | None, reason: FinishReason) -> None:
    loop = ForcingLoop(runs=random.Random(0))
    loop._runs.random = lambda: 1.0
    request = loop.add(make_request("a", [1], max_tokens=max_tokens, stop_token_ids=stop))
    loop.schedule()
    for token in range(502, 510):
        if not request.finished:
            loop.scheduler.force(request, token)
    assert request.output_ids == [502, 503, 504] and request.finish_reason == reason
    loop.finish()


def test_samples_in_flight_are_forgotten_with_their_steps() -> None:
    """After a restart the next sample was dropped in place of the one that was lost."""
    loop = ForcingLoop(runs=random.Random(0))
    loop._runs.random = lambda: 1.0
    request = loop.add(make_request("a", [1, 2, 3], max_tokens=10))
    loop.schedule()
    loop.force(request, 4)
    loop.scheduler.restart()
    loop.flight.clear()
    loop.device.leave(request)
    loop.finish()
    assert len(request.output_ids) == 10
