"""Stop strings and special tokens: where the text is cut, what is held back, deltas that join to the text."""

from __future__ import annotations

import pytest

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.stop_strings import resolve_stop_tokens
from tests.support.text import BYTE, both_modes, run, stop_of
from tests.support.tokenizers import (
    BYTE_END,
    BYTE_EOS,
    spelled,
)


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


def test_stop_string_inside_the_first_min_tokens_never_counts() -> None:
    """A stop string ended the output before min_tokens, or right after them for text that lay before."""
    ids = [ord(c) for c in "abab" + "xab"]
    for minimum, text, consumed in ((0, "", 2), (1, "", 2), (2, "ab", 4), (3, "ab", 4), (4, "ababx", 7), (7, None, 7)):
        result = both_modes(BYTE, ids, stop=["ab"], min_tokens=minimum)
        assert (result.text, result.num_tokens) == ("ababxab" if text is None else text, consumed)
        assert stop_of(result) == (None if text is None else "ab")


def test_stop_string_that_does_not_count_is_not_held() -> None:
    result = run(BYTE, [ord(c) for c in "ab?"], chunk=1, ended=False, stop=["ab"], min_tokens=4)
    assert result.deltas == ["", "ab", "?"]


def test_stop_string_that_begins_in_the_first_min_tokens_counts_when_completed_later() -> None:
    result = both_modes(BYTE, [ord(c) for c in "xabc"], stop=["abc"], min_tokens=3)
    assert (result.text, result.num_tokens) == ("x", 4)
