"""From a StepPlan to padded arrays: one StepInput per token bucket."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import no_type_check

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpaged.models.forward import ForwardInput
from jaxpaged.pallas_kernels import TileConfig, WorkConfig, plan_attention
from jaxpaged.plan import StepPlan


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class StepInput:
    """All the backbone needs for one step. T padded tokens, R = min(T, max_num_seqs) rows, M = max_num_seqs.

    Padding tokens have id 0, position 0 and slot 0 of the trash block; padding rows have no queries.
    """

    inputs: ForwardInput
    from_device: Bool[Array | np.ndarray, " T"]  # take the id from last_tokens[table_rows[t]], not inputs.tokens[t]
    table_rows: Int[Array | np.ndarray, " T"]  # the sequence's slot
    # Tokens whose hidden state is kept: M places for those that are sampled, then those that are read; padding is 0.
    sample_at: Int[Array | np.ndarray, " M+Q"]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Padded sizes for which programs are compiled, ascending: tokens of a step, sequences sampled in a step."""

    tokens: tuple[int, ...]
    samples: tuple[int, ...]

    @classmethod
    def create(cls, max_num_batched_tokens: int, max_num_seqs: int) -> Buckets:
        """1 for the single stream, 8, and powers of two from 32 up to the limit itself: each costs a second at start.

        Steps also have 16 and 48: with few tokens most of a step's time goes with their number.
        """
        tokens, samples = _sizes(max_num_batched_tokens), _sizes(min(max_num_seqs, max_num_batched_tokens))
        between = (size for size in (16, 48) if size < max_num_batched_tokens)
        return cls(tokens=tuple(sorted({*tokens, *between})), samples=samples)

    @classmethod
    def single(cls, max_num_batched_tokens: int, max_num_seqs: int) -> Buckets:
        """One size of each, for steps that must all be computed alike: a multiple of 32 tokens.

        Loops over whole vectors treat all their elements alike; the last ones of a size that is no multiple are
        computed by other instructions, with other rounding.
        """
        size = -(-max_num_batched_tokens // 32) * 32
        return cls(tokens=(size,), samples=(max_num_seqs,))

    def for_tokens(self, count: int) -> int:
        """Smallest token bucket that holds count."""
        return next(size for size in self.tokens if size >= count)


def _sizes(limit: int) -> tuple[int, ...]:
    sizes = [size for size in (1, 8) if size < limit]
    size = 32
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, limit)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What a StepInput's shapes depend on besides the token bucket."""

    block_size: int
    max_num_seqs: int  # M
    max_num_read: int  # Q: positions of prompts that a step can read
    table_width: int  # P: blocks of the longest sequence, rounded up to what attention's tiles want
    tiles: TileConfig
    work: WorkConfig | None  # what the GPU kernels' work lists are made for; None: no GPU kernel will run


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A step's rows as columns, one entry per row."""

    counts: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    prompts: np.ndarray  # prompt lengths
    on_device: np.ndarray  # bool
    samples: np.ndarray  # bool
    read: np.ndarray  # tokens of the step that are read


def build(plan: StepPlan, size: int, shape: BatchShape) -> StepInput:
    """The plan as numpy arrays, padded to the token bucket `size`. Token order is row order."""
    columns = zip(
        *((r.count, r.slot, r.start, r.request.num_prompt, r.token_on_device, r.samples) for r in plan.rows),
        strict=True,
    )
    names = ("counts", "slots", "starts", "prompts", "on_device", "samples")
    rows = _Rows(**dict(zip(names, map(np.array, columns), strict=True)), read=_tokens_read(plan))
    return _pack(rows, np.concatenate([row.tokens for row in plan.rows]), plan.block_tables, size, shape)


def example(size: int, shape: BatchShape) -> StepInput:
    """A StepInput of the bucket with one row of one token, for its shapes and dtypes."""
    zero, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    rows = _Rows(counts=zero + 1, slots=zero, starts=zero, prompts=zero + 1, on_device=no, samples=no, read=zero[:0])
    return _pack(rows, np.zeros(1, np.int32), np.zeros((shape.max_num_seqs, shape.table_width), np.int32), size, shape)


def _pack(rows: _Rows, tokens: np.ndarray, block_tables: np.ndarray, size: int, shape: BatchShape) -> StepInput:
    ends = np.cumsum(rows.counts)
    total, num_rows = int(ends[-1]), min(size, shape.max_num_seqs)
    row_of_token = np.repeat(np.arange(len(ends)), rows.counts)
    kv_lens = rows.starts + rows.counts
    positions = np.arange(total) - np.repeat(ends - kv_lens, rows.counts)
    tables = block_tables[rows.slots]
    slot_mapping = tables[row_of_token, positions // shape.block_size] * shape.block_size + positions % shape.block_size
    from_device = np.zeros(size, np.bool_)
    from_device[ends[rows.on_device] - 1] = True
    padded_tables = np.zeros((num_rows, shape.table_width), np.int32)  # the plan's are as wide as max_model_len needs
    padded_tables[: len(tables), : tables.shape[1]] = tables
    attention = plan_attention(
        block_tables=padded_tables,
        kv_lens=_padded(kv_lens, num_rows),
        query_starts=_padded(np.concatenate([[0], ends]), num_rows + 1, fill=total),
        num_rows=len(ends),
        num_tokens=size,
        tiles=shape.tiles,
        work=shape.work,
    )
    inputs = ForwardInput(
        tokens=_padded(tokens, size),
        positions=_padded(positions, size),
        rope_lens=_padded(np.maximum(rows.prompts[row_of_token], positions + 1), size),
        slot_mapping=_padded(slot_mapping, size),
        attention=attention,
    )
    sample_at = np.zeros(shape.max_num_seqs + shape.max_num_read, np.int32)
    sample_at[: np.count_nonzero(rows.samples)] = ends[rows.samples] - 1
    sample_at[shape.max_num_seqs : shape.max_num_seqs + len(rows.read)] = rows.read
    return StepInput(
        inputs=inputs,
        from_device=from_device,
        table_rows=_padded(rows.slots[row_of_token], size),
        sample_at=sample_at,
    )


def _tokens_read(plan: StepPlan) -> np.ndarray:
    """Places in the step's tokens of what is read, in the order of plan.reading_rows."""
    reading = plan.reading_rows
    if not reading:
        return np.zeros(0, np.int64)
    begins = dict(
        zip((row.slot for row in plan.rows), accumulate((r.count for r in plan.rows), initial=0), strict=False)
    )
    return np.concatenate([np.array(row.read) - row.start + begins[row.slot] for row in reading])


def _padded(values: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    """int32 copy of `length` entries, `fill` after the given ones."""
    out = np.full((length, *values.shape[1:]), fill, np.int32)
    out[: len(values)] = values
    return out
