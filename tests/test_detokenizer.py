"""Text of a growing sequence: whole characters, spaces, stop strings, deltas that join to the one-shot text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from jaxpaged.detokenizer import Detokenizer, StopMatch
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.stop_strings import resolve_stop_tokens
from jaxpaged.tokenizer import Tokenizer
from tests.support.tokenizers import (
    BYTE_END,
    BYTE_EOS,
    BYTE_SIZE,
    BYTE_TAG,
    SP_FIRST_BYTE,
    SP_SIZE,
    byte_tokenizer,
    multibyte_script,
    sentencepiece_tokenizer,
    spelled,
    token_id,
    wrapped,
)

BYTE = wrapped(byte_tokenizer(adds_bos=False), bos_id=None, eos_id=BYTE_EOS)
SP = wrapped(sentencepiece_tokenizer(adds_bos=False), bos_id=None, eos_id=2)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE, SP], ids=["byte-level", "sentencepiece"])


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


# --- holding back


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        ("xABCDEy", ["CDE"], "xAB", "CDE"),
        ("xABCDEy", ["yZZZ"], "xABCDEy", None),
        ("p\nq\n", ["\n<X>"], "p\nq\n", None),
        ("xABC", ["CDE"], "xABC", None),
        ("xABCD", ["CDE", "BCX"], "xABCD", None),
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xabcy", ["abd", "bcy"], "xa", "bcy"),
    ],
)
def test_stop_prefix_is_held_and_given_back(pieces: str, stops: list[str], text: str, found: str | None) -> None:
    """Pieces of a stop string leaked into the stream, or a tail that only looked like one was never sent."""
    ids = [ord(character) for character in pieces]
    result = both_modes(BYTE, ids, stop=stops)
    assert (result.text, stop_of(result)) == (text, found)
    assert result.num_tokens == (len(ids) if found is None else pieces.index(found) + len(found))


def test_text_is_visible_as_soon_as_it_cannot_be_a_stop_string() -> None:
    """A fixed hold-back of the stop string's length delays every token; a lone newline delta was even lost."""
    result = run(BYTE, [ord(c) for c in "xAB\nC<\n<Y"], chunk=1, ended=False, stop=["\n<X>", "BC"])
    assert result.deltas == ["x", "A", "", "B", "\nC", "<", "", "", "\n<Y"]


def test_held_text_is_not_in_text_before_the_end() -> None:
    detokenizer = Detokenizer(BYTE, SamplingParams(stop="CDE"))
    assert detokenizer.push([ord("A"), ord("C"), ord("D")], ended=False) is None
    assert detokenizer.text == "A"
    assert detokenizer.push([ord("x")], ended=True) is None
    assert detokenizer.text == detokenizer.take_delta() == "ACDx"


@pytest.mark.parametrize("hide_last", [False, True])
def test_held_text_is_given_back_whatever_ends_the_output(hide_last: bool) -> None:
    ids = [ord("x"), ord("C"), ord("D"), *([BYTE_EOS] if hide_last else [])]
    result = both_modes(BYTE, ids, stop=["CDE"], hide_last=hide_last)
    assert (result.text, result.match) == ("xCD", None)


# --- stop strings inside tokens


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "with_stop"),
    [
        (["sky", "?\n", "z"], "\n", "sky?", "sky?\n"),
        (["x", "end!ing", "z"], "d!", "xen", "xend!"),
        (["x", "end!ing", "z"], "end", "x", "xend"),
        (["sky", "?\n", "z"], "y?", "sk", "sky?"),
        (["hello", "the", "z"], "other", None, None),
        (["hello", " the", "z"], "o t", "hell", "hello t"),
    ],
)
def test_stop_string_may_begin_and_end_inside_a_token(
    pieces: list[str], stop: str, text: str | None, with_stop: str | None
) -> None:
    """Stops were seen at token borders only, or the good characters of the stopping token were lost in streams."""
    ids = spelled(BYTE.backend, pieces)
    for keep, wanted in ((False, text), (True, with_stop)):
        result = both_modes(BYTE, ids, stop=[stop], include_stop_str_in_output=keep)
        assert result.text == ("".join(pieces) if wanted is None else wanted)
        assert stop_of(result) == (None if wanted is None else stop)
        assert result.num_tokens == (len(ids) if wanted is None else 2)


def test_the_stop_string_completed_first_counts_and_the_longer_of_two() -> None:
    ids = spelled(BYTE.backend, ["x", "end!ing"])
    assert stop_of(both_modes(BYTE, ids, stop=["nd!in", "d!"])) == "d!"
    assert stop_of(both_modes(BYTE, ids, stop=["d!", "nd!"])) == "nd!"
    assert both_modes(BYTE, ids, stop=["d!", "nd!"]).text == "xe"


def test_stop_string_in_the_last_token_wins_over_the_length_limit() -> None:
    result = both_modes(BYTE, spelled(BYTE.backend, ["sky", "?\n"]), stop=["\n"], ended=True)
    assert (result.text, stop_of(result)) == ("sky?", "\n")


# --- special tokens


@pytest.mark.parametrize("skip", [True, False])
def test_stop_string_that_is_a_special_token(skip: bool) -> None:
    """Special tokens are not in the text, so that such a stop string was never found and generation ran on."""
    params = SamplingParams(stop=["<|end|>", "<t>", "zz"], skip_special_tokens=skip)
    assert resolve_stop_tokens(params, BYTE) == frozenset([BYTE_END])
    ids = [ord("h"), ord("i"), BYTE_END]
    for keep, text in ((False, "hi"), (True, "hi<|end|>")):
        result = both_modes(
            BYTE, ids, stop="<|end|>", skip_special_tokens=skip, include_stop_str_in_output=keep, hide_last=True
        )
        assert (result.text, stop_of(result), result.num_tokens) == (text, "<|end|>", 3)


def test_no_stop_token_without_such_a_string() -> None:
    assert resolve_stop_tokens(SamplingParams(stop=["<|end|> ", "h"]), BYTE) == frozenset()
    assert resolve_stop_tokens(SamplingParams(stop_token_ids=[7]), BYTE) == frozenset()


@pytest.mark.parametrize("skip", [True, False])
def test_stop_token_is_left_out_and_nothing_else(skip: bool) -> None:
    """The length of a special token's name was cut off the visible text although the name was never in it."""
    ids = [ord("h"), ord("i"), BYTE_END]
    result = both_modes(BYTE, ids, skip_special_tokens=skip, hide_last=True)
    assert (result.text, result.match) == ("hi", None)
    kept = both_modes(BYTE, ids, skip_special_tokens=skip, hide_last=True, include_stop_str_in_output=True)
    assert (kept.text, kept.match) == ("hi" if skip else "hi<|end|>", None)


def test_ordinary_stop_token_is_left_out_too() -> None:
    ids = [ord("h"), ord("i")]
    assert both_modes(BYTE, ids, hide_last=True).text == "h"
    assert both_modes(BYTE, ids, hide_last=True, include_stop_str_in_output=True).text == "hi"


# --- characters and spaces


@BOTH
def test_character_spread_over_tokens(tokenizer: Tokenizer) -> None:
    """Streams had replacement characters in them, and some finished characters were lost for good."""
    ids = multibyte_script(tokenizer.backend)
    result = both_modes(tokenizer, ids)
    assert result.text == tokenizer.decode(ids, skip_special_tokens=True) == "a ď 한 😀 b"
    assert all("\ufffd" not in delta for delta in result.deltas)
    assert [delta for delta in result.deltas if delta][-2:] == ["😀", " b"]
    stopped = both_modes(tokenizer, ids, stop=["한"])
    assert (stopped.text, stopped.num_tokens) == ("a ď ", 7)


@BOTH
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_end_inside_a_character_gives_one_replacement_character(tokenizer: Tokenizer, missing: int) -> None:
    ids = multibyte_script(tokenizer.backend)[: -1 - missing]
    result = both_modes(tokenizer, ids)
    assert result.text == "a ď 한 \ufffd"
    assert result.deltas[-1] == "\ufffd"
    assert "\ufffd" not in run(tokenizer, ids, chunk=1, ended=False).text
    first = token_id(tokenizer.backend, "</s>")
    assert both_modes(tokenizer, [*ids, first], hide_last=True).text == result.text


@BOTH
def test_two_sequences_do_not_share_state(tokenizer: Tokenizer) -> None:
    ids = multibyte_script(tokenizer.backend)
    pair = [Detokenizer(tokenizer, SamplingParams(stop=["zz"])) for _ in range(2)]
    for index, next_id in enumerate(ids):
        pair[0].push([next_id], ended=False)
        if index:
            pair[1].push([ids[index - 1]], ended=False)
    pair[1].push([ids[-1]], ended=False)
    assert [one.text for one in pair] == ["a ď 한 😀 b"] * 2


def test_valid_characters_beside_an_invalid_byte_survive() -> None:
    """Taking text back is impossible in a stream: one invalid byte must not spoil the byte tokens around it."""
    ids = [SP_FIRST_BYTE + byte for byte in b"A\xff\xf0\x9fB"]
    assert both_modes(SP, ids).text == "A\ufffd\ufffdB"
    assert both_modes(SP, ids, stop=["A"]).num_tokens == 1


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [
        ["▁Hello", ".", "▁It", "▁is"],
        ["▁▁", "l", "e", "ad"],
        ["▁", "▁l", "e"],
        ["▁", "a", "▁▁", "b"],
        ["▁x", "<t>", "▁y"],
        ["▁x", "▁", "<t>", "▁▁", "y"],
        ["<t>", "▁x"],
        ["</s>", "▁x", "<|end|>", "▁y", "<|end|>"],
        ["<0x20>", "▁x"],
        ["<0x0A>", "▁x"],
    ],
)
def test_sentencepiece_spaces_are_those_of_the_whole_decode(pieces: list[str], skip: bool) -> None:
    """Token-by-token decoding lost or doubled spaces, put some around added tokens, or kept the one in front."""
    ids = spelled(SP.backend, pieces)
    result = both_modes(SP, ids, skip_special_tokens=skip)
    assert result.text == SP.decode(ids, skip_special_tokens=skip)


def test_known_spaces() -> None:
    assert both_modes(SP, spelled(SP.backend, ["▁Hello", ".", "▁It", "▁is"])).text == "Hello. It is"
    assert both_modes(SP, spelled(SP.backend, ["▁▁", "l", "e", "ad"])).text == " lead"
    assert both_modes(SP, spelled(SP.backend, ["▁x", "<t>", "▁y"])).text == "x<t> y"
    assert both_modes(BYTE, [ord("x"), BYTE_TAG, *spelled(BYTE.backend, [" the"])]).text == "x<t> the"


@BOTH
def test_id_without_a_tokenizer_entry_is_empty(tokenizer: Tokenizer) -> None:
    """The model's vocabulary may be padded: such an id failed the whole request when it was sampled."""
    a, b = spelled(tokenizer.backend, ["a", "b"])
    assert both_modes(tokenizer, [a, 330, b]).text == "ab"
    assert both_modes(tokenizer, [330, a, 331]).text == "a"
    assert both_modes(tokenizer, [330], hide_last=True, include_stop_str_in_output=True).text == ""
    stopped = both_modes(tokenizer, [a, 330, b, a], stop=["ab"])
    assert (stopped.text, stopped.num_tokens) == ("", 3)
    script = multibyte_script(tokenizer.backend)
    assert both_modes(tokenizer, [x for known in script for x in (known, 335)]).text == "a ď 한 😀 b"


def test_without_text() -> None:
    for detokenizer in (Detokenizer(None, SamplingParams()), Detokenizer(BYTE, SamplingParams(detokenize=False))):
        assert detokenizer.push([65, 66], ended=False) is None
        assert detokenizer.push([BYTE_EOS], ended=True, hide_last=True) is None
        assert (detokenizer.text, detokenizer.take_delta()) == ("", "")


def test_time_grows_with_the_number_of_tokens_only() -> None:
    """Decoding everything anew for each token is quadratic; bytes that never form a character are the worst case."""
    detokenizer = Detokenizer(BYTE, SamplingParams(stop=["\ufffd\ufffd!"], max_tokens=None))
    start = time.monotonic()
    for _ in range(20_000):
        detokenizer.push([0xFF], ended=False)
        detokenizer.take_delta()
    assert detokenizer.text == "\ufffd" * 19_998
    assert time.monotonic() - start < 30


# --- min_tokens


def test_stop_string_inside_the_first_min_tokens_never_counts() -> None:
    """A stop string ended the output before min_tokens, or right after them for text that lay before."""
    ids = [ord(c) for c in "abab" + "xab"]
    for minimum, text, consumed in ((0, "", 2), (1, "", 2), (2, "ab", 4), (3, "ab", 4), (4, "ababx", 7), (7, None, 7)):
        result = both_modes(BYTE, ids, stop=["ab"], min_tokens=minimum)
        assert (result.text, result.num_tokens) == ("ababxab" if text is None else text, consumed)
        assert stop_of(result) == (None if text is None else "ab")


def test_stop_string_that_begins_in_the_first_min_tokens_counts_when_completed_later() -> None:
    result = both_modes(BYTE, [ord(c) for c in "xabc"], stop=["abc"], min_tokens=3)
    assert (result.text, result.num_tokens) == ("x", 4)


# --- other tokenizers


def _other_backends() -> list[tokenizers.Tokenizer]:
    words = ["▁", "▁a", "a", "##b", "b</w>", "c", "▁▁", ".", "\ufffd", "é", "<0x41>"]
    chosen = [
        None,
        decoders.WordPiece(cleanup=False),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace(Regex("▁+"), "_"), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ]
    backends = []
    for decoder in chosen:
        backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        if decoder is not None:
            backend.decoder = decoder
        backend.add_special_tokens(["</s>"])
        backends.append(backend)
    return backends


@pytest.mark.parametrize("backend", _other_backends(), ids=["none", "wordpiece", "bpe", "metaspace", "regex", "plain"])
@given(ids=st.lists(st.integers(0, 13), max_size=12), chunk=st.integers(1, 4), skip=st.booleans())
def test_any_other_decoder_gives_its_own_text(
    backend: tokenizers.Tokenizer, ids: list[int], chunk: int, skip: bool
) -> None:
    tokenizer = wrapped(backend, bos_id=None, eos_id=None)
    result = run(tokenizer, ids, chunk=chunk, skip_special_tokens=skip)
    assert result.text == tokenizer.decode(ids, skip_special_tokens=skip)


# --- random sequences against the tokenizer's own decode


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


def _cut(text: str, stops: Sequence[str], keep: bool) -> tuple[str, str | None]:
    """By trying every end in turn."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


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
    wanted, stop = _cut(_decoded(tokenizer, ids, skip), stops, keep)
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
