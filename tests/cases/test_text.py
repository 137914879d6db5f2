"""The text of scripted outputs: characters over several tokens, spaces, ids without a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import jaxpaged
from jaxpaged.sampling_params import SamplingParams
from tests.support.bigram import chain_checkpoint
from tests.support.driving import Arrival, answers, both_ways, greedy, run_arrivals
from tests.support.engines import small_llm
from tests.support.tokenizers import BYTE_EOS, SP_EOS, byte_tokenizer, multibyte_script, sentencepiece_tokenizer

PROMPT = [200]  # an id that no script below uses
MULTIBYTE = "a ď 한 😀 b"


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def multibyte(request, tmp_path_factory) -> jaxpaged.LLM:
    """A model that answers MULTIBYTE, each of its wide characters in single bytes, and then ends."""
    byte_level = request.param == "byte-level"
    tokenizer = byte_tokenizer(adds_bos=False) if byte_level else sentencepiece_tokenizer(adds_bos=False)
    eos = BYTE_EOS if byte_level else SP_EOS
    script = [*PROMPT, *multibyte_script(tokenizer), eos]
    path = tmp_path_factory.mktemp(request.param) / "model"
    return small_llm(chain_checkpoint(path, script, 320, tokenizer=tokenizer, eos=eos))


def script_of(llm: jaxpaged.LLM) -> list[int]:
    """The ids of MULTIBYTE as the model answers them."""
    return multibyte_script(llm.get_tokenizer().backend)


def test_characters_over_several_tokens_stream_whole(multibyte: jaxpaged.LLM):
    """Streams showed replacement characters for half characters, or lost them by comparing lengths of decoded text."""
    stream = both_ways(multibyte, PROMPT, max_tokens=40)
    assert stream.text == MULTIBYTE
    assert stream.token_ids[:-1] == script_of(multibyte)
    assert not any("\ufffd" in delta for delta in stream.deltas)
    assert [delta for delta in stream.deltas if "😀" in delta] == ["😀"]
    assert stream.finish_reason == "stop"


def test_an_end_inside_a_character_shows_one_replacement_character(multibyte: jaxpaged.LLM):
    """An answer cut inside an emoji ended in several replacement characters, or in none when it was streamed."""
    two_bytes_short = len(script_of(multibyte)) - 3  # the emoji's last two tokens and " b" are missing
    cut = both_ways(multibyte, PROMPT, max_tokens=two_bytes_short)
    assert cut.text == "a ď 한 \ufffd"
    assert cut.finish_reason == "length"
    assert [index for index, delta in enumerate(cut.deltas) if "\ufffd" in delta] == [len(cut.deltas) - 1]


def test_a_stop_string_of_several_tokens_in_one_character(multibyte: jaxpaged.LLM):
    """A stop string that is one character of three tokens was missed, or half of it was shown."""
    stream = both_ways(multibyte, PROMPT, max_tokens=40, stop=["한"])
    assert stream.text == "a ď "
    assert (stream.finish_reason, stream.last and stream.last.stop_reason) == ("stop", "한")


def test_half_characters_of_two_streams_do_not_mix(multibyte: jaxpaged.LLM):
    """Decoding state shared by a batch gave one request the bytes of another's unfinished character."""
    params = greedy(max_tokens=40)
    streams = run_arrivals(
        multibyte, [Arrival(step=step, name=str(step), prompt=PROMPT, params=params) for step in (0, 1, 2)]
    )
    assert {stream.text for stream in streams.values()} == {MULTIBYTE}


SPACES = {
    # a sentence with a space after the full stop; a leading space; two spaces; an added token, and a special one
    "sentence": [296, 289, 300, 302],
    "leading": [260, 272, 265, 314, 269, 274, 267],
    "double": [259, 261, 260, 262],
    "added": [296, 307, 302, 308, 300],
    "spaced-added": [296, 259, 307, 260, 269, 279],
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_are_those_of_one_shot_decoding(tmp_path: Path, name: str):
    """Token by token the space after a full stop was lost, a leading one kept, and added tokens got spaces around."""
    ids = SPACES[name]
    tokenizer = sentencepiece_tokenizer(adds_bos=False)
    path = chain_checkpoint(tmp_path / "model", [*PROMPT, *ids, SP_EOS], 320, tokenizer=tokenizer, eos=SP_EOS)
    llm = small_llm(path)
    reference = transformers.AutoTokenizer.from_pretrained(path)
    texts = []
    for skip in (True, False):
        stream = both_ways(llm, PROMPT, max_tokens=20, skip_special_tokens=skip)
        assert stream.token_ids == [*ids, SP_EOS]
        assert stream.text == reference.decode(ids, skip_special_tokens=skip)
        texts.append(stream.text)
    wanted = {
        "sentence": ["Hello. It is"] * 2,
        "leading": [" leading"] * 2,
        "double": ["a  b"] * 2,
        "added": ["Hello<t> is It", "Hello<t> is<|end|> It"],
        "spaced-added": ["Hello <t>  is"] * 2,
    }
    assert texts == wanted[name]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> jaxpaged.LLM:
    """A model of 340 ids under a tokenizer of 320; it answers "a", an id without a name, "b", and ends."""
    tokenizer = byte_tokenizer(adds_bos=False)
    path = tmp_path_factory.mktemp("wide") / "model"
    chain_checkpoint(path, [*PROMPT, ord("a"), 330, ord("b"), BYTE_EOS], 340, tokenizer=tokenizer, eos=BYTE_EOS)
    return small_llm(path, num_gpu_blocks_override=600, max_model_len=260)


def test_an_id_without_a_name_is_no_text(wide: jaxpaged.LLM):
    """An output layer wider than the tokenizer let an id be sampled whose decoding raised and ended everything."""
    stream = both_ways(wide, PROMPT, max_tokens=10)
    assert stream.token_ids == [ord("a"), 330, ord("b"), BYTE_EOS]
    assert (stream.text, stream.finish_reason) == ("ab", "stop")


def test_logprobs_show_an_id_without_a_name(wide: jaxpaged.LLM):
    """Looking up the spelling of an alternative that has none failed the request."""
    (completion,) = answers(wide, [PROMPT], greedy(max_tokens=10, logprobs=3))
    assert completion.logprobs is not None
    assert [next(iter(row.values())).decoded_token for row in completion.logprobs] == ["a", "", "b", "</s>"]
    assert completion.logprobs[1][330].rank == 1


def test_a_stop_string_around_an_id_without_a_name(wide: jaxpaged.LLM):
    """The nameless id between them must not part the two characters of a stop string."""
    stream = both_ways(wide, PROMPT, max_tokens=10, stop=["ab"])
    assert stream.token_ids == [ord("a"), 330, ord("b")]
    assert (stream.text, stream.last and stream.last.stop_reason) == ("", "ab")


def test_thousands_of_ids_drawn_almost_evenly(wide: jaxpaged.LLM):
    """At a high temperature every id comes up: none may end the request or disturb its neighbours."""
    params = SamplingParams(n=8, temperature=100, seed=5, max_tokens=250, ignore_eos=True)
    plain = greedy(max_tokens=10)
    hot, cool = wide.generate([PROMPT, PROMPT], [params, plain], use_tqdm=False)
    ids = [token for completion in hot.outputs for token in completion.token_ids]
    assert len(ids) == 2000
    assert sum(token >= 320 for token in ids) > 50
    assert cool.outputs[0].text == "ab"
    backend = wide.get_tokenizer().backend
    for completion in hot.outputs:
        assert completion.text == backend.decode(completion.token_ids, skip_special_tokens=True)
