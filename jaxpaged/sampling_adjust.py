"""What changes a row's logits before the filters: bias, penalties, a processor of the request's own, masks.

Only rows that ask for it are touched. The tokens that penalties look at are counted on the device, a row of counts
for each slot, so that a step need not wait for the tokens of the one before it.

Letters: S sampled rows, C rows of one pass, V vocabulary, G blocks, M slots, E entries of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged import sampling_filters as filters
from jaxpaged.constraints import WORD_BITS, mask_words
from jaxpaged.sampling_blocks import BLOCK, LogitRows, block_maxima, blocks_of, finite, for_rows, rows_of
from jaxpaged.sampling_filters import RowRules
from jaxpaged.sampling_params import GREEDY_BELOW, MAX_BIASES, MAX_SCORED_IDS, SamplingParams


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """What the rows of a batch ask for. Padding rows, and rows that ask for nothing, are not active."""

    active: jax.Array | np.ndarray  # bool[S]: the logits are changed; otherwise only the last two fields count
    presence: jax.Array | np.ndarray  # f32[S]; 0: off
    frequency: jax.Array | np.ndarray  # f32[S]; 0: off
    repetition: jax.Array | np.ndarray  # f32[S]; 1: off
    bias_ids: jax.Array | np.ndarray  # int32[S, E], ascending; V + 32 or more: no id
    biases: jax.Array | np.ndarray  # f32[S, E]
    allowed: jax.Array | np.ndarray  # uint32[S, ceil(V / 32)]: bit i of word w is token 32 w + i, 0 must not come
    num_prompt: jax.Array | np.ndarray  # int32[S]
    processor: jax.Array | np.ndarray  # int32[S]: 0 for none, else which of the program's processors, from 1
    reports: jax.Array | np.ndarray  # bool[S]: log-probabilities are wanted
    scored_ids: jax.Array | np.ndarray  # int32[S, E]: ids whose log-probabilities are wanted; unused entries 0


@jax.tree_util.register_dataclass
@no_type_check  # holds traced arrays or abstract ones
@dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """What a logits_processor knows of its sequence."""

    output_counts: jax.Array  # int32[V]: how often each token has been generated
    in_prompt: jax.Array  # bool[V]: whether it is in the prompt
    num_prompt: jax.Array  # int32: tokens of the prompt
    num_outputs: jax.Array  # int32: tokens generated so far
    last_token: jax.Array  # int32: the newest token, of the prompt's or generated


@jax.tree_util.register_dataclass
@no_type_check  # holds traced arrays or abstract ones
@dataclass(frozen=True, kw_only=True)
class RowState:
    """What the device keeps of the sequences, and which of it the sampled rows use."""

    histories: jax.Array  # int32[M + 1, V]: twice the count among the outputs, plus 1 if in the prompt
    slots: jax.Array  # int32[S]
    last_tokens: jax.Array  # int32[S]: of each row
    positions: jax.Array  # int32[S]: of the token being sampled


def adjust(
    logits: Float[Array, "S V"],
    maxima: Float[Array, "S G"],
    asked: Adjustments,
    state: RowState,
    rules: RowRules,
    processors: Sequence[Callable[..., Any]],
    rows_per_pass: int,
) -> tuple[LogitRows, Float[Array, "S G"]]:
    """The logits to sample from, and their block maxima, given the raw ones. V is a multiple of BLOCK here.

    Without processors the changed logits are not kept: they are made again where they are read, a block at a time
    mostly, which costs less than writing them all. What top_p needs of them all is summed while they are there.
    """
    changes = _Changes(logits=logits, asked=asked, state=state)
    active = jnp.asarray(asked.active)
    if not processors:
        weighs = (rules.temperature >= GREEDY_BELOW) & (rules.top_p < 1.0) & (rules.top_k == 0)

        def measure(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            values, greatest = _with_maxima(changes.whole(rows))
            mass = lax.cond(
                jnp.any(weighs[rows]),
                lambda: jnp.where(weighs[rows], filters.mass(finite(values), greatest.max(1), rules.take(rows)), 0.0),
                lambda: jnp.zeros(rows.shape),
            )
            return greatest, mass

        maxima, masses = for_rows(measure, active, (maxima, jnp.zeros(active.shape)), rows_per_pass)
        shaped = LogitRows(raw=logits, changed=active, masses=masses, whole=changes.whole, blocks=changes.blocks)
        return shaped, maxima
    vocab_size = state.histories.shape[1]
    padding = logits.shape[1] - vocab_size

    result = for_rows(lambda rows: _with_maxima(changes.whole(rows)), active, (logits, maxima), rows_per_pass)
    for number, processor in enumerate(processors, start=1):
        changed, _ = result

        def process(rows: jax.Array, processor=processor, changed=changed) -> tuple[jax.Array, jax.Array]:
            seen = state.histories[state.slots[rows]]
            tokens = TokenHistory(
                output_counts=seen >> 1,
                in_prompt=(seen & 1) == 1,
                num_prompt=asked.num_prompt[rows],
                num_outputs=state.positions[rows] - asked.num_prompt[rows],
                last_token=state.last_tokens[rows],
            )
            values = jax.vmap(processor)(tokens, changed[rows][:, :vocab_size]).astype(jnp.float32)
            values = jnp.pad(values, ((0, 0), (0, padding)), constant_values=-jnp.inf)
            return _with_maxima(_masked(values, jnp.asarray(asked.allowed)[rows]))

        result = for_rows(process, asked.processor == number, result, rows_per_pass)
    return rows_of(result[0]), result[1]


@final
@dataclass(frozen=True, kw_only=True)
class _Changes:
    """The changed logits, whole or in blocks. Of rows that are not active the entries are neutral."""

    logits: jax.Array
    asked: Adjustments
    state: RowState

    def whole(self, rows: jax.Array) -> jax.Array:
        """f32[C, V]."""
        asked = self.asked
        row = jnp.arange(rows.shape[0])[:, None]
        padding = self.logits.shape[1] - self.state.histories.shape[1]
        values = lax.cond(
            self._has_bias(rows),
            lambda: self.logits[rows].at[row, asked.bias_ids[rows]].add(asked.biases[rows], mode="drop"),
            lambda: self.logits[rows],
        )
        history = jnp.pad(self.state.histories[self.state.slots[rows]], ((0, 0), (0, padding)))
        return _masked(_penalised(values, history, asked, rows), jnp.asarray(asked.allowed)[rows])

    def blocks(self, rows: jax.Array, wanted: jax.Array) -> jax.Array:
        """f32[C, M, BLOCK]."""
        asked = self.asked
        values = blocks_of(self.logits, rows, wanted)
        shape = values.shape
        ids = wanted[:, :, None] * BLOCK + lax.broadcasted_iota(jnp.int32, (1, 1, BLOCK), 2)
        ids, values = ids.reshape(shape[0], -1), values.reshape(shape[0], -1)

        def biased() -> jax.Array:
            listed, biases = jnp.asarray(asked.bias_ids)[rows], jnp.asarray(asked.biases)[rows]
            place = jnp.minimum(jax.vmap(jnp.searchsorted)(listed, ids), listed.shape[1] - 1)
            found = jnp.take_along_axis(listed, place, 1) == ids
            return values + jnp.where(found, jnp.take_along_axis(biases, place, 1), 0.0)

        values = lax.cond(self._has_bias(rows), biased, lambda: values)
        # Of padding ids anything will do, their logits are -inf.
        history = self.state.histories.at[self.state.slots[rows][:, None], ids].get(mode="clip")
        words = jnp.asarray(asked.allowed)[rows[:, None], wanted]  # a block of the vocabulary is a word of the mask
        return _masked(_penalised(values, history, asked, rows), words).reshape(shape)

    def _has_bias(self, rows: jax.Array) -> jax.Array:
        return jnp.any(jnp.asarray(self.asked.bias_ids)[rows, 0] < self.state.histories.shape[1])  # the ids ascend


def _with_maxima(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Without the barrier XLA:CPU makes the values inside its loop over maxima, entry by entry: twice the time.
    values = lax.optimization_barrier(values)
    return values, block_maxima(values)


def _masked(values: jax.Array, words: jax.Array) -> jax.Array:
    return jnp.where(_unpack(words), values, -jnp.inf)


def _penalised(values: jax.Array, history: jax.Array, asked: Adjustments, rows: jax.Array) -> jax.Array:
    """Repetition over prompt and output, then frequency and presence over the output: f32[C, V]."""
    repetition = asked.repetition[rows][:, None]
    count = history >> 1
    repeated = jnp.where(values > 0, values / repetition, values * repetition)
    values = jnp.where(history > 0, repeated, values)
    values -= asked.frequency[rows][:, None] * count.astype(jnp.float32)
    return values - jnp.where(count > 0, asked.presence[rows][:, None], 0.0)


def _unpack(words: jax.Array) -> jax.Array:
    """uint32[C, W] to bool[C, 32 W]."""
    shifts = lax.broadcasted_iota(jnp.uint32, (1, 1, WORD_BITS), 2)
    return ((words[:, :, None] >> shifts) & 1).reshape(words.shape[0], -1) == 1


def count_tokens(histories: Int[Array, "M V"], slots: Int[Array, " S"], tokens: Int[Array, " S"]) -> Int[Array, "M V"]:
    """The histories with one more output token for each row."""
    return histories.at[slots, tokens].add(2, mode="promise_in_bounds")


def history_row(prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """A sequence's history from the tokens the host knows, int32[V]."""
    row = 2 * np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size).astype(np.int32)
    row[list(prompt_ids)] += 1  # each once: buffered, however often an id occurs
    return row


@dataclass(frozen=True, kw_only=True)
class RowAdjustment:
    """What one row asks for."""

    params: SamplingParams
    num_prompt: int
    mask: np.ndarray | None  # uint32[ceil(V / 32)]; None: every token may come
    processor: int


def changes_logits(row: RowAdjustment) -> bool:
    """Whether the row's logits are changed at all."""
    return row.mask is not None or row.processor > 0 or row.params.penalised or bool(row.params.logit_bias)


def neutral(size: int, vocab_size: int) -> Adjustments:
    """Adjustments of `size` rows that ask for nothing."""
    return Adjustments(
        **_narrow(size),
        bias_ids=np.full((size, MAX_BIASES), vocab_size + WORD_BITS, np.int32),
        biases=np.zeros((size, MAX_BIASES), np.float32),
        allowed=np.full((size, mask_words(vocab_size)), 0xFFFFFFFF, np.uint32),
        scored_ids=np.zeros((size, MAX_SCORED_IDS), np.int32),
    )


def _narrow(size: int) -> dict[str, Any]:
    """The arrays of one entry a row, neutral."""
    return {
        "active": np.zeros(size, np.bool_),
        "presence": np.zeros(size, np.float32),
        "frequency": np.zeros(size, np.float32),
        "repetition": np.ones(size, np.float32),
        "num_prompt": np.zeros(size, np.int32),
        "processor": np.zeros(size, np.int32),
        "reports": np.zeros(size, np.bool_),
    }


def build_adjustments(rows: Sequence[RowAdjustment], base: Adjustments, vocab_size: int) -> Adjustments:
    """The rows' wishes, as numpy arrays. base: neutral ones, whose wide arrays serve where no row has an entry."""
    narrow = _narrow(base.active.shape[0])
    wide: dict[str, Any] = {}

    def entry(name: str, fill: int, row: int) -> np.ndarray:
        if name not in wide:
            like = getattr(base, name)
            wide[name] = np.full(like.shape, fill, like.dtype)
        return wide[name][row]

    for index, row in enumerate(rows):
        params = row.params
        values = {
            "active": changes_logits(row),
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": params.repetition_penalty,
            "num_prompt": row.num_prompt,
            "processor": row.processor,
            "reports": params.wants_logprobs,
        }
        for name, value in values.items():
            narrow[name][index] = value
        if params.logit_bias:
            ids, biases = zip(*sorted(params.logit_bias), strict=True)
            entry("bias_ids", vocab_size + WORD_BITS, index)[: len(ids)] = ids
            entry("biases", 0, index)[: len(ids)] = biases
        if params.logprob_token_ids:
            entry("scored_ids", 0, index)[: len(params.logprob_token_ids)] = params.logprob_token_ids
        if row.mask is not None:
            entry("allowed", 0xFFFFFFFF, index)[:] = row.mask
    kept = ("bias_ids", "biases", "allowed", "scored_ids")
    return Adjustments(**narrow, **{name: wide.get(name, getattr(base, name)) for name in kept})
