"""Prefix cache: finds KV blocks that already hold a sequence's first tokens, by a chain of hashes."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Iterable

from jaxpaged.request import Request


class HashChain:
    """The keys of one request's full blocks, worked out once and kept while the request lives.

    Key i = sha256(key i-1, token ids of block i as 8-byte integers); key -1 = sha256(request.cache_key).
    Equal keys therefore mean equal tokens from position 0 to the block's end and an equal cache key.
    Example: block_size 4, tokens 0..9: two keys, for tokens 0..3 and 0..7; tokens 8 and 9 have none.
    """

    def __init__(self, cache_key: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._root = hashlib.sha256(cache_key).digest()
        self._keys: list[bytes] = []
        self.num_indexed = 0  # leading blocks of the request already offered to the index

    def copy(self) -> HashChain:
        """For a request that has the same tokens so far, and the same blocks."""
        twin = copy.copy(self)
        twin._keys = list(self._keys)
        return twin

    def keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """Keys of the request's first num_blocks blocks, all of whose tokens the host must know."""
        while len(self._keys) < num_blocks:
            start = len(self._keys) * self._block_size
            tokens = request.known_tokens(start, start + self._block_size)
            assert len(tokens) == self._block_size, f"block {len(self._keys)} of {request.request_id} is not full"
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.sha256(parent + array("q", tokens).tobytes()).digest())
        return self._keys[:num_blocks]


class PrefixCache:
    """Index from block key to the block that holds those tokens' KV.

    A block stays listed while it is held and while it waits in the free list; it must be forgotten in the
    moment it is handed out anew. Nothing but the keys is compared: they are collision-proof.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks that can be hit."""
        return frozenset(self._key_of)

    def longest_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks for the leading keys that are listed; the first miss ends it."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, key: bytes, block: int) -> None:
        """List a block whose content has been computed by an earlier step; the first block of a key stays."""
        if key in self._block_of:
            return
        assert block not in self._key_of, f"block {block} is listed under another key"
        self._block_of[key] = block
        self._key_of[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the entries of blocks that are about to get new content; unlisted blocks are fine."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def clear(self) -> None:
        """Drop every entry."""
        self._block_of.clear()
        self._key_of.clear()

    def check(self) -> None:
        """Raise AssertionError when the two directions of the index disagree."""
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "index is not one to one"
