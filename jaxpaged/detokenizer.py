"""The text of one sequence as its tokens arrive: stop strings, streaming deltas, nothing shown and taken back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from jaxpaged.stop_strings import START, StopStrings, stop_token_strings
from jaxpaged.token_decoder import token_decoder

if TYPE_CHECKING:
    from jaxpaged.sampling_params import SamplingParams
    from jaxpaged.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """A stop string ended the output."""

    stop: str
    num_tokens: int  # of the pushed ids, those up to and including the one that completed it; later ones do not count


@final
class Detokenizer:
    """Owned by the engine's output side, one for each sequence.

    Text becomes visible once it can no longer be part of a stop string and its characters are complete; `text` and
    the joined deltas are always the same. The text is the tokenizer's decode of the output ids, cut at the first
    stop string to be completed. If two are completed by the same character, the longer one counts.

    A stop string that is completed by one of the first min_tokens tokens does not end the output, then or later;
    one that begins there and is completed afterwards does.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        """Without a tokenizer, or with detokenize=False, the text stays empty."""
        self._decoder = None
        self._stop_tokens: dict[int, str] = {}
        if tokenizer is not None and params.detokenize:
            self._decoder = token_decoder(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between=params.skip_special_tokens or params.spaces_between_special_tokens,
            )
            self._stop_tokens = stop_token_strings(params, tokenizer)
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stops = StopStrings(params.stop_strings)
        self._state = START
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._text = ""  # visible, as far as it was asked for
        self._unread: list[str] = []  # visible since `text` was last asked for
        self._untaken: list[str] = []  # visible since the last delta
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int], *, ended: bool, hide_last: bool = False) -> StopMatch | None:
        """Add output tokens; returns the match if a stop string ends the output here, and then nothing may follow.

        ended: generation is over after these tokens (end-of-sequence, stop token, length, abort): what is held back
        becomes visible. A match has precedence over that reason: the sequence finishes with reason "stop".
        hide_last: the last id is the end-of-sequence or stop token that ended it; its text is left out, unless
        include_stop_str_in_output. If that token is a stop string spelled as one special token, it counts as a match
        of that string.
        """
        assert not self._ended, "tokens pushed after the end"
        assert ended or not hide_last, "only the last token of a sequence can be hidden"
        if self._decoder is None:
            self._ended = ended
            return None
        shown = token_ids[:-1] if hide_last else token_ids
        for count, token_id in enumerate(shown, start=1):
            self._num_tokens += 1
            stop = self._show(self._decoder.feed(token_id))
            if stop is not None:
                return StopMatch(stop=stop, num_tokens=count)
        if not ended:
            return None
        return self._finish(token_ids, hide_last=hide_last)

    def fork(self) -> Detokenizer:
        """A copy that goes on with other tokens."""
        twin = copy.copy(self)
        twin._decoder = None if self._decoder is None else self._decoder.fork()
        twin._unread, twin._untaken = list(self._unread), list(self._untaken)
        return twin

    @property
    def text(self) -> str:
        """All visible text so far. After the end: the whole text."""
        self._text += "".join(self._unread)
        self._unread.clear()
        return self._text

    def take_delta(self) -> str:
        """The text that became visible since the last call."""
        delta = "".join(self._untaken)
        self._untaken.clear()
        return delta

    def _show(self, new: str) -> str | None:
        """Make `new` visible except for what may begin a stop string; the stop string if it completes one."""
        eligible = self._num_tokens > self._min_tokens
        for position, character in enumerate(new, start=1):
            self._state = self._stops.advance(self._state, character)
            stop = self._stops.completed(self._state)
            if eligible and stop is not None:
                self._cut(self._held + new[:position], stop)
                return stop
        text = self._held + new
        visible = len(text) - self._stops.held(self._state)
        self._held = text[visible:]
        self._append(text[:visible])
        return None

    def _cut(self, text: str, stop: str) -> None:
        """End with `text`, which ends with `stop`."""
        self._append(text if self._keep_stop else text.removesuffix(stop))
        self._held = ""
        self._ended = True

    def _finish(self, token_ids: Sequence[int], *, hide_last: bool) -> StopMatch | None:
        assert self._decoder is not None
        stop = self._show(self._decoder.finish())
        if stop is not None:
            return StopMatch(stop=stop, num_tokens=len(token_ids) - hide_last)
        self._append(self._held)
        self._held = ""
        self._ended = True
        if not hide_last:
            return None
        last = token_ids[-1]
        if last in self._stop_tokens:
            stop = self._stop_tokens[last]
            self._append(stop if self._keep_stop else "")
            return StopMatch(stop=stop, num_tokens=len(token_ids))
        if self._keep_stop:
            self._append(self._decoder.feed(last) + self._decoder.finish())
        return None

    def _append(self, text: str) -> None:
        self._unread.append(text)
        self._untaken.append(text)
