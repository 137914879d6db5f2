"""Makers and a small engine loop for scheduler tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.plan import StepPlan, StepResult
from jaxpaged.request import Request
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler
from tests.support.device_model import DeviceModel


def make_request(request_id: str, prompt: Sequence[int], **overrides: Any) -> Request:
    """A greedy request; SamplingParams' and Request's fields can be overridden by name."""
    asks = {"max_tokens": 16, "min_tokens": 0, "stop_token_ids": None}
    asks |= {name: overrides.pop(name) for name in list(overrides) if name in asks}
    params = SamplingParams(temperature=0.0, **asks)
    fields: dict[str, Any] = {
        "eos_ids": frozenset(),
        "stop_ids": frozenset(params.stop_ids),
        "max_tokens": asks["max_tokens"],
        "seed": 0,
    } | overrides
    return Request(request_id=request_id, prompt_ids=tuple(prompt), params=params, **fields)


class Loop:
    """Scheduler and device model together, with `depth` plans in flight as the engine has them."""

    def __init__(self, *, depth: int = 2, sample: Callable[[Request], int] | None = None, **shape: Any) -> None:
        full = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
            "policy": "fcfs",
            "enable_prefix_caching": True,
        } | shape
        self.scheduler = Scheduler(**full)
        self.device = DeviceModel(
            num_blocks=full["num_blocks"],
            block_size=full["block_size"],
            max_num_seqs=full["max_num_seqs"],
            budget=full["max_num_batched_tokens"],
        )
        self.depth = depth
        self.flight: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self._sample = sample or (lambda request: 100 + len(self.device.sequences[request].tokens))

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.device.add(request)
        return request

    def schedule(self) -> StepPlan | None:
        """Plan a step and run it on the device; its result waits in flight."""
        plan = self.scheduler.schedule()
        for request in [r for r in self.device.computed if r.slot is None]:
            self.device.leave(request)  # finished, or preempted while this plan was made
        if plan is not None:
            self.plans.append(plan)
            self.flight.append(self.device.run(plan, self._sample))
        return plan

    def absorb(self) -> list[Request]:
        updated = self.scheduler.absorb(self.flight.popleft())
        self.scheduler.check()
        return updated

    def step(self) -> list[Request]:
        """One turn of the engine: plan, then read the oldest result once `depth` are in flight or none can be made."""
        plan = self.schedule()
        if self.flight and (plan is None or len(self.flight) == self.depth):
            return self.absorb()
        return []

    def finish(self, *, most: int = 1000) -> None:
        """Run until every request has ended; AssertionError if that takes more than `most` turns."""
        for _ in range(most):
            if not self.scheduler.has_unfinished and not self.flight:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "requests are stuck"
        assert self.scheduler.stats.blocks_used == 0, "blocks are leaked"


def serve(loop: Loop, *prompts: Sequence[int], **overrides: Any) -> list[Request]:
    """Add the prompts together and run them to their ends."""
    first = loop.scheduler.stats.prefix_queries + len(loop.plans)
    requests = [make_request(f"{first}-{i}", prompt, **overrides) for i, prompt in enumerate(prompts)]
    for request in requests:
        loop.add(request)
    loop.finish()
    return requests
