"""Scores of given continuations and embeddings: what a model says about texts without generating."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, SamplingParams
from tests.support.bigram import bigram_checkpoint
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import byte_tokenizer

IDS = np.random.default_rng(6).integers(0, 1024, 40).tolist()
NEAR = 2e-5  # float32 sums in another order, as in tests.support.mix


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("reader") / "tiny", seed=1)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    """Chunks of 8 tokens and blocks of 4."""
    return engine(path, max_num_batched_tokens=8)


def engine(path: Path, **options: Any) -> LLM:
    return small_llm(path, skip_tokenizer_init=True, **options)


def prompt_values(llm: LLM, ids: list[int]) -> list[float]:
    """The log-probability of every token but the first, by prompt_logprobs."""
    (output,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [row[t].logprob for t, row in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if row is not None]


def assert_idle(llm: LLM) -> None:
    llm.engine.check_invariants()
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["blocks_used"] == 0


@pytest.mark.parametrize("split", [1, 4, 7, 8, 30, 39])
def test_scores_equal_prompt_logprobs(llm: LLM, split: int) -> None:
    (score,) = llm.score_continuations(IDS[:split], IDS[split:], use_tqdm=False)
    wanted = prompt_values(llm, IDS)[split - 1 :]
    assert score.context_token_ids == IDS[:split]
    assert score.token_ids == IDS[split:]
    np.testing.assert_allclose(score.logprobs, wanted, atol=NEAR)
    assert score.logprob == pytest.approx(sum(wanted), abs=1e-3)
    assert_idle(llm)


def test_a_shared_context_is_computed_once(path: Path) -> None:
    """Only the continuation's positions are read, so the context may come from the prefix cache."""
    llm = engine(path, max_num_batched_tokens=32)
    context, continuations = IDS[:30], [[1, 2], [3], [4, 5, 6, 7], [1, 2, 9]]
    cold = [llm.score_continuations(context, c, use_tqdm=False)[0] for c in continuations]
    assert [score.num_cached_tokens for score in cold] == [0, 28, 28, 28]
    before = llm.stats()["computed_tokens"]
    warm = llm.score_continuations(context, continuations, use_tqdm=False)
    assert llm.stats()["computed_tokens"] - before <= sum(2 + len(c) for c in continuations)
    for one, other in zip(cold, warm, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=NEAR)
    assert [score.token_ids for score in warm] == continuations
    assert_idle(llm)


def test_greedy_continuations_are_told(llm: LLM) -> None:
    (output,) = llm.generate(IDS[:9], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    greedy = list(output.outputs[0].token_ids)
    other = [*greedy[:-1], (greedy[-1] + 1) % 1024]
    scores = llm.score_continuations(IDS[:9], [greedy, other, greedy[:1]], use_tqdm=False)
    assert [score.is_greedy for score in scores] == [True, False, True]
    assert scores[0].logprob > scores[1].logprob


def test_exact_sums(tmp_path: Path) -> None:
    path = bigram_checkpoint(tmp_path / "model", {0: {1: 2.0, 2: 1.0}, 1: {2: 1.0, 0: 1.0}, 2: {0: 1.0}}, 64)
    (score,) = engine(path).score_continuations([5, 0], [2, 0], use_tqdm=False)
    wanted = [1.0 - np.logaddexp(2.0, 1.0), 0.0]
    np.testing.assert_allclose(score.logprobs, wanted, atol=2e-3)
    assert not score.is_greedy


def test_texts_are_encoded_in_one_piece(tmp_path: Path) -> None:
    """A context's last blank belongs to the continuation: encoded apart they gave tokens no text has."""
    tokenizer = byte_tokenizer(adds_bos=True)
    path = tiny_checkpoint(tmp_path / "model", seed=1, tokenizer=tokenizer)
    llm = small_llm(path)
    scores = llm.score_continuations("say ", ["hi", "bad"], use_tqdm=False)
    for score, text in zip(scores, ["say hi", "say bad"], strict=True):
        assert score.context_token_ids == llm.get_tokenizer().encode("say", add_special_tokens=True)
        whole = llm.get_tokenizer().encode(text, add_special_tokens=True)
        assert [*score.context_token_ids, *score.token_ids] == whole
    (both,) = llm.score_continuations(["say"], [" hi"], use_tqdm=False)
    assert both.logprobs == scores[0].logprobs


def test_an_empty_continuation_is_certain(llm: LLM) -> None:
    full, empty = llm.score_continuations([IDS[:3], IDS[:3]], [[1], []], use_tqdm=False)
    assert (empty.logprob, empty.logprobs, empty.is_greedy) == (0.0, [], True)
    assert len(full.logprobs) == 1


def test_the_longest_text_fits_and_a_longer_one_is_refused(path: Path) -> None:
    """Nothing is generated, so no room is needed for an output token."""
    llm = engine(path, max_model_len=16)
    assert len(llm.score_continuations(IDS[:8], IDS[8:16], use_tqdm=False)[0].logprobs) == 8
    assert len(llm.embed([IDS[:16]], use_tqdm=False)) == 1
    with pytest.raises(ValueError, match=r"pair 1: .*max_model_len=16 tokens, got 17"):
        llm.score_continuations(IDS[:8], [[1], IDS[8:17]], use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt 1: .*max_model_len=16"):
        llm.embed([IDS[:4], IDS[:17]], use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("contexts", "continuations", "message"),
    [
        ([[]], [[1]], "at least one token"),
        ([[1], [2]], [[1], [2], [3]], "one for each of 3 continuations, got 2"),
        ([[1]], ["text"], "both as text or both as token ids"),
        ([[1]], [[1024]], "must be in"),
    ],
)
def test_bad_pairs_are_refused(llm: LLM, contexts: Any, continuations: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.score_continuations(contexts, continuations, use_tqdm=False)
    assert_idle(llm)


def test_last_embedding_times_the_head_gives_the_next_token(llm: LLM, path: Path) -> None:
    """The embedding is the state after the final norm: what the head is multiplied with."""
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    for length in (1, 8, 9, 33):
        (output,) = llm.embed(IDS[:length], normalize=False, use_tqdm=False)
        logits = head @ np.array(output.outputs.embedding)
        asked = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        (generated,) = llm.generate(IDS[:length], asked, use_tqdm=False)
        assert generated.outputs[0].logprobs is not None
        wanted = generated.outputs[0].logprobs[0]
        logprobs = logits - np.logaddexp.reduce(logits)
        for token, entry in wanted.items():
            assert logprobs[token] == pytest.approx(entry.logprob, abs=1e-4)


def test_mean_is_over_all_positions(llm: LLM) -> None:
    """With chunks, preemption or a warm cache only the last chunk's states were averaged."""
    ids = IDS[:19]
    lasts = [llm.embed(ids[: n + 1], normalize=False, use_tqdm=False)[0].outputs.embedding for n in range(19)]
    for _ in range(2):
        (mean,) = llm.embed(ids, pooling="mean", normalize=False, use_tqdm=False)
        np.testing.assert_allclose(mean.outputs.embedding, np.mean(lasts, 0), atol=1e-4)
        assert mean.num_cached_tokens == 0
    assert llm.embed(ids, use_tqdm=False)[0].num_cached_tokens == 16
    (unit,) = llm.embed(ids, pooling="mean", use_tqdm=False)
    assert np.linalg.norm(unit.outputs.embedding) == pytest.approx(1.0, abs=1e-6)
    assert unit.outputs.hidden_size == 64


def test_everything_at_once(path: Path) -> None:
    """Generation, scores and embeddings share steps; blocks are short, so requests are preempted."""
    alone = engine(path, max_num_batched_tokens=8)
    wanted = alone.embed([IDS[:25], IDS[5:20]], pooling="mean", use_tqdm=False)
    texts = [alone.generate(IDS[i : i + 9], SamplingParams(temperature=0), use_tqdm=False)[0] for i in range(4)]
    llm = engine(path, max_num_batched_tokens=8, num_gpu_blocks_override=22, max_num_seqs=8)
    for i in range(4):
        llm.engine.add(f"text {i}", IDS[i : i + 9], SamplingParams(temperature=0), prompt=None, priority=0)
    got = llm.embed([IDS[:25], IDS[5:20]], pooling="mean", use_tqdm=False)
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_allclose(a.outputs.embedding, b.outputs.embedding, atol=NEAR)
    outputs = {}
    while llm.engine.has_unfinished:
        outputs |= {output.request_id: output for output in llm.engine.step()}
    for i in range(4):
        if f"text {i}" in outputs:
            assert outputs[f"text {i}"].outputs[0].token_ids == texts[i].outputs[0].token_ids
    assert_idle(llm)


def test_a_broken_model_is_told(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", seed=1)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = np.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    llm = engine(path, max_num_batched_tokens=8)
    for ids in (IDS[:3], [*IDS[:3], 7, 1]):
        with pytest.raises(FloatingPointError, match="not finite") if 7 in ids else contextlib.nullcontext():
            llm.score_continuations(ids, [[1, 2]], use_tqdm=False)
        with pytest.raises(FloatingPointError, match="not finite") if 7 in ids else contextlib.nullcontext():
            llm.embed(ids, use_tqdm=False)
    assert_idle(llm)


def test_unknown_pooling_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="pooling: wanted one of"):
        llm.embed(IDS, pooling="max", use_tqdm=False)
