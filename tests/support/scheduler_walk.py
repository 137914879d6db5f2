"""A walk through the scheduler, every plan run on the device model, with an own account of what each request got."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxpaged.plan import StepPlan, StepResult
from jaxpaged.request import FinishReason, Readout, Request, Status
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler
from tests.support.device_model import DeviceModel

EOS = 7
STOP = 5
DEPTH = 2  # plans in flight


def sampler(seed: int) -> Callable[[], int]:
    """Random tokens, now and then one that ends a request."""
    draw = random.Random(seed)
    return lambda: draw.choices([0, 1, EOS, STOP], [10, 10, 1, 1])[0]


def readout_of(kind: str | None, num_prompt: int) -> Readout | None:
    """What a request of this kind reads off a prompt."""
    if kind == "embed" or (kind == "score" and num_prompt == 1):
        return Readout(first=0, stop=num_prompt, scores=False)
    if kind == "score":
        return Readout(first=(num_prompt - 1) // 2, stop=num_prompt - 1, scores=True)
    return Readout(first=0, stop=num_prompt - 1, scores=True) if kind == "prompt" and num_prompt > 1 else None


class Walk:
    """The scheduler, the device and an own account of what every request must have received."""

    def __init__(self, shape: dict[str, Any], counts: Counter) -> None:
        self.shape = shape
        self.counts = counts
        self.scheduler = Scheduler(**shape)
        self.device = DeviceModel(
            num_blocks=shape["num_blocks"],
            block_size=shape["block_size"],
            max_num_seqs=shape["max_num_seqs"],
            budget=shape["max_num_batched_tokens"],
        )
        self.flight: deque[tuple[StepPlan, np.ndarray, StepResult]] = deque()
        self.live: list[Request] = []
        self.received: dict[Request, list[int]] = {}
        self.limits: dict[Request, int] = {}
        self.made = 0

    @property
    def pool(self) -> int:
        return (self.shape["num_blocks"] - 1) * self.shape["block_size"]

    def add(self, prompt: list[int], asks: dict[str, Any], sibling: Request | None) -> Request | None:
        params = SamplingParams(
            max_tokens=asks["max_tokens"], min_tokens=min(asks["min_tokens"], asks["max_tokens"]), stop_token_ids=[STOP]
        )
        request = Request(
            request_id=f"r{self.made}",
            prompt_ids=tuple(prompt),
            params=params,
            eos_ids=frozenset({EOS}),
            stop_ids=frozenset({STOP}),
            max_tokens=asks["max_tokens"],
            seed=0,
            priority=asks["priority"],
            cache_key=asks["cache_key"],
            sibling=sibling,
            readout=readout_of(asks["reads"], len(prompt)) if sibling is None else None,
            generates=asks["reads"] in (None, "prompt"),
        )
        self.made += 1
        longest = self.shape["max_model_len"]
        if len(prompt) >= longest + (not request.generates) or len(prompt) > self.pool:
            waiting = self.scheduler.num_waiting
            with pytest.raises(ValueError, match="prompt"):
                self.scheduler.add(request)
            assert self.scheduler.num_waiting == waiting
            return None
        self.scheduler.add(request)
        self.device.add(request)
        self.live.append(request)
        self.received[request] = []
        most = min(asks["max_tokens"], longest - len(prompt), self.pool + 1 - len(prompt))
        self.limits[request] = most if request.generates else 0
        return request

    def schedule(self, sample: Callable[[], int]) -> bool:
        """Make one plan and run it; False when there was nothing to plan."""
        must_run = {r for r in self.device.computed if self._decodes(r)}
        plan = self.scheduler.schedule()
        self.counts["schedule"] += 1
        if plan is None:
            assert self.flight or not self.live, "nothing planned, nothing in flight, and requests are left"
            self._forget_preempted()
            return False
        self.counts["preempted"] += len(plan.preempted)
        self.counts["copies"] += len(plan.copies)
        self.counts["on_device"] += sum(row.token_on_device for row in plan.rows)
        gone = set(plan.preempted)
        rows = {row.request for row in plan.rows}
        assert all(r in rows or r.request_id in gone for r in must_run), "a decoding request got no token"
        self.flight.append((plan, plan.block_tables.copy(), self.device.run(plan, lambda _: sample())))
        assert self.scheduler.stats.blocks_used == self.device.num_held, "a block is leaked"
        for request in rows:
            outputs = len(self.device.sequences[request].tokens) - request.num_prompt
            assert outputs <= self.limits[request], "planned beyond the request's last token"
        return True

    def absorb(self) -> None:
        """Hand the oldest plan's tokens to the scheduler and compare with the own account."""
        plan, tables, result = self.flight.popleft()
        assert (plan.block_tables == tables).all(), "a plan in flight was changed"
        expected: list[Request] = []
        for row in plan.reading_rows:
            readout = row.request.readout
            assert readout is not None
            if row.request in self.live and row.read.stop == readout.stop and not row.request.generates:
                expected.append(row.request)
                self._drop(row.request)
        sampling = [row.request for row in plan.rows if row.samples]
        for request, token in zip(sampling, result.token_ids.tolist(), strict=True):
            if request in self.live:
                expected.append(request)
                self._receive(request, token)
        assert self.scheduler.absorb(result) == expected
        for request in expected:
            assert request.output_ids == self.received[request], "a token is missing, doubled or foreign"
            if request.readout is not None:
                wanted = range(request.readout.first, request.readout.stop)
                read = [position for reading in request.readings for position in reading.logprobs]
                assert read == list(wanted), "a position was not read, or twice, before the request got on"
            assert request.finished == (request not in self.live)
        self.counts["absorb"] += 1

    def end(self, request: Request, by_abort: bool) -> None:
        if by_abort:
            assert self.scheduler.abort(request.request_id) is request
        else:
            self.scheduler.finish(request, FinishReason.STOP, "text")
        self._drop(request)
        self.counts["ended"] += 1

    def restart(self) -> None:
        """The device loses its cache and the steps in flight; requests keep the tokens that the host has read."""
        self.flight.clear()
        self.device.lose_everything(self.received)
        self.scheduler.restart()
        self.counts["restarted"] += len(self.live)

    def drain(self, sample: Callable[[], int]) -> None:
        """Everything still queued ends within a bounded number of steps, and all blocks come back."""
        work = sum(self.limits[r] + 2 * r.num_prompt for r in self.live)
        for _ in range(20 + 4 * work * (1 + len(self.live))):
            if not self.live:
                break
            if not self.schedule(sample) or len(self.flight) == DEPTH:
                self.absorb()
        assert not self.live, "requests are stuck"
        while self.flight:
            self.absorb()
        self.check()
        assert not self.scheduler.has_unfinished
        assert self.scheduler.stats.blocks_used == 0, "blocks are leaked"

    def check(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert {r for r in self.live if r.status == Status.RUNNING} == set(self.device.computed)

    def _decodes(self, request: Request) -> bool:
        tokens = len(self.device.sequences[request].tokens)
        one_left = self.device.computed[request] == tokens - 1
        return one_left and tokens - request.num_prompt < self.limits[request]

    def _forget_preempted(self) -> None:
        """A round that only preempted has no plan; the requests hold no blocks all the same."""
        for request in [r for r in self.device.computed if r.status == Status.PREEMPTED]:
            self.device.leave(request)
            self.counts["preempted"] += 1

    def _receive(self, request: Request, token: int) -> None:
        outputs = self.received[request]
        outputs.append(token)
        if (len(outputs) > request.params.min_tokens and token in (EOS, STOP)) or len(outputs) == self.limits[request]:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self.live.remove(request)
        self.device.leave(request)
