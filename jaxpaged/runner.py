"""The device side of an engine: parameters, the donated cache and one compiled program per bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.batch import BatchShape, Buckets, build, example
from jaxpaged.cache import KVCache, zero_cache
from jaxpaged.models.config import ModelConfig
from jaxpaged.plan import RowPlan, StepPlan, StepResult, TokenLogprobs
from jaxpaged.programs import ModelCode, Programs, Recipe, copy_program, forward_program, sample_program
from jaxpaged.sampling import SampleOutput, SamplerMode, build_sampling_input
from jaxpaged.sharding.rules import CACHE_AXES, TENSOR_PARALLEL, replicated, sharding_of

# Ids a row may ban before min_tokens: the usual width, and the widest one served.
BANNED_WIDTHS = (8, 128)


@dataclass(frozen=True, kw_only=True)
class RunnerSpec:
    """Sizes that shape the compiled programs."""

    num_blocks: int  # the trash block included
    max_num_batched_tokens: int
    max_logprobs: int
    cache_dtype: Any
    batch: BatchShape  # block size, max_num_seqs (M), table width (P), tiles


@dataclass(frozen=True, kw_only=True)
class SamplerKey:
    """Which sampler program a step needs."""

    size: int  # S
    greedy: bool
    logprobs: bool
    banned_width: int


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A dispatched step: its plan, the rows it samples and the device's answer to come."""

    plan: StepPlan
    rows: tuple[RowPlan, ...]
    output: SampleOutput | None


class ModelRunner:
    """Runs plans. Dispatching returns at once; collecting waits. Owner of the parameters and of the cache."""

    def __init__(self, model: ModelConfig, code: ModelCode, spec: RunnerSpec, mesh: Mesh, abstract_params: tuple):
        self._model, self._code, self._spec, self._mesh = model, code, spec, mesh
        self._whole = replicated(mesh)
        self._buckets = Buckets.create(spec.max_num_batched_tokens, spec.batch.max_num_seqs)
        heads = (spec.num_blocks, model.num_kv_heads, spec.batch.block_size, model.head_dim)
        self._cache_sharding = sharding_of(CACHE_AXES, heads, TENSOR_PARALLEL, mesh)
        self._sample_rows_per_pass = 2 if mesh.devices.flat[0].platform == "cpu" else spec.batch.max_num_seqs
        self.programs = Programs(self._recipes(abstract_params), threads=os.cpu_count() or 1)
        self._params: tuple[jax.Array, ...] = ()
        self._cache: KVCache = ()
        self._last_tokens = jnp.zeros(0, jnp.int32)
        self.device_wait_seconds = 0.0  # the host waited for results
        self.num_steps = 0
        self.num_tokens = 0  # computed, padding not counted
        self.num_padded_tokens = 0  # computed, padding counted

    def load(self, params: tuple[jax.Array, ...]) -> None:
        """Take the parameters and make the empty cache."""
        spec = self._spec
        self._params = params
        self._cache = zero_cache(
            self._model, spec.num_blocks, spec.batch.block_size, spec.cache_dtype, self._cache_sharding
        )
        self._last_tokens = jax.device_put(np.zeros(spec.batch.max_num_seqs + 1, np.int32), self._whole)

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step on the device. Plans must come in order: each reads what its predecessors wrote."""
        if plan.copies:
            self._copy_blocks(plan)
        size = self._buckets.for_tokens(plan.num_tokens)
        step = build(plan, size, self._spec.batch)
        self._cache, hidden = self.programs[size](self._params, self._cache, self._last_tokens, step)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_padded_tokens += size
        rows = tuple(row for row in plan.rows if row.samples)
        return InFlight(plan=plan, rows=rows, output=self._sample(rows, hidden) if rows else None)

    def collect(self, flight: InFlight) -> StepResult:
        """Wait for a step's samples."""
        out = flight.output
        if out is None:
            return StepResult(step=flight.plan.step, token_ids=np.zeros(0, np.int32), logprobs=())
        begun = time.perf_counter()
        host = jax.device_get(out)
        self.device_wait_seconds += time.perf_counter() - begun
        count = len(flight.rows)
        logprobs = tuple(_row_logprobs(row, host, i) for i, row in enumerate(flight.rows))
        failed = frozenset(np.flatnonzero(host.bad[:count]).tolist())
        return StepResult(step=flight.plan.step, token_ids=host.token[:count], failed=failed, logprobs=logprobs)

    def _copy_blocks(self, plan: StepPlan) -> None:
        copies = np.zeros((self._spec.batch.max_num_seqs, 2), np.int32)
        for start in range(0, len(plan.copies), len(copies)):
            part = plan.copies[start : start + len(copies)]
            copies[:] = 0
            copies[: len(part)] = part
            self._cache = self.programs["copy"](self._cache, copies.copy())

    def _sample(self, rows: tuple[RowPlan, ...], hidden: jax.Array) -> SampleOutput:
        spec, vocab_size = self._spec, self._model.vocab_size
        size = self._buckets.for_samples(len(rows))
        asked = [
            (r.request.params, r.request.seed, r.kv_len, r.request.banned_at(r.kv_len - r.request.num_prompt))
            for r in rows
        ]
        key = self._sampler_key(size, rows, max(len(banned) for *_, banned in asked))
        size = key.size
        inputs = build_sampling_input(
            [(params, seed, position, tuple(banned)) for params, seed, position, banned in asked],
            size,
            vocab_size=vocab_size,
            banned_width=key.banned_width,
        )
        slots = np.full(size, spec.batch.max_num_seqs, np.int32)
        slots[: len(rows)] = [row.slot for row in rows]
        output, self._last_tokens = self.programs[key](self._params, hidden, self._last_tokens, slots, inputs)
        return output

    def _sampler_key(self, size: int, rows: tuple[RowPlan, ...], num_banned: int) -> SamplerKey:
        """The cheapest compiled program that serves these rows."""
        greedy = all(row.request.params.greedy for row in rows)
        logprobs = any(row.request.params.logprobs is not None for row in rows)
        if num_banned > BANNED_WIDTHS[0]:  # rare: one program of the largest size that can do everything
            size, greedy, logprobs = self._buckets.samples[-1], False, True
        width = next(width for width in BANNED_WIDTHS if width >= num_banned)
        return SamplerKey(size=size, greedy=greedy and not logprobs, logprobs=logprobs, banned_width=width)

    def _recipes(self, params: tuple) -> Mapping[Any, Recipe]:
        """All programs, backbones first (they take longest), the largest of them at the head."""
        cache = self._abstract_cache()
        recipes: dict[Any, Recipe] = {}
        last_tokens = self._abstract((self._spec.batch.max_num_seqs + 1,), jnp.int32)
        hidden = self._abstract((self._spec.batch.max_num_seqs, self._model.hidden_size), params[0].dtype)
        cache_out = jax.tree.map(lambda _: self._cache_sharding, cache)
        for size in reversed(self._buckets.tokens):
            step = jax.tree.map(lambda a: self._abstract(a.shape, a.dtype), example(size, self._spec.batch))
            recipes[size] = Recipe(
                function=forward_program(self._code),
                arguments=(params, cache, last_tokens, step),
                donate=(1,),
                out_shardings=(cache_out, self._whole),
            )
        for key in self._sampler_keys():
            recipes[key] = self._sampler_recipe(key, params, hidden, last_tokens)
        copies = self._abstract((self._spec.batch.max_num_seqs, 2), jnp.int32)
        recipes["copy"] = Recipe(
            function=copy_program(), arguments=(cache, copies), donate=(0,), out_shardings=cache_out
        )
        return recipes

    def _sampler_keys(self) -> list[SamplerKey]:
        narrow, wide = BANNED_WIDTHS
        keys = [
            SamplerKey(size=size, greedy=greedy, logprobs=logprobs, banned_width=narrow)
            for size in self._buckets.samples
            for greedy, logprobs in ((True, False), (False, False), (False, True))
        ]
        return [*keys, SamplerKey(size=self._buckets.samples[-1], greedy=False, logprobs=True, banned_width=wide)]

    def _sampler_recipe(self, key: SamplerKey, params: tuple, hidden: Any, last_tokens: Any) -> Recipe:
        mode = SamplerMode(
            greedy=key.greedy,
            max_logprobs=self._spec.max_logprobs if key.logprobs else None,
            rows_per_pass=self._sample_rows_per_pass,
        )
        inputs = build_sampling_input([], key.size, vocab_size=self._model.vocab_size, banned_width=key.banned_width)
        inputs = jax.tree.map(lambda a: self._abstract(a.shape, a.dtype), inputs)
        slots = self._abstract((key.size,), jnp.int32)
        return Recipe(
            function=sample_program(self._code, mode, self._whole),
            arguments=(params, hidden, last_tokens, slots, inputs),
            donate=(),
            out_shardings=self._whole,
        )

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _abstract_cache(self) -> Any:
        spec, model = self._spec, self._model
        shape = (spec.num_blocks, model.num_kv_heads, spec.batch.block_size, model.head_dim)
        layer = jax.ShapeDtypeStruct(shape, spec.cache_dtype, sharding=self._cache_sharding)
        return tuple((layer, layer) for _ in range(model.num_layers))


def _row_logprobs(row: RowPlan, host: SampleOutput, i: int) -> TokenLogprobs | None:
    """What row i's request asked for of the step's log-probabilities."""
    wanted = row.request.params.logprobs
    if wanted is None:
        return None
    assert host.logprob is not None and host.rank is not None
    assert host.top_ids is not None and host.top_logprobs is not None
    return TokenLogprobs(
        top_ids=np.asarray(host.top_ids[i, :wanted]),
        top_logprobs=np.asarray(host.top_logprobs[i, :wanted]),
        sampled_logprob=float(host.logprob[i]),
        sampled_rank=int(host.rank[i]),
    )
