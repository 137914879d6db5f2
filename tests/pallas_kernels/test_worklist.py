"""The GPU work list: every query and key exactly once, within the widths, balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import AttentionWork, WorkConfig, plan_work
from jaxpaged.pallas_kernels.paged_attention.worklist import Item, Merge, choose_chunk, item_budget
from tests.support.attention import gpu_tile

CONFIG = WorkConfig(
    groups=4,
    num_kv_heads=8,
    num_sms=132,
    decode=gpu_tile(kv=64, occupancy=2),
    prefill=gpu_tile(query_rows=64, kv=64, occupancy=2),
)


def plan(counts: list[int], lens: list[int], num_tokens: int, config: WorkConfig) -> AttentionWork:
    rows = np.array([*lens, 0, 0], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)] * 2]).astype(np.int32)
    return plan_work(kv_lens=rows, query_starts=starts, num_rows=len(counts), num_tokens=num_tokens, config=config)


def test_worked_example():
    """The one in the module's docstring."""
    work = plan([1, 1, 5], [300, 40, 5], 32, CONFIG)
    assert work.prefill is not None
    assert work.decode.items[:5].tolist() == [
        [0, 0, 1, 0, 128, 0, 0, 299],
        [0, 0, 1, 128, 256, 1, 0, 299],
        [0, 0, 1, 256, 300, 2, 0, 299],
        [1, 1, 2, 0, 40, 0, 1, 39],
        [0] * 8,
    ]
    assert work.decode.merges[:2].tolist() == [[0, 1, 0, 3], [0, 0, 0, 0]]
    assert work.prefill.items[:4].tolist() == [
        [2, 2, 7, 0, 5, 0, 1, 0],
        [0, 7, 23, 0, 0, 0, 1, 0],
        [0, 23, 32, 0, 0, 0, 1, 0],
        [0] * 8,
    ]


@pytest.mark.parametrize(
    ("lens", "chunk"), [([131072], 4032), ([8192] * 64, 19904), ([100] * 63 + [131072], 5248), ([], 128), ([1], 128)]
)
def test_chunks_of_the_docstring(lens, chunk):
    assert choose_chunk(np.array(lens, np.int32), budget=33, kv=64) == chunk


@pytest.mark.parametrize(("num_tokens", "lists"), [(1, 1), (4, 1), (5, 2)])
def test_tokens_that_fit_one_decode_tile_have_one_list(num_tokens, lists):
    """16 rows hold 4 queries of 4 heads: the kernels of a second list would be launched in every layer for nothing."""
    work = plan([1], [300], num_tokens, CONFIG)
    assert 1 + (work.prefill is not None) == lists
    tokens = {t for part in (work.decode, work.prefill) if part for item in part.items for t in range(*item[1:3])}
    assert tokens == set(range(num_tokens))


def test_one_long_sequence_fills_the_gpu():
    """Batch 1 with 128k tokens became one program per KV head where the split followed the batch size."""
    work = plan([1], [131072], 1, CONFIG)
    assert int(work.decode.num_items) == 33
    lengths = work.decode.items[:33, Item.KV_END] - work.decode.items[:33, Item.KV_START]
    assert lengths.max() - lengths.min() < 131072 // 33


def test_equal_rows_that_fill_the_gpu_stay_whole():
    assert int(plan([1] * 64, [8192] * 64, 64, CONFIG).decode.num_items) == 64


@given(
    rows=st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0, 1, 100, 3000])), min_size=1, max_size=8),
    padding=st.integers(0, 70),
    groups=st.sampled_from([1, 3, 4, 7, 16]),
    num_sms=st.sampled_from([1, 16, 132]),
    single=st.booleans(),
)
def test_all_work_is_listed_once(rows, padding, groups, num_sms, single):
    """Each token in one list; each block's keys in consecutive ranges, partial results apart, as merges say."""
    counts = [count for count, _ in rows]
    lens = [count + before for count, before in rows]
    config = WorkConfig(
        groups=groups,
        num_kv_heads=2,
        num_sms=num_sms,
        decode=gpu_tile(),
        prefill=None if single else gpu_tile(query_rows=64),
    )
    work = plan(counts, lens, sum(counts) + padding, config)
    starts = np.concatenate([[0], np.cumsum(counts)])
    blocks: dict[tuple[int, int], list[np.ndarray]] = {}
    for part in (work.decode, work.prefill):
        if part is None:
            continue
        merges = {tuple(merge[:2]): merge for merge in part.merges if merge[Merge.COUNT]}
        assert part.max_partials in (0, item_budget(part.tile, config))
        for item in part.items[: int(part.num_items)]:
            key = (int(item[Item.QUERY_START]), int(item[Item.QUERY_END]))
            blocks.setdefault(key, []).append(item)
            assert (key in merges) == (not item[Item.DIRECT])
        assert not part.items[int(part.num_items) :].any()
        partials = [int(i[Item.PARTIAL]) for i in part.items[: int(part.num_items)] if not i[Item.DIRECT]]
        assert sorted(partials) == list(range(len(partials)))
        assert len(partials) <= part.max_partials
        for key, merge in merges.items():
            found = sorted(int(item[Item.PARTIAL]) for item in blocks[key])
            assert found == list(range(merge[Merge.FIRST], merge[Merge.FIRST] + merge[Merge.COUNT]))
    assert np.concatenate([np.arange(*key) for key in sorted(blocks)]).tolist() == list(range(sum(counts) + padding))
    for (first, last), items in blocks.items():
        ranges = sorted((int(item[Item.KV_START]), int(item[Item.KV_END])) for item in items)
        assert [a for a, _ in ranges[1:]] == [b for _, b in ranges[:-1]]
        assert all(a % 32 == 0 for a, _ in ranges)
        row = int(items[0][Item.ROW])
        seen = 0 if first >= sum(counts) else lens[row] - int(starts[row + 1]) + last
        assert (ranges[0][0], ranges[-1][1]) == (0, seen)
        if seen:
            assert starts[row] <= first < last <= starts[row + 1]
            assert int(items[0][Item.POSITION]) == lens[row] - int(starts[row + 1]) + first


def test_a_tile_below_the_heads_is_refused():
    config = WorkConfig(groups=20, num_kv_heads=1, num_sms=1, decode=gpu_tile(), prefill=None)
    with pytest.raises(ValueError, match="20 query heads"):
        plan([1], [1], 1, config)
