"""Token ids to text, a token at a time: whole characters, spaces, ids without an entry."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.support.text import BYTE, SP, both_modes, run
from tests.support.tokenizers import (
    BYTE_EOS,
    BYTE_SIZE,
    BYTE_TAG,
    SP_FIRST_BYTE,
    byte_tokenizer,
    multibyte_script,
    spelled,
    token_id,
    wrapped,
)

BOTH = pytest.mark.parametrize("tokenizer", [BYTE, SP], ids=["byte-level", "sentencepiece"])


def _other_backends() -> list[tokenizers.Tokenizer]:
    words = ["▁", "▁a", "a", "##b", "b</w>", "c", "▁▁", ".", "\ufffd", "é", "<0xC3>", "<0xA9>"]
    byte_runs = [decoders.ByteFallback(), decoders.Fuse()]
    chosen = [
        None,
        decoders.WordPiece(cleanup=False),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace(Regex("▁+"), "_"), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace(Regex("▁+"), "_"), *byte_runs]),
    ]
    backends = []
    for decoder in chosen:
        backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        if decoder is not None:
            backend.decoder = decoder
        backend.add_special_tokens(["</s>"])
        backends.append(backend)
    return backends


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


@pytest.mark.parametrize("tokenizer", [BYTE, wrapped(_other_backends()[0], bos_id=None, eos_id=None)])
def test_time_grows_with_the_number_of_tokens_only(tokenizer: Tokenizer) -> None:
    """Decoding everything anew for each token is quadratic; bytes that never form a character are the worst case."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["\ufffd\ufffd!"], max_tokens=None))
    halves = []
    for _ in range(2):
        start = time.thread_time()
        for _ in range(4_000):
            detokenizer.push([0xFF if tokenizer is BYTE else 1], ended=False)
            detokenizer.take_delta()
        halves.append(time.thread_time() - start)
    assert halves[1] < 2 * halves[0]  # quadratic: 3 times
    assert detokenizer.text == ("\ufffd" * 7_998 if tokenizer is BYTE else " ".join(["▁a"] * 8_000))


_OTHER_NAMES = ["none", "wordpiece", "bpe", "metaspace", "regex", "plain", "bytes"]


@pytest.mark.parametrize("backend", _other_backends(), ids=_OTHER_NAMES)
@given(ids=st.lists(st.integers(0, 14), max_size=12), chunk=st.integers(1, 4), skip=st.booleans())
@example(ids=[2, 10, 1, 0], chunk=1, skip=True)
def test_any_other_decoder_gives_its_own_text(
    backend: tokenizers.Tokenizer, ids: list[int], chunk: int, skip: bool
) -> None:
    tokenizer = wrapped(backend, bos_id=None, eos_id=None)
    ids = [part for one in ids for part in ([10, 11] if one in (10, 11) else [one])]  # whole characters only
    result = run(tokenizer, ids, chunk=chunk, skip_special_tokens=skip)
    assert result.text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_added_token_outside_the_byte_level_alphabet_stands_for_itself() -> None:
    backend = byte_tokenizer(adds_bos=False)
    backend.add_tokens(["한 x"])
    tokenizer = wrapped(backend, bos_id=None, eos_id=None)
    ids = [ord("a"), BYTE_SIZE, ord("b")]
    assert both_modes(tokenizer, ids).text == tokenizer.decode(ids, skip_special_tokens=True) == "a한 xb"
