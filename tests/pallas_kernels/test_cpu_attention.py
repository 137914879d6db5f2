"""A query's attention on a CPU is the same bits alone and in any chunk: what batch_invariant builds on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxpaged.pallas_kernels import plan_attention
from tests.support.attention import Case, Shape, make_case, run, suited

pytest.importorskip("numba")
LENGTH = 611
WHOLE = Shape(counts=[LENGTH], lens=[LENGTH], padding=0, padding_rows=0)
SHAPES = {
    "plain": WHOLE,
    "cap, sinks, ALiBi": dataclasses.replace(WHOLE, soft_cap=5.0, sinks=True, alibi=True, groups=3, head_dim=80),
    "narrow window": dataclasses.replace(WHOLE, window=37),
    "wide window": dataclasses.replace(WHOLE, window=300, groups=7),
    "blocks of 12": dataclasses.replace(WHOLE, window=300, block_size=12, head_dim=48),
    "one head, blocks of 8": dataclasses.replace(WHOLE, window=290, block_size=8, groups=1, kv_heads=1),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pieces", [[1] * LENGTH, [7] * 87 + [2], [100, 200, 300, 11]], ids=["1", "7", "uneven"])
def test_pieces_change_no_bit(name: str, pieces: list[int]) -> None:
    case = make_case(suited(SHAPES[name], "numba"))
    assert np.array_equal(run(_in_pieces(case, pieces), "numba"), run(case, "numba"))


def _in_pieces(case: Case, pieces: list[int]) -> Case:
    """The one sequence as several rows, each of which goes on where the one before ends."""
    ends = np.cumsum(pieces)
    batch = plan_attention(
        block_tables=np.tile(np.asarray(case.batch.block_tables), (len(pieces), 1)),
        kv_lens=ends.astype(np.int32),
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        num_rows=len(pieces),
        num_tokens=LENGTH,
        tiles=case.batch.tiles,
    )
    return dataclasses.replace(case, batch=batch)
