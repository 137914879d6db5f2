"""The runner's part for rows with adjustments: masks, histories on the device, the requests' own processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpaged.constraints import forbid, mask_words
from jaxpaged.plan import RowPlan
from jaxpaged.programs import Programs
from jaxpaged.recipes import BANNED_WIDTH, HISTORY, Recipes, SamplerKey
from jaxpaged.request import Request, described
from jaxpaged.sampling_adjust import (
    Adjustments,
    RowAdjustment,
    TokenHistory,
    build_adjustments,
    history_row,
    neutral,
)

MOST_PROCESSOR_PROGRAMS = 8  # kept at once; the longest unused goes


@dataclass(frozen=True, kw_only=True)
class Adjusted:
    """What an adjusting program takes besides the other samplers' arguments."""

    adjustments: Adjustments
    known: np.ndarray  # bool[S]: the host knows the row's newest token
    previous: np.ndarray  # int32[S]: that token


@final
class AdjustedRows:
    """Owned by the runner. Nothing is on the device before the first row with adjustments."""

    def __init__(
        self,
        recipes: Recipes,
        programs: Programs,
        *,
        vocab_size: int,
        num_slots: int,
        whole: NamedSharding,
        takes_processors: bool,
    ) -> None:
        self._recipes, self._programs, self._takes_processors = recipes, programs, takes_processors
        self._vocab_size, self._num_slots, self._whole = vocab_size, num_slots, whole
        self._histories: jax.Array | None = None
        # Whose history a slot holds, and since which admission: a preempted request begins it anew.
        self._holders: list[tuple[Request, int] | None] = [None] * num_slots
        self._neutral: dict[int, Adjustments] = {}
        self._checked: set[Callable[..., Any]] = set()
        self._processor_keys: list[SamplerKey] = []  # in order of use

    def check_processor(self, processor: Callable[..., Any]) -> None:
        """Trace a logits_processor. Raises ValueError if that fails or its result is no f32[V], or none is taken."""
        if not self._takes_processors:
            raise ValueError(
                "logits_processor: not with batch_invariant=True, because the rows beside it would be sampled by "
                "another program than without it"
            )
        if processor in self._checked:
            return
        vocab_size = self._vocab_size

        def call(counts: jax.Array, number: jax.Array, logits: jax.Array) -> Any:
            history = TokenHistory(
                output_counts=counts,
                in_prompt=counts > 0,
                num_prompt=number,
                num_outputs=number,
                last_token=number,
            )
            return processor(history, logits)

        try:
            found = jax.eval_shape(
                call,
                jax.ShapeDtypeStruct((vocab_size,), jnp.int32),
                jax.ShapeDtypeStruct((), jnp.int32),
                jax.ShapeDtypeStruct((vocab_size,), jnp.float32),
            )
        except Exception as error:
            raise ValueError(
                f"logits_processor must be a function of (TokenHistory, logits) that JAX can trace: {error}"
            ) from error
        shape = getattr(found, "shape", None)
        if shape != (vocab_size,) or not jnp.issubdtype(found.dtype, jnp.floating):
            raise ValueError(f"logits_processor must return float logits of shape ({vocab_size},), got {found}")
        self._checked.add(processor)

    def with_processors(self, key: SamplerKey, rows: Sequence[RowPlan]) -> SamplerKey:
        """The key of the program for these rows: with their processors, if they have any."""
        found = {row.request.params.logits_processor: None for row in rows}
        processors = tuple(sorted((each for each in found if each is not None), key=id))
        if not processors:
            return key
        key = replace(key, processors=processors)
        if key in self._processor_keys:
            self._processor_keys.remove(key)
        else:
            self._programs.add(key, self._recipes.sampler(key))
            if len(self._processor_keys) == MOST_PROCESSOR_PROGRAMS:
                self._programs.drop(self._processor_keys.pop(0))
        self._processor_keys.append(key)
        return key

    def prepare(self, key: SamplerKey, rows: Sequence[RowPlan], failed: dict[int, str]) -> Adjusted:
        """Everything for one step; begins the histories of rows that need one and have just taken their slot.

        Constraints are asked for their masks, so all tokens before the sampled ones must have been accepted. Rows
        whose constraint raises are put into failed, with what it raised.
        """
        base = self._neutral.get(key.size)
        if base is None:
            base = self._neutral[key.size] = jax.device_put(neutral(key.size, self._vocab_size), self._whole)
        known, previous = np.ones(key.size, np.bool_), np.zeros(key.size, np.int32)
        asked: list[RowAdjustment] = []
        for index, row in enumerate(rows):
            processor = row.request.params.logits_processor
            number = 0 if processor is None else 1 + key.processors.index(processor)
            if number or row.request.params.penalised:
                self._begin_history(row)
            known[index], previous[index] = not row.token_on_device, row.tokens[-1]
            try:
                mask = self._mask(row)
            except Exception as error:
                failed[index], mask = described(error), None
            asked.append(
                RowAdjustment(
                    params=row.request.params,
                    num_prompt=row.request.num_prompt,
                    mask=mask,
                    processor=number,
                )
            )
        return Adjusted(adjustments=build_adjustments(asked, base, self._vocab_size), known=known, previous=previous)

    @property
    def state(self) -> jax.Array | None:
        """What is on the device and belongs to no single step, if anything."""
        return self._histories

    def drop(self) -> None:
        """Forget the histories: what they counted, or they themselves, may be lost."""
        self._histories = None
        self._holders = [None] * self._num_slots

    @property
    def histories(self) -> jax.Array:
        """int32[M + 1, V], to be donated; what comes back is put here."""
        found = self._histories
        if found is None:
            found = jax.device_put(np.zeros((self._num_slots + 1, self._vocab_size), np.int32), self._whole)
            self._histories = found
        return found

    @histories.setter
    def histories(self, histories: jax.Array) -> None:
        self._histories = histories

    def _begin_history(self, row: RowPlan) -> None:
        """Upload the slot's history, unless it has it: from then on the sampler counts.

        When a request takes a slot none of its tokens is in flight, so the host knows them all.
        """
        request = row.request
        holder = (request, request.num_preemptions)
        if self._holders[row.slot] == holder:
            return
        self._holders[row.slot] = holder
        assert not row.token_on_device, f"{request.request_id} begins its history without knowing its newest token"
        counts = history_row(request.prompt_ids, request.output_ids, self._vocab_size)
        self.histories = self._programs[HISTORY](self.histories, np.int32(row.slot), counts)

    def _mask(self, row: RowPlan) -> np.ndarray | None:
        """Which tokens the row may sample; None: any."""
        request = row.request
        banned = request.banned_at(row.kv_len - request.num_prompt)
        wide = len(banned) > BANNED_WIDTH
        constraint = None if request.finished else request.constraint  # the last token of a finished one is dropped
        if constraint is None and not wide:
            return request.allowed
        mask = np.full(mask_words(self._vocab_size), 0xFFFFFFFF, np.uint32)
        if constraint is not None:
            constraint.fill(mask)
        if request.allowed is not None:
            mask &= request.allowed
        if wide:
            forbid(mask, banned)
        return mask
