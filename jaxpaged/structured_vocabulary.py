"""A tokenizer as llguidance wants it: the bytes of every token, an end of its own and canonical token ids of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import tokenizers

from jaxpaged.token_decoder import token_bytes
from jaxpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_ANCHOR = "\x02"  # stands before a text that is encoded as if it were in the middle of another


@final
class StructuredVocabulary:
    """What structures are matched against: built once for an engine (0.1 s for 50,000 tokens).

    Attributes:
      tokenizer: llguidance's view. Its ids are the model's and one more, `end_id`, which is allowed where a structure
        may end. So the same view serves requests that end at different ids, and models that know no end at all.
      end_id: the vocabulary size of the model.
      stripped: what a text loses at its beginning when it is decoded, "" for most tokenizers.

    Special tokens stand for nothing that text could match; an id without an entry in the tokenizer is never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: rows of the model's embedding. ValueError for a tokenizer whose tokens have no fixed bytes."""
        from llguidance import LLTokenizer, TokenizerWrapper

        found = token_bytes(tokenizer, vocab_size)
        if found is None:
            raise ValueError(
                "structured_outputs need a byte-level or a sentencepiece tokenizer, whose tokens stand for the same "
                "bytes everywhere; this model's has another kind of decoder"
            )
        pieces, self.stripped = found
        self.end_id = vocab_size
        source = _Source(tokenizer, pieces, self.end_id)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(source))


@final
class _Source:
    """The attributes that TokenizerWrapper reads, and encoding by calling."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.tokens = [*pieces, b"<end>"]
        self.special_token_ids = [*(i for i in tokenizer.special_ids if i < end_id), end_id]
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True  # "</s>" in a structure is five characters, not the end
        special = tokenizer.special_ids
        self._ids = {piece: i for i, piece in reversed([*enumerate(pieces)]) if piece and i not in special}
        self._longest = max(map(len, self._ids))
        adds_something = self._bytes(self._encode("a")) != b"a"
        self._anchor = self._encode(_ANCHOR) if adds_something else []

    def __call__(self, text: str) -> list[int]:
        """Token ids of text that has other text before it; they stand for exactly its bytes."""
        ids = self._encode(_ANCHOR + text)[len(self._anchor) :] if self._anchor else self._encode(text)
        # Sentencepiece tokenizers put a space after added tokens, too.
        return ids if self._bytes(ids) == text.encode() else self._greedy(text.encode())

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[token_id] if token_id < len(self.tokens) else b"" for token_id in ids)

    def _greedy(self, rest: bytes) -> list[int]:
        """The longest token each time."""
        ids: list[int] = []
        while rest:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._ids), None)
            if size is None:
                return []
            ids.append(self._ids[rest[:size]])
            rest = rest[size:]
        return ids
