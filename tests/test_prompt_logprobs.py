"""prompt_logprobs: one entry per prompt token, the same whatever the engine does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, Logprob, RequestOutput, SamplingParams
from tests.support.bigram import bigram_checkpoint
from tests.support.engines import small_llm
from tests.support.goldens import TinyGoldens, load_tiny
from tests.support.mix import TOLERANCE
from tests.support.tiny import tiny_checkpoint

IDS = np.random.default_rng(5).integers(0, 1024, 40).tolist()
ASK = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
PLAIN = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("prompt-logprobs") / "tiny", seed=1)


def engine(path: Path, **options: Any) -> LLM:
    return small_llm(path, skip_tokenizer_init=True, **options)


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.stats()["blocks_used"] == 0
    return outputs


def rows(output: RequestOutput) -> list[dict[int, Logprob]]:
    """The entries of all prompt tokens but the first, which has none."""
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    found = [row for row in others if row is not None]
    assert len(found) == len(output.prompt_token_ids) - 1
    return found


def assert_close(one: RequestOutput, other: RequestOutput) -> None:
    for position, (a, b) in enumerate(zip(rows(one), rows(other), strict=True), 1):
        assert {t: e.rank for t, e in a.items()} == {t: e.rank for t, e in b.items()}, f"position {position}"
        worst = max(abs(a[token].logprob - b[token].logprob) for token in a)
        assert worst <= TOLERANCE, f"position {position}: {worst:.1e}"


@pytest.mark.parametrize("case", [c for c in load_tiny() if c.name in ("default", "tied")], ids=lambda c: c.name)
def test_they_equal_hugging_face(case: TinyGoldens, tmp_path: Path) -> None:
    """The goldens' own greedy tokens, given as part of the prompt: chunks of 8, several prompts in one batch."""
    path = tiny_checkpoint(tmp_path / "model", seed=case.seed, **case.config)
    llm = engine(path, max_num_batched_tokens=8)
    prompts = [[*golden.prompt_ids, *map(int, golden.token_ids)] for golden in case.goldens]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    for golden, output in zip(case.goldens, run(llm, prompts, params), strict=True):
        generated = rows(output)[len(golden.prompt_ids) - 1 :]
        for step, row in enumerate(generated):
            token = int(golden.token_ids[step])
            assert row[token].rank == 1
            assert row[token].logprob == pytest.approx(float(golden.logprobs[step]), abs=1e-3)
            best = [t for t, entry in sorted(row.items(), key=lambda item: item[1].rank)]
            for place, wanted in enumerate(golden.top_logprobs[step]):
                assert row[best[place]].logprob == pytest.approx(float(wanted), abs=1e-3)


def test_exact_values_ranks_and_no_doubles(tmp_path: Path) -> None:
    """The prompt's own token was listed twice when it was among the best, and ranks were shifted by it."""
    table = {0: {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0}, 1: {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0}}
    path = bigram_checkpoint(tmp_path / "model", table | {t: {0: 5.0} for t in (2, 3, 4)}, 64)
    llm = engine(path)
    exact = np.log(np.exp([3.0, 2.0, 1.0, 0.0]) / np.exp([3.0, 2.0, 1.0, 0.0]).sum())
    for wanted in (0, 1, 2, 5):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=wanted)
        (output,) = run(llm, [0, 1, 3], params)  # after 0 comes 1, the best; after 1 comes 3, the third
        first, second = rows(output)
        assert first[1].rank == 1 and second[3].rank == 3
        assert first[1].logprob == pytest.approx(exact[0], abs=1e-3)
        assert second[3].logprob == pytest.approx(exact[2], abs=1e-3)
        assert len(first) == max(1, wanted) and next(iter(first)) == 1
        assert len(second) == wanted + (wanted < 3) and next(iter(second)) == 3
        ranks = sorted(entry.rank for entry in second.values())
        assert ranks == sorted({*range(1, wanted + 1), 3})


def test_impossible_tokens_give_valid_numbers(tmp_path: Path) -> None:
    """More alternatives than have a chance: all finite, sorted, ranks 1 to k."""
    path = bigram_checkpoint(tmp_path / "model", {0: {1: 3.0}, 1: {0: 3.0}}, 64)
    (output,) = run(engine(path), [0, 9, 1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    for row in rows(output):
        values = [entry.logprob for entry in row.values()]
        assert np.isfinite(values).all()


@pytest.mark.parametrize("budget", [3, 5, 32])
def test_chunks_do_not_matter(path: Path, budget: int) -> None:
    """With chunked prefill values were shifted, or partial results came out before the whole prompt was done."""
    whole = run(engine(path, max_num_batched_tokens=64, async_scheduling=False), IDS, ASK)[0]
    llm = engine(path, max_num_batched_tokens=budget)
    for output in run(llm, [IDS, IDS[:7], IDS[:1], IDS[:2]], ASK):
        length = len(output.prompt_token_ids)
        assert len(rows(output)) == length - 1
        assert output.outputs[0].token_ids
        for a, b in zip(rows(whole), rows(output), strict=False):
            assert {t: e.rank for t, e in a.items()} == {t: e.rank for t, e in b.items()}
            assert max(abs(a[t].logprob - b[t].logprob) for t in a) <= TOLERANCE
    assert llm.generate(IDS[:1], ASK, use_tqdm=False)[0].prompt_logprobs == [None]


def test_the_prefix_cache_is_not_read_but_filled(path: Path) -> None:
    """The same prompt sent twice failed, or gave what other requests had left at cached positions."""
    llm = engine(path, max_num_batched_tokens=5)
    eleven = IDS[:11]
    cold = run(llm, eleven, ASK)[0]
    mixed = run(llm, [eleven, [*IDS[:8], 3, 4], eleven], [ASK, PLAIN, ASK])
    warm = run(llm, eleven, ASK)[0]
    for output in (mixed[0], mixed[2], warm):
        assert output.num_cached_tokens == 0
        assert_close(cold, output)
        assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    after = run(llm, eleven, PLAIN)[0]
    assert after.num_cached_tokens == 8, "what it computed serves others"
    assert after.outputs[0].token_ids == cold.outputs[0].token_ids


def test_skipping_the_cache_can_be_asked_for(path: Path) -> None:
    llm = engine(path)
    run(llm, IDS, PLAIN)
    skipping = SamplingParams(temperature=0, max_tokens=3, skip_reading_prefix_cache=True)
    assert run(llm, IDS, skipping)[0].num_cached_tokens == 0
    assert run(llm, IDS, PLAIN)[0].num_cached_tokens == 36


def test_preemption_does_not_matter(path: Path) -> None:
    """A preempted request computes its prompt again: what was read before must not be read twice or get lost."""
    reference = run(engine(path, max_num_batched_tokens=64), [IDS[:30], IDS[:20]], ASK)
    tight = engine(path, num_gpu_blocks_override=16, max_num_batched_tokens=6)
    long = SamplingParams(temperature=0, max_tokens=16)
    prompts = [IDS[20:30], IDS[10:20], IDS[:30], IDS[:20]]
    outputs = run(tight, prompts, [long, long, ASK, ASK])
    assert tight.stats()["preemptions"] > 0
    for wanted, got in zip(reference, outputs[2:], strict=True):
        assert_close(wanted, got)
        assert wanted.outputs[0].token_ids == got.outputs[0].token_ids


def test_several_samples_share_one_list(path: Path) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=4, prompt_logprobs=1)
    (output,) = run(engine(path, max_num_batched_tokens=8), IDS[:10], params)
    assert len(output.outputs) == 3
    assert_close(run(engine(path), IDS[:10], SamplingParams(temperature=0, prompt_logprobs=1))[0], output)


def test_a_stream_has_them_in_its_first_output_alone(path: Path) -> None:
    """Nothing comes out before the whole prompt is done, and nothing is sent twice."""
    outputs = list(engine(path, max_num_batched_tokens=4).generate_stream(IDS[:10], ASK))
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]
    assert len(rows(outputs[0])) == 9


def test_neighbours_do_not_matter(path: Path) -> None:
    """Many readers and decoders at once: a step reads at most max_num_read positions and gives each its own."""
    llm = engine(path, max_num_batched_tokens=16, max_num_seqs=8)
    prompts = [IDS[i : i + 5 + 3 * i] for i in range(8)]
    params = [ASK if i % 2 else PLAIN for i in range(8)]
    together = run(llm, prompts, params)
    for i in range(1, 8, 2):
        assert_close(run(llm, prompts[i], ASK)[0], together[i])


def test_too_many_alternatives_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs must be at most 20"):
        engine(path).generate(IDS, SamplingParams(prompt_logprobs=21), use_tqdm=False)
