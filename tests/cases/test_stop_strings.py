"""Stop strings through the whole engine, streamed and whole: what is shown, what is held back, what the ids are."""

from __future__ import annotations

import pytest

import jaxpaged
from tests.support.bigram import bigram_checkpoint, chain_table
from tests.support.driving import Arrival, both_ways, greedy, run_arrivals
from tests.support.engines import small_llm
from tests.support.tokenizers import BYTE_END, BYTE_EOS, byte_tokenizer, spelled

TOKENIZER = byte_tokenizer(adds_bos=False)
SCRIPTS = {
    200: ["x", "A", "B", "C", "D", "E", "y"],
    201: ["p", "\n", "q"],
    202: ["sky", "?\n", "z"],
    203: ["the", "end!ing", "w"],
    204: ["h", "i", BYTE_END, "j", "k"],
}  # by the prompt that each of them answers


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> jaxpaged.LLM:
    chains = [[prompt, *spelled(TOKENIZER, pieces), BYTE_EOS] for prompt, pieces in SCRIPTS.items()]
    path = tmp_path_factory.mktemp("stops") / "model"
    return small_llm(bigram_checkpoint(path, chain_table(chains), 320, tokenizer=TOKENIZER, eos=BYTE_EOS))


@pytest.mark.parametrize(
    ("prompt", "stop", "max_tokens", "text", "num_tokens", "reason"),
    [
        (200, "CDE", 20, "xAB", 6, "stop"),
        (200, "yZZZ", 20, "xABCDEy", 8, "stop"),  # by the end-of-sequence token
        (200, "CDE", 5, "xABCD", 5, "length"),
        (201, "\n<X>", 20, "p\nq", 4, "stop"),
        (201, "\n<X>", 2, "p\n", 2, "length"),
        (202, "\n", 20, "sky?", 2, "stop"),
        (203, "d!", 20, "theen", 2, "stop"),
    ],
)
def test_what_may_be_a_stop_string_is_held_and_given_back(
    llm: jaxpaged.LLM, prompt: int, stop: str, max_tokens: int, text: str, num_tokens: int, reason: str
):
    """The first pieces of a stop string leaked into the stream, or what only looked like one was never sent."""
    stream = both_ways(llm, [prompt], stop=[stop], max_tokens=max_tokens)
    assert (stream.text, stream.finish_reason) == (text, reason)
    assert stream.token_ids == [*spelled(TOKENIZER, SCRIPTS[prompt]), BYTE_EOS][:num_tokens]


def test_the_stop_string_can_be_kept(llm: jaxpaged.LLM):
    """The rest of the token that completed the stop string came along."""
    stream = both_ways(llm, [203], stop=["d!"], include_stop_str_in_output=True, max_tokens=20)
    assert stream.text == "theend!"
    assert stream.last is not None and stream.last.stop_reason == "d!"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_stop(llm: jaxpaged.LLM, skip: bool):
    """A special token's name is not in the text, so it never stopped; or its length was cut off the good text."""
    for options, reason in (({"stop": ["<|end|>"]}, "<|end|>"), ({"stop_token_ids": [BYTE_END]}, BYTE_END)):
        stream = both_ways(llm, [204], skip_special_tokens=skip, max_tokens=20, **options)
        assert (stream.text, stream.finish_reason) == ("hi", "stop")
        assert stream.token_ids == spelled(TOKENIZER, ["h", "i", BYTE_END])
        assert stream.last is not None and stream.last.stop_reason == reason


def test_requests_of_one_batch_keep_their_own_stops(llm: jaxpaged.LLM):
    """What one request held back was delivered to another."""
    asked = [
        (200, "CDE", "xAB"),
        (200, "yZZZ", "xABCDEy"),
        (202, "\n", "sky?"),
        (203, "d!", "theen"),
        (201, "q", "p\n"),
    ]
    arrivals = [
        Arrival(step=index % 3, name=str(index), prompt=[prompt], params=greedy(stop=[stop], max_tokens=20))
        for index, (prompt, stop, _) in enumerate(asked)
    ]
    streams = run_arrivals(llm, arrivals)
    assert [streams[str(index)].text for index in range(len(asked))] == [text for *_, text in asked]
