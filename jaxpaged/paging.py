"""Block tables as a value: which sequence owns which KV blocks, with reference counts and an LRU free list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTables:
    """Who holds which block. Frozen: the arrays are read-only, so a StepPlan may keep them without a copy.

    S slots (rows), P blocks a row can hold, N blocks in the pool.
    Block 0 is the trash block: padding is written there, it is never handed out, and in the free list
    (a ring of links) it is the anchor: after[0] is handed out next, before[0] is handed out last.

    Example: block_size 4, slot 0 holding 6 tokens in blocks 3 and 1, nothing else:
    table[0] = [3, 1, 0, ...], lengths[0] = 2, refs[[3, 1]] = 1.
    """

    block_size: int  # tokens a block holds
    table: np.ndarray  # int32[S, P]; entries from lengths[slot] on are 0
    lengths: np.ndarray  # int32[S]; blocks held by the slot
    refs: np.ndarray  # int32[N]; how many slots hold the block
    after: np.ndarray  # int32[N]; free list, next block (meaningless for held blocks)
    before: np.ndarray  # int32[N]; free list, previous block (meaningless for held blocks)
    num_free: int
    num_shared: int  # blocks with refs > 1

    @classmethod
    def empty(cls, *, num_blocks: int, block_size: int, num_slots: int, blocks_per_slot: int) -> BlockTables:
        """Tables with every block but the trash block free. ValueError for a pool without a usable block."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the trash block), got {num_blocks}")
        if block_size < 1 or num_slots < 1 or blocks_per_slot < 1:
            raise ValueError(
                "block_size, num_slots and blocks_per_slot must be at least 1, "
                f"got {block_size}, {num_slots} and {blocks_per_slot}"
            )
        ids = np.arange(num_blocks, dtype=np.int32)
        return _frozen(
            BlockTables(
                block_size=block_size,
                table=np.zeros((num_slots, blocks_per_slot), np.int32),
                lengths=np.zeros(num_slots, np.int32),
                refs=np.zeros(num_blocks, np.int32),
                after=np.roll(ids, -1),
                before=np.roll(ids, 1),
                num_free=num_blocks - 1,
                num_shared=0,
            )
        )

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one slot."""
        return len(self.refs) - 1 - self.num_free

    def draft(self) -> TablesDraft:
        """A working copy. Arrays are copied at its first change; dropping it undoes everything."""
        return TablesDraft(self)

    def check(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        slots, width = self.table.shape
        lengths = self.lengths
        assert ((lengths >= 0) & (lengths <= width)).all(), f"lengths outside 0..{width}: {lengths}"
        used = np.arange(width) < lengths[:, None]
        assert not self.table[~used].any(), "an unused table entry is not the trash block"
        held = self.table[used]
        assert ((held > 0) & (held < self.num_blocks)).all(), "a row holds the trash block or an unknown block"
        assert (np.bincount(held, minlength=self.num_blocks) == self.refs).all(), "refs differ from the tables"
        for slot in range(slots):
            row = self.table[slot, : lengths[slot]]
            assert len(np.unique(row)) == len(row), f"slot {slot} holds a block twice: {row}"
        assert self.num_shared == np.count_nonzero(self.refs > 1), "num_shared differs from refs"
        self._check_free_list()

    def _check_free_list(self) -> None:
        seen = []
        block = int(self.after[0])
        while block != 0 and len(seen) <= self.num_blocks:
            assert self.before[self.after[block]] == block, f"free list is torn at block {block}"
            seen.append(block)
            block = int(self.after[block])
        assert len(seen) == self.num_free, f"free list has {len(seen)} blocks, num_free says {self.num_free}"
        free = np.flatnonzero(self.refs == 0)[1:]
        assert (np.sort(seen) == free).all(), "free list differs from the blocks nobody holds"


class TablesDraft:
    """A working copy of BlockTables with in-place operations; commit() turns it into a value.

    An operation that cannot be done leaves the draft as it was.
    """

    def __init__(self, base: BlockTables) -> None:
        self._base = base
        self._thawed = False
        self._block_size = base.block_size
        self._table = base.table
        self._refs = base.refs
        self._after = base.after
        self._before = base.before
        self._lengths: list[int] = base.lengths.tolist()
        self._fresh: list[int] = []
        self.num_free = base.num_free
        self.num_shared = base.num_shared

    @property
    def num_used(self) -> int:
        """Blocks held by at least one slot."""
        return len(self._refs) - 1 - self.num_free

    def row(self, slot: int) -> list[int]:
        """The blocks the slot holds, in token order."""
        return self._table[slot, : self._lengths[slot]].tolist()

    def num_free_in(self, block_ids: Sequence[int]) -> int:
        """How many of the (distinct) blocks are free now: attaching them takes that many from num_free."""
        return int(np.count_nonzero(self._refs[list(block_ids)] == 0)) if block_ids else 0

    def is_shared(self, slot: int, block_index: int) -> bool:
        """True when another slot holds the slot's block too, so it must not be written."""
        return bool(self._refs[self._table[slot, block_index]] > 1)

    def take_fresh(self) -> list[int]:
        """Blocks handed out since the last call: what an index says about their old content is now wrong."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Make the slot's blocks cover num_tokens tokens; False, and nothing done, when blocks are short."""
        held = self._lengths[slot]
        if num_tokens <= held * self._block_size:
            return True
        wanted = -(-num_tokens // self._block_size)
        if wanted - held > self.num_free:
            return False
        assert wanted <= self._table.shape[1], f"{num_tokens} tokens exceed the table's width"
        self._thaw()
        for index in range(held, wanted):
            self._table[slot, index] = self._pop()
        self._lengths[slot] = wanted
        return True

    def attach(self, slot: int, block_ids: Sequence[int]) -> None:
        """Append blocks (free but cached, or held by others) to the slot; the slot becomes one of their holders."""
        if not block_ids:
            return
        self._thaw()
        ids = np.asarray(block_ids, np.int32)
        for block in ids[self._refs[ids] == 0].tolist():
            self._unlink(block)
        self._refs[ids] += 1
        self.num_shared += int(np.count_nonzero(self._refs[ids] == 2))
        held = self._lengths[slot]
        self._table[slot, held : held + len(ids)] = ids
        self._lengths[slot] = held + len(ids)

    def share(self, source_slot: int, target_slot: int, num_blocks: int) -> None:
        """Append the first num_blocks blocks of the source slot to the target slot."""
        assert num_blocks <= self._lengths[source_slot], f"slot {source_slot} holds fewer than {num_blocks} blocks"
        self.attach(target_slot, self.row(source_slot)[:num_blocks])

    def privatise(self, slot: int, block_index: int) -> tuple[int, int] | None:
        """Copy-on-write: swap a shared block for a fresh one. (source, target) to copy, None if not shared.

        The caller makes sure that a block is free.
        """
        if not self.is_shared(slot, block_index):
            return None
        assert self.num_free > 0, "no free block for copy-on-write"
        self._thaw()
        source = int(self._table[slot, block_index])
        target = self._pop()
        self._table[slot, block_index] = target
        self._refs[source] -= 1
        self.num_shared -= int(self._refs[source] == 1)
        return source, target

    def release(self, slot: int, *, keep: int) -> None:
        """Give up all blocks of the slot.

        Of those nobody else holds, the first `keep` (worth finding again) go to the end of the free list,
        the row's last one first, so that a chain is taken apart from its tail; the others are reused next.
        """
        held = self._lengths[slot]
        if held == 0:
            return
        self._thaw()
        row = self._table[slot, :held].copy()
        self._refs[row] -= 1
        left = self._refs[row]
        self.num_shared -= int(np.count_nonzero(left == 1))
        self._splice(int(self._before[0]), row[:keep][left[:keep] == 0][::-1], 0)
        self._splice(0, row[keep:][left[keep:] == 0][::-1], int(self._after[0]))
        self._table[slot, :held] = 0
        self._lengths[slot] = 0

    def commit(self) -> BlockTables:
        """The draft as a frozen value. The draft must not be used afterwards."""
        if not self._thawed:
            return self._base
        return _frozen(
            BlockTables(
                block_size=self._block_size,
                table=self._table,
                lengths=np.array(self._lengths, np.int32),
                refs=self._refs,
                after=self._after,
                before=self._before,
                num_free=self.num_free,
                num_shared=self.num_shared,
            )
        )

    def _thaw(self) -> None:
        if self._thawed:
            return
        self._table = self._table.copy()
        self._refs = self._refs.copy()
        self._after = self._after.copy()
        self._before = self._before.copy()
        self._thawed = True

    def _pop(self) -> int:
        """Take the least recently freed block; its one holder is the caller."""
        block = int(self._after[0])
        self._unlink(block)
        self._refs[block] = 1
        self._fresh.append(block)
        return block

    def _unlink(self, block: int) -> None:
        left, right = self._before[block], self._after[block]
        self._after[left] = right
        self._before[right] = left
        self.num_free -= 1

    def _splice(self, left: int, chain: np.ndarray, right: int) -> None:
        """Insert the blocks of chain, in order, between two neighbours of the free list."""
        if len(chain) == 0:
            return
        self._after[left] = chain[0]
        self._before[chain[0]] = left
        self._after[chain[:-1]] = chain[1:]
        self._before[chain[1:]] = chain[:-1]
        self._after[chain[-1]] = right
        self._before[right] = chain[-1]
        self.num_free += len(chain)


def _frozen(tables: BlockTables) -> BlockTables:
    for array in (tables.table, tables.lengths, tables.refs, tables.after, tables.before):
        array.flags.writeable = False
    return tables
