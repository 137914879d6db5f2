"""A walk through the scheduler, every plan run on the device model, with an own account of what each request got."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(kw_only=True)
class Family:
    """The beams of one search."""

    width: int
    max_tokens: int
    beams: list[Request]
    made: int = 0

    @property
    def answered(self) -> bool:
        return all(beam.answer is not None for beam in self.beams)


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
        self.families: list[Family] = []
        self._draw = random.Random(0)

    @property
    def pool(self) -> int:
        return (self.shape["num_blocks"] - 1) * self.shape["block_size"]

    def add(
        self, prompt: list[int], asks: dict[str, Any], sibling: Request | None, *, lockstep: bool = False
    ) -> Request | None:
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
            lockstep=lockstep,
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

    def add_beams(self, prompt: list[int], asks: dict[str, Any], width: int) -> None:
        root = self.add(prompt, asks, None, lockstep=True)
        if root is not None:
            self.families.append(Family(width=width, max_tokens=root.max_tokens, beams=[root]))

    def choose(self) -> None:
        """Every search whose beams are all answered goes on with random ones, or ends at its last token."""
        draw = self._draw
        for family in [f for f in self.families if f.answered]:
            if len(family.beams[0].output_ids) + 1 == family.max_tokens or draw.random() < 0.05:
                self.end_family(family)
                continue
            parents = draw.choices(family.beams, k=draw.randint(1, family.width))
            chosen = {beam: parents.count(beam) for beam in family.beams}
            self.counts["dropped"] += list(chosen.values()).count(0)
            for beam in [b for b, children in chosen.items() if not children]:
                family.beams.remove(beam)
                self._end(beam, by_abort=False)
            for beam in tuple(family.beams):
                family.beams += [self._fork(beam, family, draw.randint(0, 1)) for _ in range(chosen[beam] - 1)]
                token = draw.randint(0, 1)
                self.scheduler.extend(beam, token)
                self.device.extend(beam, token)
                self._receive(beam, token)

    def end_family(self, family: Family) -> None:
        self.families.remove(family)
        for beam in family.beams:
            self._end(beam, by_abort=True)

    def _fork(self, parent: Request, family: Family, token: int) -> Request:
        fields = {name: getattr(parent, name) for name in ("prompt_ids", "params", "max_tokens", "seed", "eos_ids")}
        family.made += 1
        child = Request(
            **fields,
            request_id=f"{family.beams[0].request_id}+{family.made}.{self.made}",
            priority=parent.priority,
            cache_key=parent.cache_key,
            lockstep=True,
            output_ids=[*parent.output_ids, token],
        )
        self.made += 1
        self.scheduler.fork(parent, child)
        self.device.fork(parent, child)
        self.live.append(child)
        self.received[child] = list(child.output_ids)
        self.limits[child] = self.limits[parent]
        self.counts["forked"] += 1
        self.counts["forked_without_slot"] += child.slot is None
        return child

    def schedule(self, sample: Callable[[], int]) -> bool:
        """Make one plan and run it; False when there was nothing to plan."""
        must_run = {r for r in self.device.computed if self._decodes(r)}
        preemptions = self.scheduler.stats.preemptions
        plan = self.scheduler.schedule()
        self.counts["schedule"] += 1
        if plan is None:
            got_on = self.flight or self.scheduler.stats.preemptions > preemptions  # then the next round has a plan
            assert got_on or not self.live, "nothing planned, nothing in flight, and requests are left"
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
                if not request.lockstep:
                    self._receive(request, token)
        assert self.scheduler.absorb(result) == expected
        for request in expected:
            assert request.output_ids == self.received[request], "a token is missing, doubled or foreign"
            if request.readout is not None:
                wanted = range(request.readout.first, request.readout.stop)
                read = [
                    position
                    for reading in request.readings
                    for position in (() if reading.logprobs is None else reading.logprobs)
                ]
                assert read == list(wanted), "a position was not read, or twice, before the request got on"
            assert request.finished == (request not in self.live)
        self.counts["absorb"] += 1
        self.choose()

    def end(self, request: Request, by_abort: bool) -> None:
        """End a request, a beam with all its family."""
        family = next((f for f in self.families if request in f.beams), None)
        if family is None:
            self._end(request, by_abort)
        else:
            self.end_family(family)

    def _end(self, request: Request, by_abort: bool) -> None:
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
        for _ in range(20 + 4 * work * (8 + len(self.live))):
            if not self.live:
                break
            if len(self.flight) == DEPTH or (not self.schedule(sample) and self.flight):
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
