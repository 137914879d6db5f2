"""Beam search over a scripted model of five tokens: the true best sequences, and where hypotheses end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers

from jaxpaged import LLM, BeamSearchParams, BeamSearchSequence, SamplingParams
from tests.support.beams import Model, Scored, every_sequence
from tests.support.bigram import bigram_checkpoint
from tests.support.engines import small_llm

EOS, A, B, C, D = range(5)
LOGITS = np.random.default_rng(5).normal(size=(5, 5)).astype(np.float32)
WIDE = {"beam_width": 64, "max_tokens": 4}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": EOS, "a": A, "b": B, "c": C, "d": D}, "a"))
    words.add_special_tokens(["</s>"])
    words.decoder = tokenizers.decoders.Fuse()
    table = {last: dict(enumerate(map(float, row))) for last, row in enumerate(LOGITS)}
    path = tmp_path_factory.mktemp("bigram") / "model"
    bigram_checkpoint(path, table, 5, tokenizer=words, eos=EOS, num_attention_heads=1)
    return small_llm(path, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=32)


def model() -> Model:
    """The same, after the prompt "a"."""
    logprobs = LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True))
    return lambda tokens: logprobs[tokens[-1] if tokens else A].astype(np.float64)


def search(llm: LLM, params: BeamSearchParams) -> list[BeamSearchSequence]:
    (found,) = llm.beam_search([[A]], params)
    llm.engine.check_invariants()
    assert llm.stats()["blocks_used"] == 0
    return found.sequences


def same(wanted: Sequence[Scored], got: Sequence[BeamSearchSequence]) -> None:
    assert [tuple(one.token_ids) for one in got] == [one.token_ids for one in wanted]
    assert [one.score for one in got] == pytest.approx([one.score for one in wanted], abs=1e-3)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_the_true_best_three(llm: LLM, penalty: float) -> None:
    """Hypotheses kept growing after their end, so that there were fewer and fewer, and others won."""
    params = BeamSearchParams(**WIDE, length_penalty=penalty)
    found = search(llm, params)
    same(every_sequence(model(), params, {EOS})[:3], found[:3])
    assert len(found) == 64
    assert all(one.token_ids.count(EOS) <= 1 for one in found)
    for one in found:
        ended = one.token_ids[-1] == EOS
        assert (one.finish_reason, one.stop_reason) == ("stop" if ended else "length", None)
        assert one.tokens == [A, *one.token_ids]
        assert one.output_text == "".join("_abcd"[token] for token in one.token_ids if token != EOS)
        assert one.text == "a" + one.output_text


@pytest.mark.parametrize("how", [{"stop": ["b"]}, {"stop_token_ids": [B]}])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_stop_conditions_end_hypotheses(llm: LLM, penalty: float, how: dict) -> None:
    """They were dropped for beams, which ran on to max_tokens."""
    params = BeamSearchParams(**WIDE, length_penalty=penalty, **how)
    found = search(llm, params)
    same(every_sequence(model(), params, {EOS, B})[:3], found[:3])
    assert any(one.token_ids[-1] == B for one in found)
    for one in found:
        assert B not in one.token_ids[:-1]
        if one.token_ids[-1] == B:
            assert (one.finish_reason, one.stop_reason) == ("stop", "b" if "stop" in how else B)
            assert not one.output_text.endswith("b")


def test_the_stop_string_can_stay(llm: LLM) -> None:
    found = search(llm, BeamSearchParams(**WIDE, stop="b", include_stop_str_in_output=True))
    assert all(one.output_text.endswith("b") for one in found if one.stop_reason == "b")


def test_stop_strings_across_tokens(llm: LLM) -> None:
    """Each beam is searched with its own text, also after forks."""
    found = search(llm, BeamSearchParams(**WIDE, stop="cd"))
    texts = ["".join("_abcd"[token] for token in one.token_ids) for one in found]
    assert any(text.endswith("cd") for text in texts)
    for text, one in zip(texts, found, strict=True):
        assert "cd" not in text[:-1]
        assert (one.stop_reason == "cd") == text.endswith("cd")


def test_ignore_eos(llm: LLM) -> None:
    found = search(llm, BeamSearchParams(**WIDE, ignore_eos=True))
    same(every_sequence(model(), BeamSearchParams(**WIDE), ())[:3], found[:3])
    assert {len(one.token_ids) for one in found} == {4}
    assert any(EOS in one.token_ids[:-1] for one in found)


def test_one_beam_is_greedy(llm: LLM) -> None:
    (found,) = search(llm, BeamSearchParams(beam_width=1, max_tokens=8))
    (greedy,) = llm.generate([[A]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert found.token_ids == greedy.outputs[0].token_ids
