"""bad_words: both spellings, several tokens, one request and not its neighbours; masks by allowed_token_ids."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged.constraints import TokenRules, pack
from jaxpaged.sampling_params import SamplingParams
from tests.support.bigram import bigram_checkpoint
from tests.support.driving import Arrival, answer, answers, greedy, run_arrivals
from tests.support.engines import WAYS_TO_STEP, small_llm
from tests.support.sampling_reference import greedy_tokens
from tests.support.tokenizers import byte_tokenizer, sentencepiece_tokenizer, spelled, wrapped

TOKENIZER = byte_tokenizer(adds_bos=False)


def ids(*pieces: str) -> list[int]:
    return spelled(TOKENIZER, pieces)


def model(path: Path, scripts: list[tuple[str, str, float]], **options: Any) -> jaxpaged.LLM:
    """A model in which a token's successors have these logits."""
    table: dict[int, dict[int, float]] = {}
    for last, following, logit in scripts:
        table.setdefault(ids(last)[0], {})[ids(following)[0]] = logit
    return small_llm(bigram_checkpoint(path, table, 320, tokenizer=TOKENIZER), **options)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> jaxpaged.LLM:
    scripts = [
        ("A", " bad", 20), ("A", "A", 10), ("B", "b", 20), ("b", "ad", 20), ("b", "c", 10), ("h", "ad", 20),
        ("X", "x", 20), ("x", " ", 20), ("Z", "z", 20), ("z", " ", 20), (" ", "y", 20), (" ", "w", 10),
        ("ad", ".", 20), (" bad", ".", 20), ("c", ".", 20), ("y", ".", 20), ("w", ".", 20), (".", ".", 20),
    ]  # fmt: skip
    return model(tmp_path_factory.mktemp("words") / "model", scripts)


def test_both_spellings_are_banned(llm: jaxpaged.LLM):
    """A word was banned in the spelling of a text's start alone: the one after a space, often one token, came out."""
    for prompt, usual, instead in (("A", " bad", "A"), ("B", "b", "b")):
        assert answer(llm, ids(prompt), max_tokens=1).token_ids == ids(usual)
        assert answer(llm, ids(prompt), max_tokens=1, bad_words=["bad"]).token_ids == ids(instead)
        assert answer(llm, ids(prompt), max_tokens=1, bad_words=[" bad"]).token_ids == ids(instead)
    assert answer(llm, ids("B"), max_tokens=3).text == "bad."
    assert answer(llm, ids("B"), max_tokens=3, bad_words=["bad"]).text == "bc."


def test_parts_of_a_bad_word_stay_usable(llm: jaxpaged.LLM):
    """All tokens of a banned word were banned everywhere, instead of its last one after the others."""
    assert answer(llm, ids("h"), max_tokens=2, bad_words=["bad"]).text == "ad."
    for prompt, text in (("X", "x w."), ("Z", "z y.")):
        assert answer(llm, ids(prompt), max_tokens=4, bad_words=["x y"]).text == text
    # What is in the prompt was not generated: "x " + "y" is no banned output.
    assert answer(llm, ids("X", "x", " "), max_tokens=2, bad_words=["x y"]).text == "y."


def test_one_request_with_and_one_without(llm: jaxpaged.LLM):
    """A batch's bad words were those of any of its rows."""
    words = [["bad"], [], ["x y"], ["bad", "x y"]]
    params = [greedy(max_tokens=4, bad_words=each) for each in words]
    for prompt, texts in (("B", ["bc..", "bad..", "bad..", "bc.."]), ("X", ["x y.", "x y.", "x w.", "x w."])):
        assert [found.text for found in answers(llm, [ids(prompt)] * 4, params)] == texts


def test_spellings_within_a_sentencepiece_text():
    """The tokenizer puts a space before a text: the word after a bracket is spelled otherwise, and slipped through."""
    backend = sentencepiece_tokenizer(adds_bos=True)
    tokenizer = wrapped(backend, bos_id=1, eos_id=2)
    rules = TokenRules.of(SamplingParams(bad_words=["bad"]), tokenizer, 320)
    assert rules.allowed is not None
    singles = np.flatnonzero(np.unpackbits(rules.allowed.view(np.uint8), bitorder="little")[:320] == 0)
    assert singles.tolist() == spelled(backend, ["▁bad"])
    assert tuple(spelled(backend, ["b", "ad"])) in rules.sequences


def test_what_cannot_be_banned_is_refused(llm: jaxpaged.LLM, tmp_path: Path):
    with pytest.raises(ValueError, match="no token is left"):
        llm.generate([ids("A")], greedy(bad_words=["h"], allowed_token_ids=ids("h")), use_tqdm=False)
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        TokenRules.of(SamplingParams(bad_words=["a"]), None, 320)


def test_allowed_tokens_alone_can_come(llm: jaxpaged.LLM):
    """The best token overall came although it was not among the allowed ones."""
    assert answer(llm, ids("B"), max_tokens=3, allowed_token_ids=ids("b", "c", ".")).text == "bc."
    assert answer(llm, ids("A"), max_tokens=6, allowed_token_ids=ids("A", ".")).token_ids == ids("A") * 6


# ---- late sampling: masks that depend on the token before


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(3).normal(0.0, 2.0, (320, 320)).astype(np.float32)


@pytest.mark.parametrize("options", WAYS_TO_STEP.values(), ids=WAYS_TO_STEP.keys())
def test_masks_follow_the_newest_token(tmp_path: Path, table: np.ndarray, options: dict[str, Any]):
    """Steps run ahead of the tokens: a mask made from all tokens but the newest let banned pairs through."""
    rows = {last: {j: float(value) for j, value in enumerate(row)} for last, row in enumerate(table)}
    llm = small_llm(bigram_checkpoint(tmp_path / "model", rows, 320, tokenizer=TOKENIZER), **options)
    plain = greedy(max_tokens=20, allowed_token_ids=list(range(33, 127)))
    free = greedy_tokens(table, [65], plain)
    words = ["".join(map(chr, free[at : at + 2])) for at in (1, 4, 9)]
    sequences = TokenRules.of(SamplingParams(bad_words=words), llm.get_tokenizer(), 320).sequences
    assert {tuple(word.encode()) for word in words} <= set(sequences)
    arrivals = [
        Arrival(
            step=index,
            name=str(index),
            prompt=[65 + index] * (1 + 3 * index),
            params=dataclasses.replace(plain, **({"presence_penalty": 0.5} if index % 2 else {"bad_words": words})),
        )
        for index in range(6)
    ]
    streams = run_arrivals(llm, arrivals)
    for arrival in arrivals:
        wanted = greedy_tokens(
            table, arrival.prompt, arrival.params, sequences=sequences if arrival.params.words else ()
        )
        assert streams[arrival.name].token_ids == wanted, arrival.name
    assert streams["0"].token_ids != free
    assert (llm.stats()["preemptions"] > 0) == ("num_gpu_blocks_override" in options)


def test_packed_masks() -> None:
    mask = pack([0, 31, 32, 69], 70)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [1 | 1 << 31, 1, 1 << 5]
