"""Structured outputs: what the tokens of a request may be, so that its text has the form that was asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, final

import numpy as np

from jaxpaged.structured_grammar import grammar_text, preceded
from jaxpaged.structured_params import FORMS, StructuredOutputsParams
from jaxpaged.structured_vocabulary import StructuredVocabulary
from jaxpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_GRAMMARS = 64  # compiled ones that are kept; a typical one is some hundred kilobytes
_LONGEST_LINE = 200  # characters of a line of llguidance's messages, and lines of one, that are passed on
_MOST_LINES = 10


@final
class StructuredOutputs:
    """The structures of one engine. Compiled grammars are kept by their content, the latest used ones.

    Any thread may ask for constraints; each of these is then used by one at a time. The first request with a structure
    pays for the vocabulary, each new structure for its grammar: about a millisecond for a typical schema, up to a
    second for an extremely complex one.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """vocab_size: rows of the model's embedding."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: StructuredVocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_compiled(self) -> int:
        """Grammars that are kept."""
        return len(self._compiled)

    def constraint(self, params: StructuredOutputsParams, ending_ids: frozenset[int]) -> GrammarConstraint:
        """A sequence's constraint at its beginning. Each sequence needs its own.

        ending_ids: what may be sampled where the structure may end: the request's end-of-sequence and stop ids.
        Raises ValueError, naming the field and what is wrong, for a structure that cannot be compiled.
        """
        if self._tokenizer is None:
            raise ValueError(
                "structured_outputs need a tokenizer, and this engine was built with skip_tokenizer_init=True"
            )
        field = next(name for name in FORMS if getattr(params, name) is not None)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = StructuredVocabulary(self._tokenizer, self._vocab_size)
            try:
                matcher = self._matcher(grammar_text(params), self._vocabulary)
            except ValueError as error:
                raise ValueError(f"structured_outputs: {field} cannot be compiled: {_shortened(str(error))}") from None
            return GrammarConstraint(matcher.deep_copy(), self._vocab_size, ending_ids)

    def _matcher(self, grammar: str, vocabulary: StructuredVocabulary) -> LLMatcher:
        """The compiled grammar, which is never advanced itself."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = _compile(grammar, vocabulary)
            if len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found


@final
class GrammarConstraint:
    """Where one sequence stands in its structure. A TokenConstraint.

    `failure` says why nothing fits any more, None while all is well: the structure became too complex to follow, or
    a token was accepted that does not belong there. Then no token is allowed.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ending_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ending_ids = ending_ids
        self._ended = False  # an ending id was accepted
        self._mask: np.ndarray | None = None  # of the present state, uint32, with the vocabulary's private end id
        self.failure: str | None = None

    def fill(self, row: np.ndarray) -> None:
        """Write the tokens allowed next: bit i % 32 of row[i // 32], uint32[ceil(V / 32)], stands for token i."""
        row[:] = 0
        if self._ended:
            return
        mask = self._allowed()
        whole, rest = divmod(self._vocab_size, 32)
        row[:whole] = mask[:whole]
        if rest:
            row[whole] = mask[whole] & np.uint32((1 << rest) - 1)
        if self._may_end():
            for token_id in self._ending_ids:
                row[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def accept(self, token_id: int) -> None:
        """Go on by a token that was chosen from what fill allowed."""
        ends = token_id in self._ending_ids and self._may_end()
        self._mask = None
        if ends:
            self._ended = True
        elif self.failure is None and not self._matcher.consume_token(token_id):
            self._fail()

    @property
    def finished(self) -> bool:
        """Whether nothing but an end can follow."""
        return self._ended or (
            self._matcher.is_accepting() and self._may_end() and int(np.bitwise_count(self._allowed()).sum()) == 1
        )

    def forced(self) -> list[int]:
        """The token ids that must come next, spelled as the tokenizer spells their text; [] where there is a choice."""
        return [] if self._ended or self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def fork(self) -> GrammarConstraint:
        """The same state for another sequence with the same tokens."""
        copy = GrammarConstraint(self._matcher.deep_copy(), self._vocab_size, self._ending_ids)
        copy._ended, copy.failure = self._ended, self.failure
        return copy

    def _may_end(self) -> bool:
        end, mask = self._vocab_size, self._allowed()
        return bool(mask[end >> 5] >> np.uint32(end & 31) & 1)

    def _allowed(self) -> np.ndarray:
        """The mask of the present state, bit V standing for an end; all zeros after a failure."""
        if self._mask is None:
            mask = np.zeros((self._vocab_size >> 5) + 1, np.uint32)
            if self.failure is None:
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if self._matcher.is_error():
                    self._fail()
                    mask[:] = 0
            self._mask = mask
        return self._mask

    def _fail(self) -> None:
        self.failure = _shortened(self._matcher.get_error())


def _compile(grammar: str, vocabulary: StructuredVocabulary) -> LLMatcher:
    """The grammar at its beginning; where texts lose something at their beginning, with that in front."""
    compiled = _checked(grammar, vocabulary)
    stripped = vocabulary.stripped
    if not stripped:
        return compiled
    # A text that begins with what is stripped needs it twice; any other may have it or not, as the model likes.
    optional = compiled.validate_tokens(vocabulary.tokenizer.tokenize_str(stripped)) == 0
    return _checked(preceded(grammar, stripped, optional=optional), vocabulary)


def _checked(grammar: str, vocabulary: StructuredVocabulary) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _shortened(message: str) -> str:
    """Without the middle of long lines: these repeat what was given, which may be very long."""
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:100]} … {line[-50:]}" for line in message.splitlines()]
    return "\n".join(lines[:_MOST_LINES]).strip()
