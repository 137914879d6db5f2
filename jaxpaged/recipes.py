"""Which programs an engine compiles: a backbone per token bucket, samplers per size and ability, block copies.

Letters: M max_num_seqs, S sampled rows (padded), C copies, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.batch import BatchShape, Buckets, example
from jaxpaged.cache import cache_shape
from jaxpaged.models.config import ModelConfig
from jaxpaged.programs import (
    ModelCode,
    Recipe,
    adjusting_program,
    copy_program,
    forward_program,
    history_program,
    sample_program,
    score_program,
)
from jaxpaged.sampling import SamplerMode, build_sampling_input
from jaxpaged.sampling_adjust import neutral
from jaxpaged.scoring import ScoringMode
from jaxpaged.sharding.rules import CACHE_AXES, TENSOR_PARALLEL, replicated, sharding_of

BANNED_WIDTH = 8  # ids a row may ban before min_tokens without a mask
ADJUSTED_SIZE = 8  # adjusting samplers are there for so many rows, and for the most
COPY = "copy"  # key of the block-copy program
SCORE = "score"  # key of the program that scores what is read off prompts
HISTORY = "history"  # key of the program that begins a slot's history


@dataclass(frozen=True, kw_only=True)
class RunnerSpec:
    """Sizes that shape the compiled programs."""

    on_cpu: bool
    num_blocks: int  # the trash block included
    batch_invariant: bool  # every step runs the same programs at the same sizes, whatever is in it
    max_num_batched_tokens: int
    max_logprobs: int
    dtype: Any  # of activations
    cache_dtype: Any
    batch: BatchShape  # block size, max_num_seqs (M), max_num_read (Q), table width (P), tiles

    @property
    def rows_scored(self) -> int:
        """Positions whose logits are made together: their whole vocabulary is in memory at a time."""
        return min(32 if self.on_cpu else 128, self.batch.max_num_read)

    @property
    def buckets(self) -> Buckets:
        create = Buckets.single if self.batch_invariant else Buckets.create
        return create(self.max_num_batched_tokens, self.batch.max_num_seqs)

    @property
    def samplers(self) -> tuple[SamplerKey, ...]:
        """The sampler programs: if they must all compute alike, the one that can do everything."""
        return sampler_keys(self.buckets)[-1:] if self.batch_invariant else sampler_keys(self.buckets)


@dataclass(frozen=True, kw_only=True)
class SamplerKey:
    """One sampler program. Those that can do more serve those that ask for less."""

    size: int  # S
    greedy: bool  # greedy rows only
    logprobs: bool
    adjusts: bool  # serves rows with adjustments
    processors: tuple[Callable[..., Any], ...] = ()  # the requests' own: such programs are made at their first use


def sampler_keys(buckets: Buckets) -> tuple[SamplerKey, ...]:
    """Every sampler program, in order of cost.

    Greedy ones at every size. The others take several times as long to compile, and little more to run on padding
    rows, so they come at every other size. Those that adjust can do everything, and come at two sizes.
    """
    sizes = sorted({*buckets.samples[::-2], 1})
    largest = sizes[-1]
    few = next(size for size in sizes if size >= min(ADJUSTED_SIZE, largest))

    def keys(at: Sequence[int], greedy: bool, logprobs: bool, adjusts: bool) -> list[SamplerKey]:
        return [SamplerKey(size=size, greedy=greedy, logprobs=logprobs, adjusts=adjusts) for size in at]

    return (
        *keys(buckets.samples, True, False, False),
        *keys(sizes, False, False, False),
        *keys(sizes, False, True, False),
        *keys(sorted({few, largest}), False, True, True),
    )


def choose_sampler(
    keys: Sequence[SamplerKey], *, count: int, greedy: bool, logprobs: bool, adjusts: bool
) -> SamplerKey:
    """The first of the keys that serves `count` rows with these needs."""
    return next(
        key
        for key in keys
        if key.size >= count
        and (greedy or not key.greedy)
        and (key.logprobs or not logprobs)
        and (key.adjusts or not adjusts)
    )


class Recipes:
    """The recipes of one engine, built from abstract arguments alone: no weight and no device memory is needed."""

    def __init__(
        self,
        model: ModelConfig,
        code: ModelCode,
        spec: RunnerSpec,
        mesh: Mesh | AbstractMesh,
        params: tuple[jax.ShapeDtypeStruct, ...],
    ) -> None:
        self._model, self._code, self._spec, self._params = model, code, spec, params
        self._whole = replicated(mesh)
        shape = cache_shape(model, spec.num_blocks, spec.batch.block_size)
        self.cache_sharding = sharding_of(CACHE_AXES, shape, TENSOR_PARALLEL, mesh)
        half = jax.ShapeDtypeStruct(shape, spec.cache_dtype, sharding=self.cache_sharding)
        self._cache = tuple((half, half) for _ in range(model.num_layers))
        self._rows_per_pass = 2 if spec.on_cpu else spec.batch.max_num_seqs

    def all(self) -> Mapping[Any, Recipe]:
        """By key: a token bucket, a SamplerKey or one of the names. Backbones take longest: first, largest first."""
        buckets = self._spec.buckets
        recipes: dict[Any, Recipe] = {size: self._backbone(size) for size in reversed(buckets.tokens)}
        recipes |= {key: self.sampler(key) for key in self._spec.samplers}
        return recipes | {SCORE: self._scorer(), HISTORY: self._history(), COPY: self._copy()}

    def _backbone(self, size: int) -> Recipe:
        step = self._abstract_like(example(size, self._spec.batch))
        return Recipe(
            function=forward_program(self._code),
            arguments=(self._params, self._cache, self._last_tokens(), step),
            donate=(1,),
            out_shardings=(self._cache_out(), self._whole),
        )

    def sampler(self, key: SamplerKey) -> Recipe:
        """The recipe of a sampler, also of one that is not among all()."""
        mode = SamplerMode(
            greedy=key.greedy,
            max_logprobs=self._spec.max_logprobs if key.logprobs else None,
            rows_per_pass=min(self._rows_per_pass, key.size),
            adjusts=key.adjusts,
            processors=key.processors,
        )
        vocab_size = self._model.vocab_size
        inputs = build_sampling_input([], key.size, vocab_size=vocab_size, banned_width=BANNED_WIDTH)
        if key.adjusts:
            inputs = replace(inputs, adjustments=neutral(key.size, vocab_size))
        slots = self._abstract((key.size,), jnp.int32)
        arguments = (self._params, self._hidden(), self._last_tokens(), slots, self._abstract_like(inputs))
        if not key.adjusts:
            function = sample_program(self._code, mode, self._whole)
            return Recipe(function=function, arguments=arguments, donate=(), out_shardings=self._whole)
        known = self._abstract((key.size,), jnp.bool_)
        return Recipe(
            function=adjusting_program(self._code, mode, self._whole),
            arguments=(*arguments, self._histories(), known, slots),
            donate=(5,),
            out_shardings=self._whole,
        )

    def _history(self) -> Recipe:
        row = self._abstract((self._model.vocab_size,), jnp.int32)
        return Recipe(
            function=history_program(),
            arguments=(self._histories(), self._abstract((), jnp.int32), row),
            donate=(0,),
            out_shardings=self._whole,
        )

    def _scorer(self) -> Recipe:
        spec = self._spec
        mode = ScoringMode(
            max_logprobs=spec.max_logprobs, rows_per_product=spec.rows_scored, rows_per_pass=self._rows_per_pass
        )
        targets = self._abstract((spec.batch.max_num_read,), jnp.int32)
        count, with_top = self._abstract((), jnp.int32), self._abstract((), jnp.bool_)
        return Recipe(
            function=score_program(self._code, mode, self._whole),
            arguments=(self._params, self._hidden(), targets, count, with_top),
            donate=(),
            out_shardings=self._whole,
        )

    def _copy(self) -> Recipe:
        copies = self._abstract((self._spec.batch.max_num_seqs, 2), jnp.int32)
        return Recipe(
            function=copy_program(), arguments=(self._cache, copies), donate=(0,), out_shardings=self._cache_out()
        )

    def _hidden(self) -> jax.ShapeDtypeStruct:
        batch = self._spec.batch
        return self._abstract((batch.max_num_seqs + batch.max_num_read, self._model.hidden_size), self._spec.dtype)

    def _last_tokens(self) -> jax.ShapeDtypeStruct:
        return self._abstract((self._spec.batch.max_num_seqs + 1,), jnp.int32)

    def _histories(self) -> jax.ShapeDtypeStruct:
        return self._abstract((self._spec.batch.max_num_seqs + 1, self._model.vocab_size), jnp.int32)

    def _cache_out(self) -> Any:
        return jax.tree.map(lambda _: self.cache_sharding, self._cache)

    def _abstract_like(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: self._abstract(leaf.shape, leaf.dtype), tree)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)
