"""The engine: the only place where scheduler and runner meet. Front ends hold an Engine and never inherit from it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from jaxpaged.admission import Admission, Ticket
from jaxpaged.beam_groups import BeamSearches
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.build import Loaded, load, make_scheduler, open_tokenizer
from jaxpaged.config import EngineConfig
from jaxpaged.jump_ahead import forced_tokens
from jaxpaged.output_builder import RequestGroup, Sample
from jaxpaged.outputs import RequestOutput
from jaxpaged.plan import RowPlan, StepPlan
from jaxpaged.request import FinishReason, Readout
from jaxpaged.runner import InFlight
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.stats_log import StatsLog
from jaxpaged.weight_store import WeightStore

logger = logging.getLogger(__name__)


class Engine:
    """add() requests, step() until nothing is unfinished; each step returns what became known.

    Not thread-safe: one thread at a time calls it (check() apart).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        loaded: Loaded = load(config)
        self.limits = loaded.blueprint.limits
        self.model_config = loaded.checkpoint.config
        self.generation_config = loaded.checkpoint.generation_config
        self.tokenizer = open_tokenizer(config, loaded.checkpoint)
        self._start_seconds = {"load_s": loaded.load_seconds, "compile_s": loaded.compile_seconds}
        self._runner = loaded.runner
        self._scheduler = make_scheduler(config, self.limits)
        self._admission = Admission(
            self.model_config,
            self.tokenizer,
            check_length=self._scheduler.check_prompt,
            check_processor=self._runner.adjusted.check_processor,
            limits=self.limits,
            max_logprobs=config.max_logprobs,
            seed=config.seed,
        )
        self.weights = WeightStore(loaded.blueprint, self._runner, self._settle)
        self._depth = 2 if config.async_scheduling else 1  # steps in flight at once
        self._in_flight: deque[InFlight] = deque()
        self._beams = BeamSearches(self._scheduler, self.tokenizer)
        self._groups: dict[str, RequestGroup] = {}
        self._owners: dict[str, tuple[RequestGroup, Sample]] = {}  # by the id of a single sequence
        self._ready: list[RequestOutput] = []  # outputs that step() is going to return
        self._suspect: StepPlan | None = None  # the step that is being made or read; None: it is still being planned
        self._stats_log = None if config.disable_log_stats else StatsLog(time.monotonic)
        self._step_seconds = 0.0
        self._num_outputs = 0
        self._num_forced = 0
        self._num_failed_steps = 0

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, *, prompt: str | None = None) -> Ticket:
        """A ticket for submit(); prompt is the text that the output shows. From any thread; nothing is changed.

        Raises ValueError for a bad request or one that can never be served.
        """
        return self._admission.check(prompt_ids, params, prompt=prompt)

    def check_beams(self, prompt_ids: Sequence[int], params: BeamSearchParams, *, prompt: str | None = None) -> Ticket:
        """As check(), of a beam search. Its final output alone is given: the hypotheses, best first."""
        return self._admission.check_beams(prompt_ids, params, prompt=prompt)

    def check_readout(self, prompt_ids: Sequence[int], readout: Readout) -> Ticket:
        """A ticket for submit() of a request that generates nothing. Raises ValueError if it cannot be served."""
        return self._admission.check_readout(prompt_ids, readout)

    def add(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, prompt: str | None, priority: int
    ) -> None:
        """check() and submit() in one. Raises ValueError, queueing nothing, for a bad or unservable request."""
        self.submit(request_id, self.check(prompt_ids, params, prompt=prompt), priority=priority)

    def submit(self, request_id: str, ticket: Ticket, *, priority: int) -> None:
        """Queue a request of params.n samples. Raises ValueError, queueing nothing, for an id that is in use."""
        self.weights.check_awake()
        if request_id in self._groups or request_id in self._beams:
            raise ValueError(f"request id {request_id!r} is in use; wait for it to finish or take another")
        requests = self._admission.requests(request_id, ticket, priority=priority)
        if ticket.beams is not None:
            self._beams.submit(requests[0], ticket.prompt, ticket.beams)
            return
        group = RequestGroup(
            request_id, ticket.prompt, ticket.params, requests, self.tokenizer, self.config.stream_interval
        )
        for index, request in enumerate(requests):
            try:
                self._scheduler.add(request)
            except ValueError:  # a sample's id is that of another request
                for sibling in requests[:index]:
                    self._scheduler.finish(sibling, FinishReason.ABORT, None)
                raise
        self._groups[request_id] = group
        self._owners |= {sample.request.request_id: (group, sample) for sample in group.samples}

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; its blocks are free at once. None if there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return self._beams.abort(request_id)
        for sample in group.samples:
            self._scheduler.finish(sample.request, FinishReason.ABORT, None)
            self._advance(sample)
        return self._report(group)

    def step(self) -> list[RequestOutput]:
        """Dispatch one step and take in the oldest one's results, once enough are in flight.

        Returns the outputs of requests that got tokens, as their output_kind asks. An exception on the way ends the
        requests of the step that raised it with "error", and the engine goes on.
        """
        begun = time.perf_counter()
        try:
            self._step()
        except Exception as error:
            self._recover(error)
        except BaseException:  # a second Ctrl-C: the step may be torn in two, but it is nobody's fault
            self._restart()
            raise
        finally:
            self._step_seconds += time.perf_counter() - begun
            if self._stats_log is not None:
                self._stats_log.after_step(self.stats)
        ready, self._ready = self._ready, []
        return ready

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has anything left to do."""
        return self._scheduler.has_unfinished or bool(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._groups) + len(self._beams)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests run."""
        return self._scheduler.reset_prefix_cache()

    def _settle(self, what: str) -> None:
        """Nothing runs, nothing is in flight and nothing is cached; RuntimeError while requests are unfinished."""
        if self.num_unfinished:
            raise RuntimeError(f"{what}: {self.num_unfinished} requests are unfinished; wait for them or abort them")
        while self.has_unfinished:
            self.step()  # a step that ran ahead of a request's end
        self.reset_prefix_cache()

    def finish_warm_up(self) -> None:
        """Wait until every program is there; after a warm start they are still being read while requests run."""
        self._runner.programs.finish(lambda done, total: None)

    def close(self) -> None:
        """Stop reading programs in the background, which would hold up the end of the process."""
        self._runner.programs.close()

    def check_invariants(self) -> None:
        """Raise AssertionError when the scheduler's books do not add up."""
        self._scheduler.check()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since start.

        step_s is the time spent in step(); of it device_wait_s was waiting for the device and host_s the rest:
        scheduling, batch building, dispatch and text, part of which runs while the device is busy.
        """
        runner = self._runner.figures()
        own = {
            "failed_steps": self._num_failed_steps,
            "output_tokens": self._num_outputs + self._num_forced,
            "forced_tokens": self._num_forced,
            "step_s": self._step_seconds,
            "host_s": self._step_seconds - runner["device_wait_s"],
        }
        return asdict(self._scheduler.stats) | runner | own | self._start_seconds

    def _step(self) -> None:
        self._suspect = None
        plan = self._scheduler.schedule()
        self._suspect = plan
        if plan is not None and plan.awaits_tokens:
            # Late sampling: the device is busy with the backbone while the host learns what the rows may sample.
            begun = self._runner.begin(plan)
            while self._in_flight:
                self._absorb(self._in_flight.popleft())
            self._suspect = plan
            self._jump_ahead(begun.rows)
            self._in_flight.append(self._runner.draw(begun))
        elif plan is not None:
            self._in_flight.append(self._runner.dispatch(plan))
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._absorb(self._in_flight.popleft())

    def _jump_ahead(self, rows: Sequence[RowPlan]) -> None:
        """Give rows the runs of tokens that their structures force; what they sample in this step is dropped."""
        touched: dict[str, RequestGroup] = {}
        for request in (row.request for row in rows if row.request.jumps_ahead and not row.request.finished):
            group, sample = self._owners[request.request_id]
            try:
                tokens = forced_tokens(request)
            except Exception as error:
                self._fail(sample, error)
                touched[group.request_id] = group
                continue
            for token in tokens:
                if not request.finished:
                    self._scheduler.force(request, token)
                    self._num_forced += 1
                    self._advance(sample)
                    touched[group.request_id] = group
        self._make_ready(touched.values())

    def _absorb(self, flight: InFlight) -> None:
        """Take in a step's results: the outputs of requests that got a token or ended become ready."""
        self._suspect = flight.plan
        updated = self._scheduler.absorb(self._runner.collect(flight))
        self._num_outputs += sum(request.generates for request in updated)
        touched: dict[str, RequestGroup] = {}
        for request in (request for request in updated if not request.lockstep):
            group, sample = self._owners[request.request_id]
            self._advance(sample)
            touched[group.request_id] = group
        self._make_ready(touched.values())
        self._ready += self._beams.deliver(updated)

    def _make_ready(self, groups: Iterable[RequestGroup]) -> None:
        self._ready += [output for group in groups if (output := self._report(group)) is not None]

    def _advance(self, sample: Sample) -> None:
        """Make text of a sample's new tokens, and end it at a stop string; what goes wrong there is its own affair."""
        request = sample.request
        try:
            match = sample.advance()
        except Exception as error:
            logger.exception("request %s: its tokens could not be made text", request.request_id)
            self._fail(sample, error)
            return
        if match is not None:
            self._scheduler.finish(request, FinishReason.STOP, match.stop)
            sample.stop_at(match)

    def _fail(self, sample: Sample, error: Exception) -> None:
        """End one sample with "error"; also one that has just ended otherwise."""
        self._scheduler.finish(sample.request, FinishReason.ERROR, None)
        sample.fail(error)

    def _report(self, group: RequestGroup) -> RequestOutput | None:
        """The group's output, if its output_kind wants one now; a finished group is forgotten."""
        try:
            output = group.output()
        except Exception as error:
            logger.exception("request %s: its output could not be made", group.request_id)
            for sample in group.samples:
                self._fail(sample, error)
                sample.drop_text()
            output = group.output()
        if group.finished:
            del self._groups[group.request_id]
            for sample in group.samples:
                del self._owners[sample.request.request_id]
        return output

    def _recover(self, error: Exception) -> None:
        """After a step that raised: its requests end, all others are computed again from the tokens they have."""
        suspects = None if self._suspect is None else {row.request.request_id for row in self._suspect.rows}
        logger.exception("a step failed: %s", "every request ends" if suspects is None else "its requests end")
        self._num_failed_steps += 1
        self._restart()
        touched: dict[str, RequestGroup] = {}
        for group, sample in self._owners.values():
            blamed = suspects is None or sample.request.request_id in suspects
            if blamed and not sample.request.finished:
                self._fail(sample, error)
                touched[group.request_id] = group
        self._make_ready(touched.values())
        self._ready += self._beams.fail(suspects, error)

    def _restart(self) -> None:
        """Forget the steps in flight; nothing of the cache is used again, and a cache that is lost is given up."""
        self._in_flight.clear()
        self._scheduler.restart()
        if not self._runner.intact:
            self._runner.drop_cache()
