"""Token ids to text, a token at a time: only whole characters come out, and nothing is ever taken back."""

from __future__ import annotations

import codecs
import copy
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from jaxpaged.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8, hence also tokens


class TokenDecoder(ABC):
    """State of one sequence. The joined results are the text of all ids, as the tokenizer itself decodes them."""

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """The characters that this token completes; "" for an id without an entry in the vocabulary."""

    @abstractmethod
    def finish(self) -> str:
        """One replacement character if the ids ended inside a character, else ""."""

    @abstractmethod
    def fork(self) -> TokenDecoder:
        """A copy that goes on with other tokens."""


def token_decoder(tokenizer: Tokenizer, *, skip_special_tokens: bool, spaces_between: bool) -> TokenDecoder:
    """A decoder for one sequence: exact for byte-level and sentencepiece tokenizers, by windows for any other.

    spaces_between=False: an added token right after another one gets no space in front, which some tokenizers put
    between all tokens. Byte-level and sentencepiece ones never do.
    """
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    found = _piece_reader(tokenizer)
    if found is None:
        glued = {} if spaces_between else tokenizer.added_tokens
        return _WindowDecoder(tokenizer, hidden, glued)
    return _BytesDecoder(tokenizer, hidden, *found)


def token_bytes(tokenizer: Tokenizer, size: int) -> tuple[list[bytes], str] | None:
    """What tokens 0 to size - 1 stand for, wherever they occur (b"" for an id without an entry); and what a text loses.

    The second is the string that is taken off a text's beginning, "" for most tokenizers, " " for sentencepiece ones.
    None when tokens have no bytes of their own: neither a byte-level nor a sentencepiece tokenizer.
    """
    found = _piece_reader(tokenizer)
    if found is None:
        return None
    piece, (stripped, count) = found
    names = map(tokenizer.backend.id_to_token, range(size))
    return [b"" if name is None else piece(name) for name in names], stripped * count


def _piece_reader(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], tuple[str, int]] | None:
    """Token name to bytes, and which character is stripped from a text's start how often at most."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_piece, ("", 0)
    if _is_sentencepiece(steps):
        strip = steps[-1] if kinds[-1] == "Strip" else {"content": "", "start": 0}
        replacements = [(step["pattern"]["String"], step["content"]) for step in steps if "pattern" in step]
        return functools.partial(_sentencepiece_piece, replacements), (strip["content"], strip["start"])
    return None


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder as tokenizer.json writes them; [] if it has none."""
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Replacements of fixed strings, then ByteFallback and Fuse, then perhaps a strip at the start of the text."""
    kinds = [step["type"] for step in steps]
    replacements = kinds.count("Replace")
    if kinds[replacements:] not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return False
    fixed = all("String" in step["pattern"] for step in steps[:replacements])
    return fixed and (kinds[-1] != "Strip" or steps[-1]["stop"] == 0)


def _byte_level_piece(token: str) -> bytes:
    """Bytes of a token written in the byte-level alphabet, one character for each byte."""
    alphabet = _byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # an added token with other characters stands for itself
        return token.encode()


def _sentencepiece_piece(replacements: Sequence[tuple[str, str]], token: str) -> bytes:
    """Bytes of a token written plainly, with a mark for spaces; "<0x41>" is the byte 0x41."""
    for old, new in replacements:
        token = token.replace(old, new)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    return token.encode()


@final
class _BytesDecoder(TokenDecoder):
    """Each token stands for bytes; their concatenation is read as UTF-8.

    Bytes that are no UTF-8 become one replacement character for each maximal invalid piece, as with byte-level
    tokenizers everywhere. Sentencepiece tokenizers decode otherwise there: one invalid byte spoils the whole run
    of byte tokens around it, valid characters included. That would take back text that was delivered, so it is
    not followed; ids that spell valid UTF-8 decode the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        hidden: frozenset[int],
        piece: Callable[[str], bytes],
        strip: tuple[str, int],
    ) -> None:
        self._name = tokenizer.backend.id_to_token
        self._hidden = hidden
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stripped, self._to_strip = strip  # character, and how many of it may still go from the text's start

    def feed(self, token_id: int) -> str:
        name = None if token_id in self._hidden else self._name(token_id)
        if name is None:
            return ""
        return self._strip(self._utf8.decode(self._piece(name)))

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def fork(self) -> TokenDecoder:
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        twin._utf8.setstate(self._utf8.getstate())
        return twin

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._stripped):
                self._to_strip = 0
                break
            text = text.removeprefix(self._stripped)
            self._to_strip -= 1
        return text


@final
class _WindowDecoder(TokenDecoder):
    """For other tokenizers: decodes the last few ids with the tokenizer and takes what is new.

    The window begins with the ids that gave the last characters, so that spaces between tokens come out as in
    the whole text. It is short: its ids all belong to a character or two.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], glued: Mapping[int, str]) -> None:
        """glued: tokens that are their text alone, whatever the tokenizer puts in front, after another one of them."""
        self._backend = tokenizer.backend
        self._hidden = hidden
        self._glued = glued
        self._after_glued = False
        self._ids: list[int] = []
        self._known = 0  # how many of _ids are decoded already, to _text
        self._text = ""

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden or self._backend.id_to_token(token_id) is None:
            return ""
        after_glued, self._after_glued = self._after_glued, token_id in self._glued
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if after_glued and self._after_glued:
            self._take(text)
            return self._glued[token_id]
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._known < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._ids))

    def fork(self) -> TokenDecoder:
        twin = copy.copy(self)
        twin._ids = list(self._ids)
        return twin

    def _take(self, text: str) -> str:
        new = text[len(self._text) :]
        if self._known < len(self._ids):
            self._ids = self._ids[self._known :]
            self._known = len(self._ids)
            self._text = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
