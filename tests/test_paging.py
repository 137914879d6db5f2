"""Block tables: reservations, sharing, copy-on-write, the order blocks are reused in, and values that stay."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jaxpaged.paging import BlockTables, TablesDraft


def tables(*, num_blocks: int = 8, block_size: int = 4, num_slots: int = 3, blocks_per_slot: int = 6) -> BlockTables:
    return BlockTables.empty(
        num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, blocks_per_slot=blocks_per_slot
    )


def test_reserve_covers_the_tokens_and_no_more() -> None:
    draft = tables().draft()
    assert draft.reserve(0, 1) and draft.row(0) == [1]
    assert draft.reserve(0, 4) and draft.row(0) == [1]
    assert draft.reserve(0, 5) and draft.row(0) == [1, 2]
    assert draft.reserve(1, 9) and draft.row(1) == [3, 4, 5]
    value = draft.commit()
    value.check()
    assert value.num_used == 5 and value.num_free == 2
    assert value.table[0].tolist() == [1, 2, 0, 0, 0, 0]


def test_a_failed_reservation_changes_nothing() -> None:
    """Half of the blocks stayed with the row when the pool ran out on the way."""
    draft = tables().draft()
    assert draft.reserve(0, 20)
    assert not draft.reserve(1, 9)
    assert draft.row(1) == [] and draft.num_free == 2
    assert draft.reserve(1, 8)
    draft.commit().check()


def test_dropping_a_draft_undoes_it_and_values_never_change() -> None:
    """A plan in flight read block tables that the next step had already changed."""
    empty = tables()
    first = empty.draft()
    first.reserve(0, 8)
    one = first.commit()
    kept = one.table.copy()
    second = one.draft()
    second.release(0, keep=0)
    second.reserve(1, 16)
    assert (one.table == kept).all() and one.lengths[0] == 2
    one.check()
    empty.check()
    assert empty.num_used == 0
    with pytest.raises(ValueError, match="read-only"):
        one.table[0, 0] = 5


def test_a_draft_without_changes_commits_to_the_same_value() -> None:
    value = tables()
    assert value.draft().commit() is value


def test_blocks_come_back_least_recently_used_first_and_tails_before_heads() -> None:
    """The head of a cached prompt was reused before its tail, which made the whole prompt unfindable."""
    draft = tables().draft()
    draft.reserve(0, 12)  # blocks 1 2 3
    draft.reserve(1, 8)  # blocks 4 5; 6 and 7 were never used
    draft.release(0, keep=3)
    draft.release(1, keep=2)
    draft.reserve(2, 24)
    assert draft.row(2) == [6, 7, 3, 2, 1, 5]


def test_blocks_not_worth_keeping_are_reused_first() -> None:
    draft = tables().draft()
    draft.reserve(0, 12)
    draft.release(0, keep=1)  # 1 is cached, 2 and 3 are not
    draft.reserve(1, 24)
    assert set(draft.row(1)[:2]) == {2, 3} and draft.row(1)[-1] != 1
    draft.commit().check()


def test_shared_blocks_live_until_their_last_holder_goes() -> None:
    draft = tables().draft()
    draft.reserve(0, 8)
    draft.share(0, 1, 2)
    assert draft.row(1) == [1, 2] and draft.num_shared == 2 and draft.num_used == 2
    draft.release(0, keep=0)
    assert draft.num_shared == 0 and draft.num_used == 2
    draft.release(1, keep=0)
    assert draft.num_used == 0
    draft.commit().check()


def test_attach_takes_a_free_block_out_of_the_free_list() -> None:
    """A cached block was hit while it waited in the free list and then handed out to another request."""
    draft = tables().draft()
    draft.reserve(0, 8)
    draft.release(0, keep=2)
    assert draft.num_free_in([1, 2]) == 2
    draft.attach(1, [1])
    assert draft.num_free_in([1, 2]) == 1
    assert draft.reserve(2, 24)
    assert 1 not in draft.row(2) and draft.num_free == 0
    draft.commit().check()


def test_privatise_copies_only_shared_blocks() -> None:
    draft = tables().draft()
    draft.reserve(0, 8)
    assert draft.privatise(0, 1) is None
    draft.share(0, 1, 2)
    assert draft.privatise(1, 1) == (2, 3)
    assert draft.row(0) == [1, 2] and draft.row(1) == [1, 3]
    assert draft.is_shared(0, 0) and not draft.is_shared(0, 1)
    draft.commit().check()


def test_fresh_blocks_are_reported_once() -> None:
    draft = tables().draft()
    draft.reserve(0, 8)
    assert draft.take_fresh() == [1, 2]
    assert draft.take_fresh() == []
    draft.share(0, 1, 2)
    assert draft.take_fresh() == []
    draft.privatise(1, 0)
    assert draft.take_fresh() == [3]


@pytest.mark.parametrize("sizes", [{"num_blocks": 1}, {"block_size": 0}, {"num_slots": 0}, {"blocks_per_slot": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        tables(**sizes)


def test_check_finds_broken_tables() -> None:
    """check() is what other tests rely on, so each kind of damage has to be seen."""
    draft = tables().draft()
    draft.reserve(0, 8)
    draft.share(0, 1, 1)
    good = draft.commit()
    good.check()
    damages = {
        "refs": lambda t: t["refs"].__setitem__(1, 1),
        "trash": lambda t: t["table"].__setitem__((0, 1), 0),
        "twice": lambda t: (t["table"].__setitem__((0, 1), 1), t["refs"].__setitem__([1, 2], [3, 0])),
        "unused": lambda t: t["table"].__setitem__((2, 0), 3),
        "torn": lambda t: t["before"].__setitem__(4, 7),
        "lengths": lambda t: t["lengths"].__setitem__(0, 9),
        "num_free": lambda t: t.__setitem__("num_free", 4),
        "num_shared": lambda t: t.__setitem__("num_shared", 0),
    }
    for word, damage in damages.items():
        parts: dict[str, Any] = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in vars(good).items()}
        damage(parts)
        with pytest.raises(AssertionError, match=word):
            BlockTables(**parts).check()


def _random_operation(draft: TablesDraft, draw: random.Random, slots: int) -> None:
    slot = draw.randrange(slots)
    match draw.randrange(5):
        case 0 | 1:
            draft.reserve(slot, draw.randint(1, 24))
        case 2:
            draft.release(slot, keep=draw.randint(0, 6))
        case 3:
            other = (slot + 1) % slots
            if not draft.row(other):
                draft.share(slot, other, draw.randint(0, len(draft.row(slot))))
        case _:
            if draft.row(slot) and draft.num_free:
                draft.privatise(slot, draw.randrange(len(draft.row(slot))))


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_every_invariant(seed: int) -> None:
    draw = random.Random(seed)
    value = tables(num_blocks=12)
    for _ in range(400):
        draft = value.draft()
        for _ in range(draw.randint(1, 4)):
            _random_operation(draft, draw, 3)
        if draw.random() < 0.7:
            value = draft.commit()
        value.check()
