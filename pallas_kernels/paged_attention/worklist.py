"""The GPU kernels' work list: which program computes which queries over which keys, built on the host once a step.

Queries of one row that stand together form a *query block*: up to M // G tokens, whose G query heads per KV head fill
the M rows of a tile. A block's keys reach from 0 to its last query. A block with many keys is split into several
*items*, each a range of keys; every item of a split block leaves a partial result, which the merge step combines. An
unsplit block is one item and writes its output itself.

    row 0: 1 query,  300 keys    block A ──▶ item (A,   0…128) ─▶ partial 0 ┐
                                         ├─▶ item (A, 128…256) ─▶ partial 1 ├─ merge ─▶ out[0]
                                         └─▶ item (A, 256…300) ─▶ partial 2 ┘
    row 1: 1 query,   40 keys    block B ──▶ item (B,   0… 40) ────────────────────────▶ out[1]

Lists serve every layer: a layer with a sliding window clips an item's keys itself, and an item with no key left
contributes nothing. Widths depend on static sizes alone, so one compiled program serves every mix of lengths.

Worked example: G = 4, K = 8, 132 SMs of 2 programs each, so 2 · 132 // 8 = 33 items fill the GPU. Rows with (queries,
keys) (1, 300), (1, 40), (5, 5); decode tile M = 16 (4 queries), prefill tile M = 64 (16 queries); an item has at least
128 keys:

    decode:  blocks A = row 0, B = row 1; chunk 128:
      ROW QUERY_START QUERY_END KV_START KV_END PARTIAL DIRECT POSITION
       0       0          1         0      128     0      0      299
       0       0          1       128      256     1      0      299
       0       0          1       256      300     2      0      299     longest first
       1       1          2         0       40     0      1       39
      merges: QUERY_START 0, QUERY_END 1, FIRST 0, COUNT 3
    prefill: one block, row 2, queries 2 … 7, keys 0 … 5, direct; a block of padding tokens 7 … T without keys
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import no_type_check

import jax
import numpy as np
from jaxtyping import Array, Int

MIN_CHUNK = 128  # keys; a shorter item costs more in merging than it gains
FILLED = 0.8  # blocks that fill this share of the GPU's places are not split, unless one is far above its share


class Item(IntEnum):
    """Columns of WorkList.items."""

    ROW = 0  # row of block_tables and kv_lens
    QUERY_START = 1  # first query, an index into T
    QUERY_END = 2  # one past the last query
    KV_START = 3  # first key's position, a multiple of the tile's kv
    KV_END = 4  # one past the last key's position that any of the queries sees
    PARTIAL = 5  # where the partial result goes; 0 if DIRECT
    DIRECT = 6  # 1: the item has all keys of its block and writes the output; 0: it writes a partial result
    POSITION = 7  # of the first query in its sequence


class Merge(IntEnum):
    """Columns of WorkList.merges."""

    QUERY_START = 0
    QUERY_END = 1
    FIRST = 2  # the block's partial results are FIRST … FIRST + COUNT - 1
    COUNT = 3  # 0: padding


@dataclass(frozen=True, kw_only=True)
class GpuTile:
    """How a GPU kernel is cut for one phase. Data, see tiles.py; it never changes the result's meaning."""

    query_rows: int  # M: rows of a tile, a power of two of at least 16, at least G
    kv: int  # keys per inner iteration, a power of two
    num_warps: int
    num_stages: int
    occupancy: int  # programs that one SM holds at a time


@dataclass(frozen=True, kw_only=True)
class WorkConfig:
    """What the lists' shapes depend on."""

    groups: int  # G
    num_kv_heads: int  # K on one device
    num_sms: int
    decode: GpuTile
    prefill: GpuTile | None  # None: the decode tile serves every row, which suits steps of single queries


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class WorkList:
    """One phase's items, longest first, and the blocks to merge. Entries beyond the real ones are zeros.

    A zero item has no queries (QUERY_START = QUERY_END) and nothing to do. The items of all lists of a step together
    cover each of the T tokens, padding included: padding tokens form blocks without keys.
    """

    items: Int[Array | np.ndarray, "W 8"]
    merges: Int[Array | np.ndarray, "X 4"]
    num_items: Int[Array | np.ndarray, ""]
    tile: GpuTile = field(metadata={"static": True})
    max_partials: int = field(metadata={"static": True})  # width of the buffers for partial results


@jax.tree_util.register_dataclass
@no_type_check
@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The lists of a step: rows whose queries fit one decode tile, and the others; None where there can be none."""

    decode: WorkList
    prefill: WorkList | None


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Query blocks as columns."""

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    kv_ends: np.ndarray


def plan_work(
    *, kv_lens: np.ndarray, query_starts: np.ndarray, num_rows: int, num_tokens: int, config: WorkConfig
) -> AttentionWork:
    """The work lists of a step: kv_lens [R], query_starts [R + 1] with num_rows real rows, num_tokens the padded T.

    A T that fits one decode tile has one list: no row of it could be in the other, whose kernels would find nothing.
    Raises: ValueError for a tile that holds less than one query.
    """
    lens, starts = kv_lens[:num_rows], query_starts[: num_rows + 1]
    counts = np.diff(starts)
    width = len(kv_lens)
    queries = block_queries(config.decode, config.groups)
    if config.prefill is None or num_tokens <= queries:
        config = replace(config, prefill=None)
        decode = _blocks(lens, starts, counts > 0, num_tokens, queries)
        return AttentionWork(
            decode=_work_list(decode, config.decode, config, max_blocks(config, "decode", num_tokens, width)),
            prefill=None,
        )
    few = counts <= queries
    decode = _blocks(lens, starts, few & (counts > 0), None, queries)
    prefill = _blocks(lens, starts, ~few, num_tokens, block_queries(config.prefill, config.groups))
    return AttentionWork(
        decode=_work_list(decode, config.decode, config, max_blocks(config, "decode", num_tokens, width)),
        prefill=_work_list(prefill, config.prefill, config, max_blocks(config, "prefill", num_tokens, width)),
    )


def block_queries(tile: GpuTile, groups: int) -> int:
    """Tokens of a query block: as many as have all their G query heads in the tile's rows."""
    if tile.query_rows < groups:
        raise ValueError(f"attention tile: wanted query_rows of at least the {groups} query heads, got {tile}")
    return tile.query_rows // groups


def item_budget(tile: GpuTile, config: WorkConfig) -> int:
    """Items that fill the GPU: each becomes K programs."""
    return max(1, tile.occupancy * config.num_sms // config.num_kv_heads)


def max_blocks(config: WorkConfig, phase: str, num_tokens: int, num_rows: int) -> int:
    """Most query blocks a phase can have for num_tokens padded tokens in at most num_rows rows, padding included."""
    if phase == "decode" and config.prefill is not None:
        return min(num_tokens, num_rows)
    fewest = 1 if config.prefill is None else block_queries(config.decode, config.groups) + 1  # queries of a row
    tile = config.prefill or config.decode
    rows = min(num_rows, num_tokens // fewest)
    return min(num_tokens, num_tokens // block_queries(tile, config.groups) + rows + 1)


def choose_chunk(lens: np.ndarray, *, budget: int, kv: int) -> int:
    """Most keys of an item, a multiple of kv: the smallest that keeps the list within what fills the GPU.

    lens: keys of each query block. Either all items fit the budget, or, where the blocks fill FILLED of it without
    being split, only those above their fair share of all keys are cut. The items of split blocks never exceed budget.

    Examples, kv 64, budget 33: lens (131072,) gives 4032, that is 33 items of one row. 64 lens of 8192 give 19904, so
    nothing is split. 63 lens of 100 and one of 131072 give 5248: the long row becomes 25 items.
    """
    total = int(lens.sum())
    floor = -(-max(MIN_CHUNK, kv) // kv)
    if len(lens) >= FILLED * budget:
        floor = max(floor, -(-int(total / (FILLED * budget)) // kv))
    low, high = floor, max(floor, -(-int(lens.max(initial=0)) // kv))  # in units of kv; high splits nothing
    while low < high:
        middle = (low + high) // 2
        pieces = _pieces(lens, middle * kv)
        fits = pieces[pieces > 1].sum() <= budget and (len(lens) >= FILLED * budget or pieces.sum() <= budget)
        low, high = (low, middle) if fits else (middle + 1, high)
    return low * kv


def _pieces(lens: np.ndarray, chunk: int | np.ndarray) -> np.ndarray:
    return np.maximum(1, -(-lens // chunk))


def _blocks(lens: np.ndarray, starts: np.ndarray, chosen: np.ndarray, padded: int | None, size: int) -> _Blocks:
    """Query blocks of the chosen rows, and of the tokens from the last row's end to `padded` unless that is None."""
    rows = np.flatnonzero(chosen)
    begins, ends, lens = starts[:-1][rows], starts[1:][rows], lens[rows]
    if padded is not None and padded > starts[-1]:
        rows, lens = np.append(rows, 0), np.append(lens, 0)
        begins, ends = np.append(begins, starts[-1]), np.append(ends, padded)
    owner, index = _enumerate(-(-(ends - begins) // size))
    first = begins[owner] + index * size
    last = np.minimum(first + size, ends[owner])
    unseen = np.where(lens[owner] > 0, ends[owner] - last, 0)  # keys of the row's queries after this block
    return _Blocks(rows=rows[owner], starts=first, ends=last, kv_ends=lens[owner] - unseen)


def _enumerate(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(i, j) for each j < counts[i], as two columns: counts (2, 1) gives (0, 0, 1) and (0, 1, 0)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _work_list(blocks: _Blocks, tile: GpuTile, config: WorkConfig, width: int) -> WorkList:
    budget = item_budget(tile, config)
    assert len(blocks.rows) <= width, (len(blocks.rows), width)
    chunk = choose_chunk(blocks.kv_ends, budget=budget, kv=tile.kv)
    even = -(-blocks.kv_ends // (_pieces(blocks.kv_ends, chunk) * tile.kv)) * tile.kv  # pieces of about equal size
    even = np.maximum(even, tile.kv)
    pieces = _pieces(blocks.kv_ends, even)
    owner, index = _enumerate(pieces)
    split = pieces > 1
    first_partial = np.cumsum(np.where(split, pieces, 0)) - np.where(split, pieces, 0)
    items = np.zeros((width + budget, len(Item)), np.int32)
    found = np.empty((len(owner), len(Item)), np.int32)
    found[:, Item.ROW] = blocks.rows[owner]
    found[:, Item.QUERY_START] = blocks.starts[owner]
    found[:, Item.QUERY_END] = blocks.ends[owner]
    found[:, Item.KV_START] = index * even[owner]
    found[:, Item.KV_END] = np.minimum((index + 1) * even[owner], blocks.kv_ends[owner])
    found[:, Item.PARTIAL] = np.where(split[owner], first_partial[owner] + index, 0)
    found[:, Item.DIRECT] = ~split[owner]
    found[:, Item.POSITION] = np.maximum(blocks.kv_ends - (blocks.ends - blocks.starts), 0)[owner]
    order = np.argsort(found[:, Item.KV_START] - found[:, Item.KV_END], kind="stable")  # longest first
    items[: len(found)] = found[order]
    merges = np.zeros((budget // 2, len(Merge)), np.int32)
    columns = (blocks.starts, blocks.ends, first_partial, pieces)
    merges[: int(split.sum())] = np.stack([column[split] for column in columns], axis=1)
    return WorkList(
        items=items,
        merges=merges,
        num_items=np.array(len(found), np.int32),
        tile=tile,
        max_partials=budget if budget > 1 else 0,
    )
