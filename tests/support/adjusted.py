"""Runs the adjusting sampler on numpy rows, each with a prompt and an output before the token being sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.constraints import forbid, pack
from jaxpaged.sampling import SamplerMode, SamplingInput, build_sampling_input, sample
from jaxpaged.sampling_adjust import RowAdjustment, RowState, build_adjustments, history_row, neutral
from jaxpaged.sampling_params import SamplingParams
from tests.support.sampler import reference
from tests.support.sampling_reference import adjusted_logits


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of one row, and what came before the token."""

    params: SamplingParams
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    processor: int = 0  # which of the program's, from 1; 0: none
    masked: tuple[int, ...] = ()  # must not come, by the row's mask: the last ids of bad words
    banned: tuple[int, ...] = ()  # must not come, by the list: end and stop ids before min_tokens
    seed: int = 0

    def expected(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """Of the plain-numpy reference: (kept bool[V], scaled logits [V], whether rounding decides what is kept)."""
        forbidden = (*self.masked, *self.banned)
        return reference(adjusted_logits(logits, self.params, self.prompt, self.outputs, banned=forbidden), self.params)

    def chances(self, logits: np.ndarray) -> np.ndarray:
        """The exact probability of each token, [V]."""
        kept, scaled, near = self.expected(logits)
        assert not near, f"rounding decides what {self} keeps: choose other values"
        weights = np.where(kept, np.exp(scaled), 0.0)
        return weights / weights.sum()


def prepare(asks: Sequence[Ask], vocab_size: int) -> tuple[SamplingInput, RowState]:
    """The sampler's arguments for these rows, each in a slot of its own."""
    size = len(asks)
    rows = [(ask.params, ask.seed, len(ask.prompt) + len(ask.outputs), ask.banned) for ask in asks]
    inputs = build_sampling_input(rows, size, vocab_size=vocab_size, banned_width=8)
    adjustments = build_adjustments(
        [
            RowAdjustment(
                params=ask.params, num_prompt=len(ask.prompt), mask=_mask(ask, vocab_size), processor=ask.processor
            )
            for ask in asks
        ],
        neutral(size, vocab_size),
        vocab_size,
    )
    histories = [history_row(ask.prompt, ask.outputs, vocab_size) for ask in asks]
    state = RowState(
        histories=jnp.asarray(np.stack(histories)),
        slots=jnp.arange(size, dtype=jnp.int32),
        last_tokens=jnp.array([(ask.prompt + ask.outputs)[-1] for ask in asks], jnp.int32),
        positions=jnp.asarray(inputs.position),
    )
    return jax.tree.map(jnp.asarray, replace(inputs, adjustments=adjustments)), state


def adjusting(rows_per_pass: int, processors: tuple[Callable[..., Any], ...] = ()) -> SamplerMode:
    return SamplerMode(
        greedy=False, max_logprobs=None, rows_per_pass=rows_per_pass, adjusts=True, processors=processors
    )


def drawn(logits: np.ndarray, asks: Sequence[Ask], count: int) -> np.ndarray:
    """What each ask draws at `count` positions in a row, all asks in one batch: tokens int32[count, len(asks)]."""
    inputs, state = prepare(asks, len(logits))
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (len(asks), 1))

    @jax.jit
    def draw() -> jax.Array:
        def at(step: jax.Array) -> jax.Array:
            return sample(rows, replace(inputs, position=inputs.position + step), adjusting(len(asks)), state).token

        return jax.lax.map(at, jnp.arange(count, dtype=jnp.int32))

    return np.asarray(draw())


def _mask(ask: Ask, vocab_size: int) -> np.ndarray | None:
    allowed = ask.params.allowed_token_ids
    if allowed is None and not ask.masked:
        return None
    mask = pack(range(vocab_size) if allowed is None else allowed, vocab_size)
    forbid(mask, ask.masked)
    return mask
