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
    """(params, cache, last_tokens[M + 1], StepInput) → (cache, hidden states [M, D] at step.sample_at)."""

    def forward(params, cache, last_tokens, step: StepInput):
        tokens = jnp.where(step.from_device, last_tokens[step.table_rows], step.inputs.tokens)
        inputs = replace(step.inputs, tokens=tokens)
        hidden, cache = code.module(params).backbone(inputs, cache, code.backends)
        return cache, hidden.at[step.sample_at].get(mode="promise_in_bounds")

    return forward


def sample_program(code: ModelCode, mode: SamplerMode, whole: NamedSharding) -> Callable[..., Any]:
    """(params, hidden [M, D], last_tokens[M + 1], slots[S], SamplingInput of S) → (SampleOutput, last_tokens).

    Row i of the S sampled rows is hidden[i]; its token is left in last_tokens[slots[i]]. Padding rows have slot M.
    """

    def sample_rows(params, hidden, last_tokens, slots, inputs: SamplingInput) -> tuple[SampleOutput, jax.Array]:
        logits = code.module(params).logits(hidden[: slots.shape[0]], code.backends)
        logits = jax.lax.with_sharding_constraint(logits, whole)
        out = sample(logits, inputs, mode)
        return out, last_tokens.at[slots].set(out.token, mode="promise_in_bounds")

    return sample_rows


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
        self.late_compilations = 0  # programs compiled at their first use, without warm-up

    def start(self, threads: int) -> None:
        """Begin to compile everything in the background, in the recipes' order."""
        self._submit(self._recipes, threads)

    def expect_on_disk(self) -> None:
        """They are in the persistent cache: each is read when it is first used, or by read_ahead()."""
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
                self._futures[key] = pool.submit(self._recipes[key].compile)
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
        if future is None:
            self.late_compilations += not self._on_disk
            return self._recipes[key].compile()
        return self._recipes[key].compile() if future.cancel() else future.result()

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
