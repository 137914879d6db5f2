"""Driving a detokenizer in tests: token by token or at once, deltas checked against the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.detokenizer import Detokenizer, StopMatch
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.support.tokenizers import BYTE_EOS, SP_EOS, byte_tokenizer, sentencepiece_tokenizer, wrapped

BYTE = wrapped(byte_tokenizer(adds_bos=False), bos_id=None, eos_id=BYTE_EOS)
SP = wrapped(sentencepiece_tokenizer(adds_bos=False), bos_id=None, eos_id=SP_EOS)


@dataclass(frozen=True, kw_only=True)
class Result:
    text: str
    deltas: list[str]
    match: StopMatch | None
    num_tokens: int  # consumed


def run(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    chunk: int | None,
    ended: bool = True,
    hide_last: bool = False,
    **params: Any,
) -> Result:
    """Push ids in chunks (None: all at once), taking a delta after each; the last chunk ends the sequence."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
    deltas, consumed, step = [], 0, chunk or max(len(ids), 1)
    for start in range(0, len(ids), step):
        part = list(ids[start : start + step])
        last = start + step >= len(ids)
        match = detokenizer.push(part, ended=ended and last, hide_last=hide_last and last)
        deltas.append(detokenizer.take_delta())
        assert detokenizer.text == "".join(deltas)
        if match is not None:
            return Result(text=detokenizer.text, deltas=deltas, match=match, num_tokens=consumed + match.num_tokens)
        consumed += len(part)
    return Result(text=detokenizer.text, deltas=deltas, match=None, num_tokens=consumed)


def both_modes(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> Result:
    """Token by token, checked to give the same as all at once."""
    streamed, whole = run(tokenizer, ids, chunk=1, **options), run(tokenizer, ids, chunk=None, **options)
    assert streamed.text == whole.text
    assert streamed.num_tokens == whole.num_tokens
    assert (streamed.match is None) == (whole.match is None)
    if streamed.match and whole.match:
        assert streamed.match.stop == whole.match.stop
    return streamed


def stop_of(result: Result) -> str | None:
    return None if result.match is None else result.match.stop


def cut(text: str, stops: Sequence[str], keep: bool) -> tuple[str, str | None]:
    """(text up to the first stop string, that string): every end in turn, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None
