"""Owner of the KV blocks: block tables and prefix cache moved together, one request at a time."""

from __future__ import annotations

from jaxpaged.paging import BlockTables, TablesDraft
from jaxpaged.prefix_cache import HashChain, PrefixCache
from jaxpaged.request import Request


class BlockManager:
    """Gives blocks to requests, shares computed ones and takes them back.

    Invariants: a block is listed in the prefix cache only when a dispatched (or just planned) step writes all
    of it, and never while it is handed out for new content; after each planned step the block a row has written to
    is its own alone. Of shared blocks only full ones are not copied in time: beams claim() what they write.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_slots: int, max_model_len: int, enable_prefix_caching: bool
    ) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._blank = BlockTables.empty(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            blocks_per_slot=-(-max_model_len // block_size),
        )
        self._tables = self._blank
        self._open: TablesDraft | None = None
        self._cache = PrefixCache() if enable_prefix_caching else None
        self._chains: dict[str, HashChain] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.blocks_reused = 0
        self.peak_used = 0
        self.peak_shared = 0

    @property
    def num_used(self) -> int:
        return (self._open or self._tables).num_used

    @property
    def num_shared(self) -> int:
        return (self._open or self._tables).num_shared

    def figures(self) -> dict[str, int]:
        """Gauges and counters under the names of SchedulerStats."""
        return {
            "num_blocks": self.num_usable,
            "blocks_used": self.num_used,
            "blocks_used_peak": self.peak_used,
            "blocks_shared": self.num_shared,
            "blocks_shared_peak": self.peak_shared,
            "blocks_reused": self.blocks_reused,
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
        }

    def track(self, request: Request) -> None:
        """Start keeping the request's block keys."""
        if self._cache is not None:
            self._chains[request.request_id] = HashChain(request.cache_key, self.block_size)

    def forget(self, request: Request) -> None:
        """Stop keeping the request's block keys."""
        self._chains.pop(request.request_id, None)

    def track_fork(self, parent: Request, child: Request) -> None:
        """As track(), with the keys of the parent's blocks, whose tokens are the child's, too."""
        if self._cache is not None:
            if parent.slot is not None:
                self.index(parent)
            self._chains[child.request_id] = self._chains[parent.request_id].copy()

    def admit(self, request: Request, slot: int) -> int | None:
        """Blocks for all tokens of a request, cached ones first: how many leading tokens are already computed.

        None, and nothing changed, when blocks are short. At least the last token is always left to compute.
        Example: block_size 4, 8 tokens seen before: 1 cached block, 4 tokens computed (not 8: the last token's
        logits are needed, and hits are whole blocks).
        """
        draft = self._draft()
        hits = self._lookup(request)
        wanted = -(-request.num_tokens // self.block_size) - len(hits)
        if wanted > draft.num_free - draft.num_free_in(hits):
            return None
        draft.attach(slot, hits)
        covered = self.grow(slot, request.num_tokens)
        assert covered, "blocks were counted and are short all the same"
        computed = len(hits) * self.block_size
        self.blocks_reused += len(hits)
        if self._cache is not None:
            self._chains[request.request_id].num_indexed = len(hits)
            self.prefix_queries += request.num_tokens
            self.prefix_hits += computed
        return computed

    def fork(self, source_slot: int, request: Request, slot: int) -> tuple[tuple[int, int], ...] | None:
        """Blocks for a sample of the same prompt: the source's, except the one the last prompt token goes to.

        Returns the block copies (source, target) the step has to make first; None, and nothing changed, when no
        block is free. Example: block_size 4, prompt of 6: block 0 (tokens 0-3) is shared; block 1 (tokens 4, 5)
        is copied and token 5 computed again. Prompt of 5: block 0 is shared, a fresh block takes token 4.
        """
        draft = self._draft()
        if draft.num_free < 1:
            return None
        computed = request.num_prompt - 1
        shared = -(-computed // self.block_size)
        draft.share(source_slot, slot, shared)
        self.blocks_reused += shared
        if computed % self.block_size == 0:
            covered = self.grow(slot, request.num_prompt)
            assert covered, "a block was free and is not"
            return ()
        copy = draft.privatise(slot, shared - 1)
        self._forget_fresh(draft)
        assert copy is not None, "a block just shared has one holder"
        return (copy,)

    def share(self, request: Request, slot: int) -> None:
        """Give an idle slot all the request's blocks, the partly filled one included: see claim()."""
        assert request.slot is not None, f"{request.request_id} holds no blocks"
        blocks = self._draft().row(request.slot)
        self._draft().attach(slot, blocks)
        self.blocks_reused += len(blocks)

    def claim(self, request: Request, count: int) -> tuple[tuple[int, int], ...] | None:
        """Blocks of its own for a request's next tokens: fresh ones, and a copy of a shared one that is partly filled.

        Returns the block copies the step has to make first; None, and nothing changed, when blocks are short.
        Example: block_size 4, two beams of 6 tokens share blocks 1 and 2. Who claims first gets (2, 3) to copy and
        holds 1 and 3; the other then is alone with block 2, and writes to it.
        """
        assert request.slot is not None, f"{request.request_id} holds no blocks"
        draft, (index, filled) = self._draft(), divmod(request.num_computed, self.block_size)
        if not filled or not draft.is_shared(request.slot, index):
            return () if self.grow(request.slot, request.num_computed + count) else None
        assert count == 1, f"{request.request_id} shares the block that a chunk begins in"
        if not draft.num_free:
            return None
        copy = draft.privatise(request.slot, index)
        self._forget_fresh(draft)
        assert copy is not None, "a shared block has one holder"
        return (copy,)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make the slot's blocks cover num_tokens tokens; False, and nothing changed, when blocks are short."""
        draft = self._draft()
        if not draft.reserve(slot, num_tokens):
            return False
        self._forget_fresh(draft)
        return True

    def index(self, request: Request) -> None:
        """List the request's full, computed (or just planned) blocks whose tokens the host knows."""
        if self._cache is None:
            return
        assert request.slot is not None, f"{request.request_id} holds no blocks"
        chain = self._chains[request.request_id]
        known = request.num_prompt + len(request.output_ids)
        full = min(request.num_computed, known) // self.block_size
        if full <= chain.num_indexed:
            return
        blocks = self._draft().row(request.slot)
        keys = chain.keys(request, full)
        for i in range(chain.num_indexed, full):
            self._cache.insert(keys[i], blocks[i])
        chain.num_indexed = full

    def unlist(self, request: Request) -> None:
        """Make every block the request holds unfindable, for good: its content is wrong."""
        assert request.slot is not None, f"{request.request_id} holds no blocks"
        if self._cache is not None:
            blocks = self._draft().row(request.slot)
            self._cache.forget(blocks)
            self._chains[request.request_id].num_indexed = len(blocks)  # nothing is left to list

    def release(self, request: Request) -> None:
        """Take the request's blocks back; its full blocks stay findable until they are handed out again."""
        assert request.slot is not None, f"{request.request_id} holds no blocks"
        self.index(request)
        keep = 0
        if self._cache is not None:
            chain = self._chains[request.request_id]
            keep, chain.num_indexed = chain.num_indexed, 0
        self._draft().release(request.slot, keep=keep)

    def commit(self) -> BlockTables:
        """The tables as they stand, frozen: what a step plan carries."""
        if self._open is not None:
            self._tables = self._open.commit()
            self._open = None
            self.peak_used = max(self.peak_used, self._tables.num_used)
            self.peak_shared = max(self.peak_shared, self._tables.num_shared)
        return self._tables

    def restart(self) -> None:
        """Every block is free and none can be hit: what they hold is lost. Requests' block keys are kept."""
        self._open, self._tables = None, self._blank
        for chain in self._chains.values():
            chain.num_indexed = 0
        if self._cache is not None:
            self._cache.clear()

    def reset_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing done, while a request holds blocks."""
        if self.num_used:
            return False
        if self._cache is not None:
            self._cache.clear()
        return True

    def check(self) -> BlockTables:
        """Raise AssertionError on a broken invariant; returns the tables for further checks."""
        tables = self.commit()
        tables.check()
        if self._cache is not None:
            self._cache.check()
            assert 0 not in self._cache.blocks, "the trash block can be hit"
        return tables

    def _draft(self) -> TablesDraft:
        if self._open is None:
            self._open = self._tables.draft()
        return self._open

    def _lookup(self, request: Request) -> list[int]:
        if self._cache is None or not request.params.reads_prefix_cache:
            return []
        # What is read off the prompt has to be computed, and so has the last token.
        unread = request.next_to_read
        most = min(request.num_tokens - 1, request.num_tokens if unread is None else unread) // self.block_size
        return self._cache.longest_prefix(self._chains[request.request_id].keys(request, most))

    def _forget_fresh(self, draft: TablesDraft) -> None:
        """Unlist blocks at once when they are handed out: a later look-up in the same step must not hit them."""
        fresh = draft.take_fresh()
        if fresh and self._cache is not None:
            self._cache.forget(fresh)
