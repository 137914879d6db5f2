"""Searching a growing text for stop strings, a character at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from jaxpaged.sampling_params import SamplingParams
    from jaxpaged.tokenizer import Tokenizer

START = 0  # state of a StopStrings automaton before any text


@final
class StopStrings:
    """Aho-Corasick automaton: one dictionary step per character, however many stop strings there are.

    A state stands for the longest end of the text so far that begins a stop string. Immutable once built, so the
    samples of a request can share it. Example with ("ab", "bcd"): after "xa" the state is "a"; after "xab" it is
    "ab", which completes the stop string "ab" (and whose end "b" begins "bcd").
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [START]  # the longest proper end of a state that is a state, too
        self._completed: list[str | None] = [None]
        self._held = [0]
        for string in strings:
            self._insert(string)
        self._link(self._depths())

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self._next[state]:
            if state == START:
                return START
            state = self._fallback[state]
        return self._next[state][character]

    def completed(self, state: int) -> str | None:
        """The longest stop string that the text ends with, if any."""
        return self._completed[state]

    def held(self, state: int) -> int:
        """How many characters at the end of the text may be the beginning of a stop string (not a whole one)."""
        return self._held[state]

    def _insert(self, string: str) -> None:
        state = START
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(START)
                self._completed.append(None)
                self._held.append(0)
            state = self._next[state][character]
        self._completed[state] = string

    def _depths(self) -> list[int]:
        """Length of the text each state stands for; a child's index is above its parent's."""
        depths = [0] * len(self._next)
        for state, children in enumerate(self._next):
            for child in children.values():
                depths[child] = depths[state] + 1
        return depths

    def _link(self, depths: Sequence[int]) -> None:
        """Fill the fallbacks and what depends on them, shortest states first."""
        queue = deque([START])
        while queue:
            state = queue.popleft()
            shorter = self._fallback[state]
            self._completed[state] = self._completed[state] or self._completed[shorter]
            self._held[state] = depths[state] if self._next[state] else self._held[shorter]
            for character, child in self._next[state].items():
                queue.append(child)
                if state != START:
                    self._fallback[child] = self.advance(shorter, character)


def resolve_stop_tokens(params: SamplingParams, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the stop strings that are spelled exactly like one special token.

    The engine ends a request at these ids as at params.stop_token_ids. Special tokens are left out of the text, so
    that a search in the text would never see them. A stop string that mixes a special token with other text is
    searched in the text only, and so is seen with skip_special_tokens=False only.
    """
    return frozenset(stop_token_strings(params, tokenizer))


def stop_token_strings(params: SamplingParams, tokenizer: Tokenizer) -> dict[int, str]:
    """The ids of resolve_stop_tokens, each with its stop string."""
    found = ((tokenizer.backend.token_to_id(string), string) for string in params.stop_strings)
    return {
        token_id: string for token_id, string in found if token_id is not None and token_id in tokenizer.special_ids
    }
