"""What all layers of a step share: the ragged batch's arrays and its work list, built on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpaged.pallas_kernels.paged_attention.worklist import AttentionWork, WorkConfig, plan_work


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Tile sizes in tokens (lanes: sequences). Data, chosen per platform; a size never changes the result's meaning."""

    decode_lanes: int  # decoding sequences handled together; 0: they are cut into tiles of queries like all others
    decode_kv: int  # keys per inner iteration, decode
    prefill_queries: int  # queries of one sequence handled together
    prefill_kv: int  # keys per inner iteration, prefill


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What attention computes in one layer. Static.

    The score of a key is cap(scale · q·(k · k_scale)) + slope · (key position - query position), with the optional
    parts of AttentionExtras.
    """

    scale: float  # multiplies q·k
    window: int | None  # W: query i sees keys i-W+1 … i; None: all up to i
    soft_cap: float | None  # c: scores become c·tanh(score / c); None: off


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class AttentionExtras:
    """Arrays that some layers or caches have besides; None where absent."""

    sinks: Float[Array | np.ndarray, "K G"] | None = None  # a further score per head, to a value of zeros
    alibi_slopes: Float[Array | np.ndarray, "K G"] | None = None  # added to a score per position of distance; > 0
    k_scale: Float[Array | np.ndarray, "N K B"] | None = None  # float32; what a stored key is multiplied by
    v_scale: Float[Array | np.ndarray, "N K B"] | None = None


NO_EXTRAS = AttentionExtras()


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """A ragged batch: row r has kv_lens[r] tokens, the last of which are queries query_starts[r] … query_starts[r+1]-1.

    Query q of row r stands at position kv_lens[r] - (query_starts[r+1] - q). Rows beyond the real ones have kv_len 0
    and no queries. The first num_decodes rows have one query each, so row r's query is token r; the others are cut
    into tiles of consecutive queries: tile i starts at token tile_starts[i] and belongs to row tile_rows[i].
    Tiles are in ascending order of tile_starts. Table entries beyond a row's length are valid block ids (0).

    The tiles are for the XLA implementation, work for the GPU kernels.
    """

    block_tables: Int[Array | np.ndarray, "R P"]
    kv_lens: Int[Array | np.ndarray, " R"]
    query_starts: Int[Array | np.ndarray, " R+1"]
    num_decodes: Int[Array | np.ndarray, ""]
    tile_rows: Int[Array | np.ndarray, " W"]
    tile_starts: Int[Array | np.ndarray, " W"]
    num_tiles: Int[Array | np.ndarray, ""]
    tiles: TileConfig = field(metadata={"static": True})
    work: AttentionWork | None = None


def max_tiles(num_tokens: int, num_rows: int, tile: int) -> int:
    """Most tiles of queries a batch of num_tokens tokens can have."""
    return num_tokens // tile + min(num_rows, num_tokens)


def plan_attention(
    *,
    block_tables: np.ndarray,
    kv_lens: np.ndarray,
    query_starts: np.ndarray,
    num_rows: int,
    num_tokens: int,
    tiles: TileConfig,
    work: WorkConfig | None = None,
) -> AttentionBatch:
    """The batch with its work list. All arrays int32 numpy; num_rows rows are real, num_tokens is the padded T.

    work: what the GPU kernels' lists are made for; None where no GPU kernel will run.

    Example: counts (1, 1, 5) with prefill_queries 4: num_decodes 2, tile_rows (2, 2), tile_starts (2, 6).
    """
    counts = np.diff(query_starts[: num_rows + 1])
    many = np.flatnonzero(counts != 1)
    num_decodes = int(many[0]) if many.size else num_rows
    if tiles.decode_lanes == 0:
        num_decodes = 0
    rows, starts = [], []
    for row in range(num_decodes, num_rows):
        first = np.arange(query_starts[row], query_starts[row + 1], tiles.prefill_queries, dtype=np.int32)
        starts.append(first)
        rows.append(np.full(first.shape, row, np.int32))
    alone = num_tokens == 1 and tiles.decode_lanes > 0  # a single token is a decode row
    width = 0 if alone else max_tiles(num_tokens, len(kv_lens), tiles.prefill_queries)
    tile_rows, tile_starts = np.zeros(width, np.int32), np.zeros(width, np.int32)
    num_tiles = sum(len(s) for s in starts)
    if num_tiles:
        tile_rows[:num_tiles], tile_starts[:num_tiles] = np.concatenate(rows), np.concatenate(starts)
    return AttentionBatch(
        block_tables=block_tables,
        kv_lens=kv_lens,
        query_starts=query_starts,
        num_decodes=np.array(num_decodes, np.int32),
        tile_rows=tile_rows,
        tile_starts=tile_starts,
        num_tiles=np.array(num_tiles, np.int32),
        tiles=tiles,
        work=None
        if work is None
        else plan_work(
            kv_lens=kv_lens, query_starts=query_starts, num_rows=num_rows, num_tokens=num_tokens, config=work
        ),
    )
