"""The prefix cache must never be seen in an answer: whole-block prompts, look-alikes, evicted blocks, twins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import jaxpaged
from jaxpaged.sampling_params import SamplingParams
from tests.support.driving import Arrival, answers, greedy, run_arrivals
from tests.support.engines import small_llm
from tests.support.goldens import Golden, load_tiny
from tests.support.tiny import tiny_checkpoint

STEPS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def uncached(path: Path) -> jaxpaged.LLM:
    return small_llm(path, skip_tokenizer_init=True, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def shared(path: Path) -> jaxpaged.LLM:
    return small_llm(path, skip_tokenizer_init=True)


@pytest.fixture
def cached(shared: jaxpaged.LLM) -> jaxpaged.LLM:
    """An engine with an empty prefix cache, blocks of 4 tokens."""
    assert shared.engine.reset_prefix_cache()
    return shared


@pytest.fixture(scope="module")
def goldens() -> dict[int, Golden]:
    """The reference's outputs of the default tiny checkpoint by prompt length: 9, 14, 40 and 1."""
    tiny = next(tiny for tiny in load_tiny() if tiny.name == "default")
    return {len(golden.prompt_ids): golden for golden in tiny.goldens}


def ids_of(llm: jaxpaged.LLM, prompts: Sequence[Sequence[int]], *, tokens: int = STEPS) -> list[list[int]]:
    return [completion.token_ids for completion in answers(llm, prompts, greedy(max_tokens=tokens))]


def ids_one_by_one(llm: jaxpaged.LLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [ids_of(llm, [prompt])[0] for prompt in prompts]


def hits(llm: jaxpaged.LLM, prompt: Sequence[int]) -> int:
    """Prompt tokens taken from the cache."""
    (output,) = llm.generate([list(prompt)], greedy(max_tokens=1), use_tqdm=False)
    return output.num_cached_tokens


def test_the_model_can_tell_prompts_apart(uncached: jaxpaged.LLM, goldens: dict[int, Golden]):
    """With a model that ignores early tokens no test of the cache could fail."""
    prompt = list(goldens[14].prompt_ids)
    swapped = [prompt[1], prompt[0], *prompt[2:]]
    assert ids_of(uncached, [prompt]) == [goldens[14].token_ids[:STEPS]]
    assert ids_of(uncached, [prompt]) != ids_of(uncached, [swapped])


@pytest.mark.parametrize("length", [4, 7, 8, 9])
def test_a_prompt_cached_whole_still_computes_its_last_token(
    cached: jaxpaged.LLM, uncached: jaxpaged.LLM, goldens: dict[int, Golden], length: int
):
    """A prompt of whole blocks, sent again, left nothing to compute: no logits for its first token, or a crash."""
    prompt = goldens[14].prompt_ids[:length]
    cold = ids_of(uncached, [prompt])
    assert ids_one_by_one(cached, [prompt] * 3) == cold * 3
    whole_blocks = (length - 1) // 4 * 4  # short of the last token
    assert [hits(cached, prompt) for _ in range(2)] == [whole_blocks] * 2


def test_cached_tokens_are_counted_and_longer_prompts_hit_every_full_block(
    cached: jaxpaged.LLM, uncached: jaxpaged.LLM, goldens: dict[int, Golden]
):
    """Computing the last block again broke the chain of keys behind it, so that longer prompts stopped hitting."""
    prompt = goldens[14].prompt_ids[:8]
    longer = goldens[14].prompt_ids[:12]
    assert [hits(cached, prompt) for _ in range(3)] == [0, 4, 4]
    assert [hits(cached, longer) for _ in range(2)] == [8, 8]
    assert ids_of(cached, [prompt, longer]) == ids_of(uncached, [prompt, longer])


def test_ids_256_apart_are_no_hit(cached: jaxpaged.LLM, uncached: jaxpaged.LLM):
    """A key made of the low byte of each id took the block of [65, 66, …] for one of [321, 322, …]."""
    prompts = [[65, 66, 67, 68, 9], [321, 322, 323, 324, 9]]
    assert ids_one_by_one(cached, prompts) == ids_one_by_one(uncached, prompts)
    assert [hits(cached, prompt) for prompt in prompts] == [4, 4]
    assert hits(cached, [577, 578, 579, 580, 9]) == 0


def test_an_equal_block_after_another_first_block_is_no_hit(cached: jaxpaged.LLM, uncached: jaxpaged.LLM):
    """A key of the block's own tokens alone gave a prompt the keys and values of another context."""
    middle, end = [31, 32, 33, 34], [41]
    prompts = [[1, 2, 3, 4, *middle, *end], [5, 6, 7, 8, *middle, *end], [*middle, *end]]
    assert ids_one_by_one(cached, prompts) == ids_one_by_one(uncached, prompts)
    assert hits(cached, [9, 9, 9, 9, *middle, *end]) == 0


def test_evicted_blocks_are_forgotten(path: Path, uncached: jaxpaged.LLM):
    """The index still named an evicted block after another prompt's keys and values had been written into it."""
    llm = small_llm(path, skip_tokenizer_init=True, num_gpu_blocks_override=7, max_model_len=24)  # 6 to use
    first = [100, 101, 102, 103, 104, 105, 106, 107, 108]
    others = [[base + step for step in range(9)] for base in (200, 300, 400, 500)]
    half = [*first[:4], 7, 7, 7, 7, 7]
    prompts = [first, first, *others, first, half, first]
    found = []
    for prompt in prompts:
        (output,) = llm.generate([prompt], greedy(max_tokens=STEPS), use_tqdm=False)
        found.append((output.num_cached_tokens, output.outputs[0].token_ids))
    assert [ids for _, ids in found] == ids_one_by_one(uncached, prompts)
    assert [count for count, _ in found] == [0, 8, 0, 0, 0, 0, 0, 4, 8]
    llm.engine.check_invariants()


@pytest.mark.parametrize(("alphabet", "count", "batch"), [(2, 100, 1), (5, 300, 100)])
def test_random_prompts_over_few_tokens(
    cached: jaxpaged.LLM, uncached: jaxpaged.LLM, alphabet: int, count: int, batch: int
):
    """Any false hit: hundreds of prompts that share beginnings, middles and ends, with the cache and without."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, alphabet, rng.integers(1, 22)).tolist() for _ in range(count)]
    hits_before = cached.engine.stats()["prefix_hits"]
    found: list[list[int]] = []
    for start in range(0, count, batch):
        found += ids_of(cached, prompts[start : start + batch], tokens=2)
    assert found == ids_of(uncached, prompts, tokens=2)
    assert cached.engine.stats()["prefix_hits"] - hits_before > 50
    cached.engine.check_invariants()


def test_equal_prompts_in_one_call(cached: jaxpaged.LLM, goldens: dict[int, Golden]):
    """The second of two equal prompts admitted together shared blocks that were not written yet."""
    p, q = goldens[9], goldens[14]
    for _ in range(2):  # cold, then warm
        found = ids_of(cached, [golden.prompt_ids for golden in (p, p, p, q)], tokens=40)
        assert found == [p.token_ids, p.token_ids, p.token_ids, q.token_ids]


@pytest.mark.parametrize("later", [1, 2, 3, 6, 12])
def test_the_same_prompt_again_while_the_first_runs(cached: jaxpaged.LLM, goldens: dict[int, Golden], later: int):
    """A copy that came a step later, or while the first was decoding, read positions from a wrong start."""
    p = goldens[9]
    arrivals = [
        Arrival(step=step, name=name, prompt=p.prompt_ids, params=greedy(max_tokens=40))
        for step, name in ((0, "first"), (later, "second"), (later, "third"))
    ]
    hits_before = cached.engine.stats()["prefix_hits"]
    streams = run_arrivals(cached, arrivals)
    assert cached.engine.stats()["prefix_hits"] - hits_before == 2 * 8  # blocks are shared while the first runs
    assert {name: stream.token_ids for name, stream in streams.items()} == {
        "first": p.token_ids, "second": p.token_ids, "third": p.token_ids,
    }  # fmt: skip


def test_a_prompt_and_its_continuation_together(
    cached: jaxpaged.LLM, uncached: jaxpaged.LLM, goldens: dict[int, Golden]
):
    """The longer prompt took blocks that the shorter one had yet to fill."""
    p = list(goldens[9].prompt_ids)
    prompts = [p, [*p, 11, 12, 13, 14, 15], p[:8], [*p, *goldens[9].token_ids[:6]]]
    cold = ids_one_by_one(uncached, prompts)
    assert ids_of(cached, prompts) == cold
    assert ids_of(cached, prompts[::-1]) == cold[::-1]


def test_samples_of_one_request_share_the_prompt(cached: jaxpaged.LLM, goldens: dict[int, Golden]):
    """Samples that share the prompt's blocks wrote into each other's last block.

    The temperature is too low for chance to matter, and just high enough not to be refused with n > 1.
    """
    p = goldens[9]
    for _ in range(2):  # cold, then warm
        params = SamplingParams(n=4, temperature=2e-5, max_tokens=40)
        (output,) = cached.generate([p.prompt_ids], params, use_tqdm=False)
        assert [completion.token_ids for completion in output.outputs] == [p.token_ids] * 4
