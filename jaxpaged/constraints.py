"""Which tokens a request may have next: packed masks, and rules that follow what was generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from jaxpaged.sampling_params import SamplingParams
    from jaxpaged.tokenizer import Tokenizer

WORD_BITS = 32
_EVERYTHING = np.uint32(0xFFFFFFFF)


@runtime_checkable
class TokenConstraint(Protocol):
    """A rule for one sequence's next token that depends on the tokens before it.

    Its mask is asked for when all earlier tokens have been accepted. Several rules of a request are intersected.
    """

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token, uint32[ceil(V / 32)]: bit i of word w is token 32 w + i, 1 may come."""
        ...

    def accept(self, token_id: int) -> None:
        """The sequence's next token is this one; also called for the token that ends it."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, in order; [] where there is a choice, or where it is not known."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the output is complete: the request ends with "stop", whatever it might sample next."""
        ...


def mask_words(vocab_size: int) -> int:
    """Words of a packed mask."""
    return -(-vocab_size // WORD_BITS)


def pack(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The mask in which these ids alone are set, uint32[ceil(V / 32)]."""
    bits = np.zeros(mask_words(vocab_size) * WORD_BITS, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def forbid(row: np.ndarray, ids: Iterable[int]) -> None:
    """Clear the bits of these ids."""
    for token_id in ids:
        row[token_id // WORD_BITS] &= ~(np.uint32(1) << np.uint32(token_id % WORD_BITS))


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What a request's parameters say about its tokens, made once for all its samples."""

    allowed: np.ndarray | None  # packed: tokens that may come at all; None: all of them
    sequences: tuple[tuple[int, ...], ...]  # token sequences of two ids or more that must not be generated

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> TokenRules:
        """Raises ValueError for bad words without a tokenizer, and when no token is left."""
        spellings = _spellings(params.words, tokenizer) if params.words else ()
        banned = [ids[0] for ids in spellings if len(ids) == 1]
        if params.allowed_token_ids is None and not banned:
            allowed = None
        else:
            ids = params.allowed_token_ids
            allowed = pack(range(vocab_size) if ids is None else ids, vocab_size)
            forbid(allowed, banned)
            if not allowed.any():
                raise ValueError("allowed_token_ids: bad_words forbid every one of them; no token is left")
        return cls(allowed=allowed, sequences=tuple(ids for ids in spellings if len(ids) > 1))

    def constraint(self) -> TokenConstraint | None:
        """A rule for one more sample; None where none depends on what was generated."""
        return together([BadWords(self.sequences)] if self.sequences else [])


def together(constraints: Sequence[TokenConstraint]) -> TokenConstraint | None:
    """One constraint for several; None for none."""
    if len(constraints) < 2:
        return constraints[0] if constraints else None
    return _Together(constraints)


@final
class BadWords:
    """Bans the last id of a sequence where the ids before it have just been generated; the parts stay usable."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._sequences = sequences
        self._longest = max(map(len, sequences)) - 1
        self._recent: tuple[int, ...] = ()

    def fill(self, row: np.ndarray) -> None:
        row[:] = _EVERYTHING
        recent = self._recent
        forbid(row, (ids[-1] for ids in self._sequences if recent[-(len(ids) - 1) :] == ids[:-1]))

    def accept(self, token_id: int) -> None:
        self._recent = (*self._recent, token_id)[-self._longest :]

    def forced(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return False


@final
class _Together:
    """The intersection of several constraints."""

    def __init__(self, constraints: Sequence[TokenConstraint]) -> None:
        self._constraints = constraints

    def fill(self, row: np.ndarray) -> None:
        first, *others = self._constraints
        first.fill(row)
        for constraint in others:
            part = np.empty_like(row)
            constraint.fill(part)
            row &= part

    def accept(self, token_id: int) -> None:
        for constraint in self._constraints:
            constraint.accept(token_id)

    def forced(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return any(constraint.finished for constraint in self._constraints)


def _spellings(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The words' token ids, each word bare and after a space, at the start of a text and within one.

    Tokenizers may put a space before the first word of a text: what follows a line break is the spelling within.
    """
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer, and this engine was built with skip_tokenizer_init=True")
    found: dict[tuple[int, ...], None] = {}
    break_ids = tokenizer.encode("\n", add_special_tokens=False)
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
            within = tokenizer.encode("\n" + text, add_special_tokens=False)
            if within[: len(break_ids)] == break_ids:
                found[tuple(within[len(break_ids) :])] = None
    return tuple(ids for ids in found if ids)
