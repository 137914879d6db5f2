"""Sampling through the whole engine: seeds, extreme values, exact probabilities of sequences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged.sampling_params import SamplingParams
from tests.support.bigram import bigram_checkpoint
from tests.support.driving import Arrival, answers, greedy, run_arrivals
from tests.support.engines import small_llm
from tests.support.sampler import chi_square_fits, reference
from tests.support.sampling_reference import adjusted_logits

A, B, C, D = 4, 5, 6, 7
EIGHT = list(range(8, 16))
VOCAB = 32


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """After A, B or C: A 3, B 2, C 1, all others -30. After any other token: eight tokens, equally probable."""
    table = {last: dict.fromkeys(EIGHT, 1.0) for last in range(VOCAB)}
    table |= {last: {A: 3.0, B: 2.0, C: 1.0} for last in (A, B, C)}
    return bigram_checkpoint(tmp_path_factory.mktemp("bigram") / "model", table, VOCAB)


@pytest.fixture(scope="module")
def llm(path: Path) -> jaxpaged.LLM:
    return small_llm(
        path, skip_tokenizer_init=True, max_num_seqs=64, max_num_batched_tokens=64, num_gpu_blocks_override=1000
    )


def samples(llm: jaxpaged.LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The token ids of each sample."""
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [sample.token_ids for sample in output.outputs]


# ---- seeds

SEEDED = SamplingParams(n=8, seed=1, max_tokens=12)
UNSEEDED = SamplingParams(max_tokens=12)


def test_samples_of_one_request_differ_and_come_again(llm: jaxpaged.LLM):
    """n samples were n times the same text; the generator moved on, so that a seed gave others the second time."""
    found = samples(llm, [9], SEEDED)
    assert len(set(map(tuple, found))) >= 7
    assert samples(llm, [9], SEEDED) == found


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_seed_does_not_see_its_neighbours(path: Path, llm: jaxpaged.LLM, max_num_seqs: int):
    """A seeded request was repeatable only if every other request of the batch was seeded, too."""
    found = samples(llm, [9], SEEDED)
    small = small_llm(path, skip_tokenizer_init=True, max_num_seqs=max_num_seqs)
    for neighbours in (1, 5):
        prompts = [[9]] * neighbours + [[9]] + [[A]] * neighbours
        params = [UNSEEDED] * neighbours + [SEEDED] + [UNSEEDED] * neighbours
        output = small.generate(prompts, params, use_tqdm=False)[neighbours]
        assert [sample.token_ids for sample in output.outputs] == found


def test_a_seed_does_not_see_when_it_joins(llm: jaxpaged.LLM):
    """The slot, and how many steps the engine had made, went into the random numbers."""
    params = SamplingParams(seed=77, max_tokens=12)
    (alone,) = samples(llm, [9], params)
    arrivals = [Arrival(step=step, name=f"other {step}", prompt=[9], params=UNSEEDED) for step in range(6)]
    streams = run_arrivals(llm, [*arrivals, Arrival(step=4, name="seeded", prompt=[9], params=params)])
    assert streams["seeded"].token_ids == alone


def test_requests_without_a_seed_differ(llm: jaxpaged.LLM):
    """Equal requests without a seed came out equal, in one call and from call to call."""
    first, second = (
        [tuple(each.token_ids) for each in answers(llm, [[9]] * 8, SamplingParams(max_tokens=12))] for _ in range(2)
    )
    assert len({*first, *second}) >= 15


@pytest.mark.parametrize("seed", [0, -2, 2**63, 2**64 - 1])
def test_seeds_at_the_edges(llm: jaxpaged.LLM, seed: int):
    """A negative seed, or one of more than 63 bits, raised in the middle of a step."""
    params = SamplingParams(seed=seed, max_tokens=12)
    (found,) = samples(llm, [9], params)
    assert samples(llm, [9], params) == [found]
    assert samples(llm, [9], SamplingParams(seed=seed % 2**64, max_tokens=12)) == [found]


# ---- extreme values


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"temperature": 1e-6}, {A}),
        ({"temperature": 1e-30}, {A}),
        ({"temperature": 1e-45}, {A}),
        ({"temperature": 1.5e-5}, {A}),
        ({"temperature": 100.0, "min_p": 0.9}, {A, B, C}),
        ({"temperature": 1e30, "top_k": 3}, {A, B, C}),
        ({"top_k": VOCAB - 1}, {A, B, C}),
        ({"top_k": VOCAB}, {A, B, C}),
        ({"top_k": VOCAB + 1}, {A, B, C}),
        ({"top_k": 10**9}, {A, B, C}),
        ({"top_k": 0}, {A, B, C}),
        ({"top_k": -1}, {A, B, C}),
        ({"top_p": 1e-9}, {A}),
        ({"top_p": 1.0}, {A, B, C}),
        ({"min_p": 1.0}, {A}),
        # The order: temperature, then min_p of probabilities, then top_k, then top_p on what top_k left.
        ({"temperature": 0.5, "top_p": 0.85}, {A}),
        ({"temperature": 2.0, "top_p": 0.85}, {A, B, C}),
        ({"min_p": 0.3}, {A, B}),
        ({"temperature": 2.0, "min_p": 0.3}, {A, B, C}),
        ({"top_k": 2, "top_p": 0.7}, {A}),
    ],
    ids=str,
)
def test_which_tokens_come(llm: jaxpaged.LLM, options: dict[str, Any], support: set[int]):
    """Tiny temperatures became NaN, top_k beyond the vocabulary raised, filters worked on the wrong numbers."""
    (found,) = answers(llm, [[A]], SamplingParams(seed=5, max_tokens=120, **options))
    assert len(found.token_ids) == 120
    assert set(found.token_ids) == support


@pytest.mark.parametrize(("options", "match"), [({"top_p": 0.0}, "top_p"), ({"min_p": 1.01}, "min_p")])
def test_what_would_keep_no_token_is_refused(options: dict[str, Any], match: str):
    """top_p=0 kept nothing, and the sampler took token 0."""
    with pytest.raises(ValueError, match=match):
        SamplingParams(**options)


@pytest.mark.parametrize("count", [VOCAB + 1, 10**6])
def test_too_many_logprobs_are_refused_and_the_engine_lives(llm: jaxpaged.LLM, count: int):
    """More alternatives than tokens brought the scheduler down, and every other request with it."""
    with pytest.raises(ValueError, match="logprobs must be at most"):
        llm.generate([[A]], greedy(logprobs=count), use_tqdm=False)
    assert answers(llm, [[A]], greedy(max_tokens=3))[0].token_ids == [A, A, A]


def test_a_greedy_row_with_bans_beside_a_sampled_one(llm: jaxpaged.LLM):
    """Greedy rows went through a dummy temperature, which made NaN of what was banned."""
    banned = greedy(min_tokens=6, max_tokens=6, stop_token_ids=[A, *EIGHT[:4]])
    sampled = SamplingParams(seed=2, max_tokens=6)
    (alone,) = answers(llm, [[A]], banned)
    assert alone.token_ids == [B] * 6
    together = answers(llm, [[A], [A], [9]], [sampled, banned, sampled])
    assert together[1].token_ids == alone.token_ids
    assert together[2].token_ids == answers(llm, [[9]], sampled)[0].token_ids


# ---- exact probabilities


def sequences(prompt: list[int], params: SamplingParams) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every output of params.max_tokens among A, B and C, and its probability by the plain-numpy reference."""
    logits = np.full(VOCAB, -30.0)
    logits[[A, B, C]] = [3.0, 2.0, 1.0]
    for outputs in itertools.product((A, B, C), repeat=params.max_tokens or 0):
        chance = 1.0
        for count, token in enumerate(outputs):
            kept, scaled, near = reference(adjusted_logits(logits, params, prompt, outputs[:count]), params)
            assert not near, "rounding decides what is kept: choose other values"
            weights = np.where(kept, np.exp(scaled), 0.0)
            chance *= weights[token] / weights.sum()
        yield outputs, chance


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"presence_penalty": 1.1, "frequency_penalty": 0.6, "min_p": 0.02},
        {"repetition_penalty": 1.8, "temperature": 1.3, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": -0.4, "logit_bias": {C: 1.7}, "top_p": 0.8},
        {"frequency_penalty": 1.5, "allowed_token_ids": [A, B, C, D], "top_k": 2},
    ],
    ids=str,
)
def test_sequences_come_as_often_as_they_should(llm: jaxpaged.LLM, options: dict[str, Any]):
    """Samples of one prompt, many to a step: each must be penalised for its own tokens, and for no other's."""
    params = SamplingParams(**{"n": 600, "seed": 3, "max_tokens": 3, "min_p": 1e-6} | options)
    prompt = [20, A]
    found = Counter(map(tuple, samples(llm, prompt, params)))
    possible = dict(sequences(prompt, params))
    counts = np.array([found.pop(outputs, 0) for outputs in possible])
    assert not found, "sequences that should be impossible"
    assert chi_square_fits(counts, np.array(list(possible.values())))
