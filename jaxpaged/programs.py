"""The engine's compiled programs: what each computes, its abstract arguments, and compiling them all in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxpaged.batch import StepInput
from jaxpaged.models.forward import Backends, CausalLM
from jaxpaged.pallas_kernels import copy_blocks
from jaxpaged.sampling import SampleOutput, SamplerMode, SamplingInput, sample
from jaxpaged.sampling_adjust import RowState, count_tokens
from jaxpaged.scoring import ReadOutput, ScoringMode, score
from jaxpaged.warm_start import watch_cache

STACK_BYTES = 64 << 20  # XLA's passes recurse deeply on unrolled models


@dataclass(frozen=True, kw_only=True)
class ModelCode:
    """A model without its weights: the NNX graph, the parameters' tree and the implementations of its ops."""

    graphdef: Any
    params_tree: Any
    backends: Backends

    def module(self, params: tuple[jax.Array, ...]) -> CausalLM:
        """The module with these parameters. Called while tracing only."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.params_tree, params))


def forward_program(code: ModelCode) -> Callable[..., Any]:
    """(params, cache, last_tokens[M + 1], StepInput) → (cache, hidden states [M + Q, D] at step.sample_at)."""

    def forward(params, cache, last_tokens, step: StepInput):
        tokens = jnp.where(step.from_device, last_tokens[step.table_rows], step.inputs.tokens)
        inputs = replace(step.inputs, tokens=tokens)
        hidden, cache = code.module(params).backbone(inputs, cache, code.backends)
        return cache, hidden.at[step.sample_at].get(mode="promise_in_bounds")

    return forward


def sample_program(code: ModelCode, mode: SamplerMode, whole: NamedSharding) -> Callable[..., Any]:
    """(params, hidden [M + Q, D], last_tokens[M + 1], slots[S], SamplingInput of S) → (SampleOutput, last_tokens).

    Row i of the S sampled rows is hidden[i]; its token is left in last_tokens[slots[i]]. Padding rows have slot M.
    """

    def sample_rows(params, hidden, last_tokens, slots, inputs: SamplingInput) -> tuple[SampleOutput, jax.Array]:
        out = sample(_logits(code, params, hidden, slots, whole), inputs, mode, None)
        return out, last_tokens.at[slots].set(out.token, mode="promise_in_bounds")

    return sample_rows


def adjusting_program(code: ModelCode, mode: SamplerMode, whole: NamedSharding) -> Callable[..., Any]:
    """As sample_program, for rows with adjustments; takes histories [M + 1, V] besides and gives them back counted.

    previous[S] are the newest tokens the host knows, used where known[S] and by processors alone.
    """

    def sample_rows(params, hidden, last_tokens, slots, inputs: SamplingInput, histories, known, previous):
        state = RowState(
            histories=histories,
            slots=slots,
            last_tokens=jnp.where(known, previous, last_tokens[slots]),
            positions=jnp.asarray(inputs.position),
        )
        out = sample(_logits(code, params, hidden, slots, whole), inputs, mode, state)
        last_tokens = last_tokens.at[slots].set(out.token, mode="promise_in_bounds")
        return out, last_tokens, count_tokens(histories, slots, jnp.asarray(out.token))

    return sample_rows


def history_program() -> Callable[..., Any]:
    """(histories [M + 1, V], slot, row [V]) → the histories with that row."""

    def begin_history(histories, slot, row):
        return histories.at[slot].set(row, mode="promise_in_bounds")

    return begin_history


def score_program(code: ModelCode, mode: ScoringMode, whole: NamedSharding) -> Callable[..., Any]:
    """(params, hidden [M + Q, D], targets int32[Q], count int32, with_top bool) → ReadOutput of hidden's last Q rows.

    The first `count` rows are scored: how probable targets[i] is after row i.
    """

    def score_rows(params, hidden, targets, count, with_top) -> ReadOutput:
        model = code.module(params)
        states = hidden[hidden.shape[0] - targets.shape[0] :]

        def logits(rows: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(model.logits(rows, code.backends), whole)

        scores = score(logits, states, targets, count, with_top, mode)
        return ReadOutput(scores=scores, states=model.final_states(states).astype(jnp.float32))

    return score_rows


def _logits(
    code: ModelCode, params: tuple[jax.Array, ...], hidden: jax.Array, slots: jax.Array, whole: NamedSharding
) -> jax.Array:
    logits = code.module(params).logits(hidden[: slots.shape[0]], code.backends)
    return jax.lax.with_sharding_constraint(logits, whole)


def copy_program() -> Callable[..., Any]:
    """(cache, copies [C, 2]) → the cache with those blocks copied, in every layer."""

    def copy(cache, copies):
        return jax.tree.map(lambda layer: copy_blocks(layer, copies), cache)

    return copy


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one program is compiled: the function, its abstract arguments and which of them are donated."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]
    out_shardings: Any

    def compile(self) -> jax.stages.Compiled:
        """Lower and compile; seconds to tens of seconds for a backbone, or a read from the persistent cache."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out_shardings)
        return jitted.lower(*self.arguments).compile()


class Programs:
    """Compiled programs by key. Owned by the runner; compiling is the only thing threads do here."""

    def __init__(self, recipes: Mapping[Any, Recipe]) -> None:
        self._recipes = dict(recipes)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._futures: dict[Any, Future[jax.stages.Compiled]] = {}
        self._on_disk = self._reading = False
        self._late: list[Any] = []  # keys of what was compiled at its first use, or was lost from the disk

    def add(self, key: Any, recipe: Recipe) -> None:
        """One more program, compiled at its first use."""
        self._recipes[key] = recipe

    def drop(self, key: Any) -> None:
        """Forget a program."""
        self._recipes.pop(key, None)
        self._compiled.pop(key, None)

    def start(self, threads: int) -> None:
        """Begin to compile everything in the background, in the recipes' order."""
        self._submit(self._recipes, threads)

    def expect_on_disk(self) -> None:
        """They are in the persistent cache: each is read when it is first used, or by read_ahead().

        What has to be compiled all the same counts as late.
        """
        self._on_disk = True

    def read_ahead(self) -> None:
        """Begin to read, smallest first, what no request has wanted yet. Once the first step is on its way, not before:
        reading holds Python's lock, which the programs of that step want themselves."""
        if self._on_disk and not self._reading:
            self._reading = True
            self._submit([key for key in reversed(self._recipes) if key not in self._compiled], 1)

    def _submit(self, keys: Iterable[Any], threads: int) -> None:
        old = threading.stack_size(STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
            for key in keys:
                self._futures[key] = pool.submit(self._make, key)
        finally:
            threading.stack_size(old)
        pool.shutdown(wait=False)

    def finish(self, progress: Callable[[int, int], None]) -> None:
        """Wait until every program that was begun or is on disk is there; progress(done, total) after each.

        Raises what a compilation raised.
        """
        self.read_ahead()
        total = len(self._futures)
        for done, key in enumerate(tuple(self._futures), start=1):
            self._compiled[key] = self._futures.pop(key).result()
            progress(done, total)

    def __getitem__(self, key: Any) -> jax.stages.Compiled:
        """The program: ready, or waited for, or made now if no thread has begun with it."""
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._obtain(key)
        return found

    def _obtain(self, key: Any) -> jax.stages.Compiled:
        future = self._futures.pop(key, None)
        if future is not None and not future.cancel():
            return future.result()
        if future is None and not self._on_disk:
            self._late.append(key)
        return self._make(key)

    def _make(self, key: Any) -> jax.stages.Compiled:
        """On any thread."""
        with watch_cache() as watch:
            program = self._recipes[key].compile()
        if self._on_disk and watch.num_misses:
            self._late.append(key)
        return program

    @property
    def late_compilations(self) -> int:
        """Programs compiled at their first use, without warm-up; and those that the disk had lost."""
        return len(self._late)

    @property
    def num_ready(self) -> int:
        """Programs that are compiled or read from the cache."""
        return len(self._compiled) + sum(future.done() for future in self._futures.values())

    @property
    def keys(self) -> tuple[Any, ...]:
        """All programs this engine can need."""
        return tuple(self._recipes)

    def close(self) -> None:
        """Give up what no thread has begun."""
        for future in self._futures.values():
            future.cancel()
