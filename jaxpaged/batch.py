"""From a StepPlan to padded arrays: one StepInput per token bucket."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpaged.pallas_kernels import AttentionBatch, TileConfig, plan_attention
from jaxpaged.plan import StepPlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInput:
    """All the backbone needs for one step. T padded tokens, R = min(T, max_num_seqs) rows, M = max_num_seqs.

    Padding tokens have id 0, position 0 and slot 0 of the trash block; padding rows have no queries.
    """

    tokens: Int[Array, " T"]
    from_device: Bool[Array, " T"]  # take the id from last_tokens[table_rows[t]] instead of tokens[t]
    table_rows: Int[Array, " T"]  # the sequence's slot
    positions: Int[Array, " T"]
    rope_lens: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]
    sample_at: Int[Array, " M"]  # tokens whose hidden state is kept; padding entries are 0
    attention: AttentionBatch


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Padded sizes for which programs are compiled, ascending: tokens of a step, sequences sampled in a step."""

    tokens: tuple[int, ...]
    samples: tuple[int, ...]

    @classmethod
    def create(cls, max_num_batched_tokens: int, max_num_seqs: int) -> Buckets:
        """Powers of two from 8, one apart for the single stream: 1, 8, 16, … up to the limit itself."""
        return cls(tokens=_sizes(max_num_batched_tokens), samples=_sizes(min(max_num_seqs, max_num_batched_tokens)))

    def for_tokens(self, count: int) -> int:
        """Smallest token bucket that holds count."""
        return next(size for size in self.tokens if size >= count)

    def for_samples(self, count: int) -> int:
        """Smallest sampling bucket that holds count."""
        return next(size for size in self.samples if size >= count)


def _sizes(limit: int) -> tuple[int, ...]:
    sizes = [1]
    size = 8
    while size < limit:
        sizes.append(size)
        size *= 2
    return tuple(sizes if limit == 1 else [*sizes, limit])


def build(
    plan: StepPlan, *, buckets: Buckets, block_size: int, max_num_seqs: int, tiles: TileConfig
) -> StepInput:
    """The plan as numpy arrays, padded to the token bucket. Token order is row order."""
    rows = plan.rows
    size = buckets.for_tokens(plan.num_tokens)
    num_rows = min(size, max_num_seqs)
    counts = np.array([row.count for row in rows], np.int32)
    slots = np.array([row.slot for row in rows], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1])
    row_of_token = np.repeat(np.arange(len(rows)), counts)

    def padded(values: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
        out = np.full((length, *values.shape[1:]), fill, values.dtype)
        out[: len(values)] = values
        return out

    starts = np.array([row.start for row in rows], np.int32)
    kv_lens = starts + counts
    positions = np.arange(total, dtype=np.int32) - np.repeat(ends - kv_lens, counts)
    tables = plan.block_tables[slots]
    blocks = tables[row_of_token, positions // block_size]
    prompts = np.array([row.request.num_prompt for row in rows], np.int32)
    from_device = np.zeros(size, np.bool_)
    from_device[ends[[row.token_on_device for row in rows]] - 1] = True
    sample_at = ends[[row.samples for row in rows]] - 1
    attention = plan_attention(
        block_tables=padded(tables, num_rows),
        kv_lens=padded(kv_lens, num_rows),
        query_starts=padded(np.concatenate([np.zeros(1, np.int32), ends]), num_rows + 1, fill=total),
        num_rows=len(rows),
        num_tokens=size,
        tiles=tiles,
    )
    return StepInput(
        tokens=padded(np.concatenate([row.tokens for row in rows]).astype(np.int32), size),
        from_device=from_device,
        table_rows=padded(slots[row_of_token], size),
        positions=padded(positions, size),
        rope_lens=padded(np.maximum(prompts[row_of_token], positions + 1), size),
        slot_mapping=padded(blocks * block_size + positions % block_size, size),
        sample_at=padded(sample_at.astype(np.int32), max_num_seqs),
        attention=attention,
    )
