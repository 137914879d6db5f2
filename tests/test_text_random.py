"""Random ids and stop strings: every way of pushing gives the tokenizer's own decode, cut at the stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.support.text import BYTE, SP, cut, run, stop_of
from tests.support.tokenizers import (
    BYTE_SIZE,
    SP_FIRST_BYTE,
    SP_SIZE,
)


def _lossy_sentencepiece(ids: Sequence[int], skip: bool) -> str:
    """What TOK-SP's ids spell, each run of byte tokens read as UTF-8 with replacement characters."""
    text, run_bytes = "", b""
    for one in ids:
        if SP_FIRST_BYTE <= one < SP_FIRST_BYTE + 256:
            run_bytes += bytes([one - SP_FIRST_BYTE])
        elif one < SP_SIZE and not (skip and one in SP.special_ids):
            text += run_bytes.decode(errors="replace") + (SP.backend.id_to_token(one) or "").replace("▁", " ")
            run_bytes = b""
    return (text + run_bytes.decode(errors="replace")).removeprefix(" ")


def _decoded(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    text = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    return _lossy_sentencepiece(ids, skip) if tokenizer is SP and "\ufffd" in text else text


def _visible(text: str, stops: Sequence[str]) -> str:
    """Without the longest end that begins a stop string."""
    longest = max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - longest]


def _ids(tokenizer: Tokenizer, size: int) -> st.SearchStrategy[list[int]]:
    """Any ids, padded ones too, mixed with the single bytes of whole characters."""
    offset = 0 if tokenizer is BYTE else SP_FIRST_BYTE
    spelt = st.sampled_from("ď한😀é \n\ufffd").map(lambda character: [byte + offset for byte in character.encode()])
    words = st.integers(256 + offset, size + 10).map(lambda one: [one])
    one = st.one_of(words, words, spelt, spelt, st.integers(0, size + 10).map(lambda one: [one]))
    return st.lists(one, max_size=12).map(lambda parts: [one for part in parts for one in part])


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    tokenizer, size = draw(st.sampled_from([(BYTE, BYTE_SIZE), (SP, SP_SIZE)]))
    ids, skip = draw(_ids(tokenizer, size)), draw(st.booleans())
    text = _decoded(tokenizer, ids, skip) or "x"
    spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 5)).map(lambda at: text[at[0] : at[0] + at[1]])
    near = spans.map(lambda span: span[:-1] + "~") | spans
    stops = draw(st.lists(near | st.text("ab <한", min_size=1, max_size=3), max_size=4))
    stops = [stop for stop in stops if tokenizer.backend.token_to_id(stop) not in tokenizer.special_ids]
    return {"tokenizer": tokenizer, "ids": ids, "skip": skip, "stops": stops, "chunk": draw(st.integers(1, 5))}


@given(case=_cases(), keep=st.booleans())
@example(case={"tokenizer": SP, "ids": [259, 259, 261], "skip": True, "stops": ["a"], "chunk": 2}, keep=False)
def test_random_sequences_equal_the_tokenizers_decode(case: dict[str, Any], keep: bool) -> None:
    tokenizer, ids, stops, skip = case["tokenizer"], case["ids"], case["stops"], case["skip"]
    wanted, stop = cut(_decoded(tokenizer, ids, skip), stops, keep)
    for chunk in (1, case["chunk"], None):
        result = run(tokenizer, ids, chunk=chunk, stop=stops, skip_special_tokens=skip, include_stop_str_in_output=keep)
        assert result.text == wanted
        assert stop_of(result) == stop


@given(case=_cases())
def test_every_prefix_shows_all_that_is_certain(case: dict[str, Any]) -> None:
    tokenizer, stops, skip = case["tokenizer"], case["stops"], case["skip"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops, skip_special_tokens=skip))
    for count, one in enumerate(case["ids"], start=1):
        match = detokenizer.push([one], ended=False)
        text = tokenizer.decode(case["ids"][:count], skip_special_tokens=skip)
        if match is not None or "\ufffd" in text:
            return
        assert detokenizer.text == _visible(text, stops)
