"""The device side of an engine: parameters, the donated cache and one compiled program per bucket."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.adjusted_rows import AdjustedRows
from jaxpaged.batch import build
from jaxpaged.cache import KVCache, zero_cache
from jaxpaged.models.config import ModelConfig
from jaxpaged.plan import RowPlan, StepPlan, StepResult, TokenLogprobs
from jaxpaged.programs import ModelCode, Programs
from jaxpaged.reading import collect_readings, scoring_input
from jaxpaged.recipes import BANNED_WIDTH, COPY, SCORE, Recipes, RunnerSpec, SamplerKey, choose_sampler
from jaxpaged.sampling import SampleOutput, SamplingInput, build_sampling_input
from jaxpaged.scoring import ReadOutput
from jaxpaged.sharding.rules import replicated

NOT_FINITE = "the model's logits were not finite"


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A step whose sampler is still to be dispatched: its plan, the rows it samples and their hidden states."""

    plan: StepPlan
    rows: tuple[RowPlan, ...]
    hidden: jax.Array
    read: ReadOutput | None  # of the plan's reading_rows


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A dispatched step: its plan, the rows it samples and the device's answers to come."""

    plan: StepPlan
    rows: tuple[RowPlan, ...]
    output: SampleOutput | None
    failed: dict[int, str]  # sampled rows whose constraint raised, and what
    read: ReadOutput | None  # of the plan's reading_rows


class ModelRunner:
    """Runs plans. Dispatching returns at once; collecting waits. Owner of the parameters and of the cache."""

    def __init__(self, model: ModelConfig, code: ModelCode, spec: RunnerSpec, mesh: Mesh, abstract_params: tuple):
        self._model, self._spec = model, spec
        self._whole = replicated(mesh)
        self._buckets = spec.buckets
        self._samplers = spec.samplers
        recipes = Recipes(model, code, spec, mesh, abstract_params)
        self._cache_sharding = recipes.cache_sharding
        self.programs = Programs(recipes.all())
        self.adjusted = AdjustedRows(
            recipes,
            self.programs,
            vocab_size=model.vocab_size,
            num_slots=spec.batch.max_num_seqs,
            whole=self._whole,
            takes_processors=not spec.batch_invariant,
        )
        self._params: tuple[jax.Array, ...] = ()
        self._cache: KVCache = ()
        self._last_tokens = jnp.zeros(0, jnp.int32)
        self.device_wait_seconds = 0.0  # the host waited for results
        self.num_steps = 0
        self.num_tokens = 0  # computed, padding not counted
        self.num_padded_tokens = 0  # computed, padding counted

    def load(self, params: tuple[jax.Array, ...]) -> None:
        """Take the parameters and make the empty cache."""
        self._params = params
        self._make_cache()

    @property
    def intact(self) -> bool:
        """Whether what steps pass on to each other can be read; waits for the steps in flight.

        A program that fails takes what was donated to it along, and a step that fails on the device leaves its error
        in place of its results and of all that is computed from them.
        """
        arrays = jax.tree.leaves((self._cache, self._last_tokens, self.adjusted.state))
        if not arrays or any(array.is_deleted() for array in arrays):
            return False
        try:
            jax.block_until_ready(arrays)
        except Exception:  # whatever a backend raises for a failed computation
            return False
        return True

    def figures(self) -> dict[str, Any]:
        """Its part of the engine's stats()."""
        return {
            "steps": self.num_steps,
            "computed_tokens": self.num_tokens,
            "padded_tokens": self.num_padded_tokens,
            "device_wait_s": self.device_wait_seconds,
            "programs": len(self.programs.keys),
            "programs_ready": self.programs.num_ready,
            "late_compilations": self.programs.late_compilations,
        }

    @property
    def params(self) -> tuple[jax.Array, ...]:
        """The parameters, in the order of the flattened state."""
        return self._params

    def replace_params(self, params: tuple[jax.Array, ...]) -> None:
        """Take other parameters for the steps to come, or none; nothing computed before fits them."""
        self._params = params

    def make_cache(self) -> None:
        """Take the cache's memory now; done by the next step otherwise."""
        if not self._cache:
            self._make_cache()

    def drop_cache(self) -> None:
        """Free the cache's memory; the next step makes an empty one. Nothing computed before may be used again."""
        self._cache = ()
        self.adjusted.drop()

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step on the device. Plans must come in order: each reads what its predecessors wrote."""
        return self.draw(self.begin(plan))

    def begin(self, plan: StepPlan) -> Begun:
        """Start a step up to its hidden states; draw() is to follow before the next step begins."""
        self.make_cache()
        if plan.copies:
            self._copy_blocks(plan)
        size = self._buckets.for_tokens(plan.num_tokens)
        step = build(plan, size, self._spec.batch)
        self._cache, hidden = self.programs[size](self._params, self._cache, self._last_tokens, step)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_padded_tokens += size
        return Begun(
            plan=plan,
            rows=tuple(row for row in plan.rows if row.samples),
            hidden=hidden,
            read=self._read(plan, hidden) if plan.reading_rows else None,
        )

    def draw(self, begun: Begun) -> InFlight:
        """Start the sampling of a step that has begun. Constraints must have accepted all earlier tokens."""
        failed: dict[int, str] = {}
        output = self._sample(begun.rows, begun.hidden, failed) if begun.rows else None
        self.programs.read_ahead()
        return InFlight(plan=begun.plan, rows=begun.rows, output=output, failed=failed, read=begun.read)

    def collect(self, flight: InFlight) -> StepResult:
        """Wait for a step's samples."""
        begun = time.perf_counter()
        readings = collect_readings(flight.plan, flight.read) if flight.read is not None else ()
        host = jax.device_get(flight.output)
        self.device_wait_seconds += time.perf_counter() - begun
        if host is None:
            return StepResult(step=flight.plan.step, token_ids=np.zeros(0, np.int32), logprobs=(), readings=readings)
        count = len(flight.rows)
        logprobs = tuple(_row_logprobs(row, host, i) for i, row in enumerate(flight.rows))
        failed = dict.fromkeys(np.flatnonzero(host.bad[:count]).tolist(), NOT_FINITE) | flight.failed
        return StepResult(
            step=flight.plan.step, token_ids=host.token[:count], failed=failed, logprobs=logprobs, readings=readings
        )

    def _read(self, plan: StepPlan, hidden: jax.Array) -> ReadOutput:
        """What the plan reads off prompts."""
        asked = scoring_input(plan, self._spec.batch.max_num_read)
        return self.programs[SCORE](self._params, hidden, *asked)

    def _make_cache(self) -> None:
        spec = self._spec
        self._cache = zero_cache(
            self._model, spec.num_blocks, spec.batch.block_size, spec.cache_dtype, self._cache_sharding
        )
        self._last_tokens = jax.device_put(np.zeros(spec.batch.max_num_seqs + 1, np.int32), self._whole)

    def _copy_blocks(self, plan: StepPlan) -> None:
        width = self._spec.batch.max_num_seqs
        for start in range(0, len(plan.copies), width):
            part = plan.copies[start : start + width]
            copies = np.zeros((width, 2), np.int32)  # a new one each time: the device may still read the last
            copies[: len(part)] = part
            self._cache = self.programs[COPY](self._cache, copies)

    def _sample(self, rows: tuple[RowPlan, ...], hidden: jax.Array, failed: dict[int, str]) -> SampleOutput:
        spec, vocab_size = self._spec, self._model.vocab_size
        asked = [
            (r.request.params, r.request.seed, r.kv_len, tuple(r.request.banned_at(r.kv_len - r.request.num_prompt)))
            for r in rows
        ]
        adjusts = any(row.request.adjusts for row in rows) or max(len(banned) for *_, banned in asked) > BANNED_WIDTH
        key = choose_sampler(
            self._samplers,
            count=len(rows),
            greedy=all(row.request.params.greedy for row in rows),
            logprobs=any(row.request.params.wants_logprobs for row in rows),
            adjusts=adjusts,
        )
        narrow = [(who, seed, at, ids if len(ids) <= BANNED_WIDTH else ()) for who, seed, at, ids in asked]
        inputs = build_sampling_input(narrow, key.size, vocab_size=vocab_size, banned_width=BANNED_WIDTH)
        slots = np.full(key.size, spec.batch.max_num_seqs, np.int32)
        slots[: len(rows)] = [row.slot for row in rows]
        if key.adjusts:
            return self._sample_adjusted(key, rows, (self._params, hidden, self._last_tokens, slots), inputs, failed)
        output, self._last_tokens = self.programs[key](self._params, hidden, self._last_tokens, slots, inputs)
        return output

    def _sample_adjusted(
        self,
        key: SamplerKey,
        rows: tuple[RowPlan, ...],
        arguments: tuple[Any, ...],
        inputs: SamplingInput,
        failed: dict[int, str],
    ) -> SampleOutput:
        adjusted = self.adjusted
        key = adjusted.with_processors(key, rows)
        more = adjusted.prepare(key, rows, failed)
        inputs = replace(inputs, adjustments=more.adjustments)
        output, self._last_tokens, adjusted.histories = self.programs[key](
            *arguments, inputs, adjusted.histories, more.known, more.previous
        )
        return output


def _row_logprobs(row: RowPlan, host: SampleOutput, i: int) -> TokenLogprobs | None:
    """What row i's request asked for of the step's log-probabilities."""
    params = row.request.params
    if not params.wants_logprobs:
        return None
    assert host.logprob is not None and host.rank is not None
    assert host.top_ids is not None and host.top_logprobs is not None
    named = params.logprob_token_ids
    if named is None:
        count = (
            None if params.logprobs == -1 else params.logprobs
        )  # None: the whole vocabulary, which top_ids then hold
        ids, values = host.top_ids[i, :count], host.top_logprobs[i, :count]
    else:
        assert host.scored is not None
        ids, values = np.array(named, np.int32), host.scored[i, : len(named)]
    return TokenLogprobs(
        top_ids=np.asarray(ids),
        top_logprobs=np.asarray(values),
        ranked=named is None,
        sampled_logprob=float(host.logprob[i]),
        sampled_rank=int(host.rank[i]),
    )
