"""Penalties: which tokens count, for which request, whatever else the engine is doing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged.sampling_params import SamplingParams
from tests.support.bigram import bigram_checkpoint
from tests.support.driving import Arrival, answer, answers, greedy, run_arrivals
from tests.support.engines import small_llm
from tests.support.sampling_reference import greedy_tokens

A, B, C, D = 4, 5, 6, 7
VOCAB = 96  # of the random model


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> jaxpaged.LLM:
    """After A or B: A 2.0, B 1.9. After C or D: C -1.0, D -1.1, all others lower."""
    table = {last: {A: 2.0, B: 1.9} for last in (A, B)} | {last: {C: -1.0, D: -1.1} for last in (C, D)}
    return small_llm(
        bigram_checkpoint(tmp_path_factory.mktemp("bigram") / "model", table, 32),
        skip_tokenizer_init=True,
        max_num_seqs=10,
    )


SCRIPTS: list[tuple[list[int], dict[str, Any], list[int]]] = [
    ([A], {}, [A, A, A, A]),
    ([A], {"repetition_penalty": 1.2}, [B, A, A, A]),  # the prompt counts: 2 / 1.2 < 1.9; then both are penalised
    ([A], {"presence_penalty": 0.5}, [A, B, A, A]),  # the prompt does not count; then both are penalised
    ([A], {"frequency_penalty": 0.06}, [A, A, B, A]),  # 2.0, 1.94, 1.88 < 1.9, 1.88 > 1.84
    ([C], {"repetition_penalty": 1.2}, [D, C, C, C]),  # negative logits are multiplied: -1.2 < -1.1
]


@pytest.mark.parametrize(("prompt", "options", "wanted"), SCRIPTS)
def test_which_tokens_count(llm: jaxpaged.LLM, prompt: list[int], options: dict[str, Any], wanted: list[int]):
    """Presence and frequency penalties hit tokens of the prompt; repetition did not see the prompt at first."""
    assert answer(llm, prompt, max_tokens=4, **options).token_ids == wanted


def test_every_row_gets_its_own_penalty(llm: jaxpaged.LLM):
    """Rows were regrouped into greedy and sampled ones, and then got their neighbours' penalties."""
    sampled = SamplingParams(seed=3, max_tokens=4, presence_penalty=0.3)
    (alone,) = answers(llm, [[A]], sampled)
    for order in list(itertools.permutations(range(len(SCRIPTS))))[::5]:
        prompts, params, wanted = [], [], []
        for index in order:
            prompt, options, ids = SCRIPTS[index]
            prompts += [prompt, [A]]
            params += [greedy(max_tokens=4, **options), sampled]
            wanted += [ids, alone.token_ids]
        assert [completion.token_ids for completion in answers(llm, prompts, params)] == wanted


# ---- the same tokens whatever the engine does meanwhile


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(7).normal(0.0, 2.0, (VOCAB, VOCAB)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory, table: np.ndarray) -> Path:
    rows = {last: {j: float(value) for j, value in enumerate(row)} for last, row in enumerate(table)}
    return bigram_checkpoint(tmp_path_factory.mktemp("random") / "model", rows, VOCAB)


REQUESTS: list[tuple[int, dict[str, Any]]] = [
    (3, {"repetition_penalty": 1.7}),
    (11, {"frequency_penalty": 0.7}),
    (1, {"presence_penalty": 1.5}),
    (17, {"repetition_penalty": 1.3, "frequency_penalty": -0.2, "presence_penalty": 0.9}),
    (6, {"repetition_penalty": 0.8, "presence_penalty": 2.0}),
    (9, {}),
    (5, {"frequency_penalty": 2.0, "logit_bias": {3: 2.5, 40: -4.0}, "allowed_token_ids": list(range(60))}),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"num_gpu_blocks_override": 21},  # preemptions
        {"max_num_batched_tokens": 4, "max_num_seqs": 3},  # chunks, and slots that change hands
    ],
    ids=["run-ahead", "one step at a time", "preemption", "chunks"],
)
def test_penalised_answers_equal_a_plain_loop(path: Path, table: np.ndarray, options: dict[str, Any]):
    """Counts of generated tokens were lost when a request was preempted, or read a step late when running ahead."""
    llm = small_llm(path, skip_tokenizer_init=True, **options)
    arrivals = []
    for index, (length, asked) in enumerate(REQUESTS):
        prompt = [(31 * length + 7 * step) % VOCAB for step in range(length)]
        arrivals.append(Arrival(step=index, name=str(index), prompt=prompt, params=greedy(max_tokens=24, **asked)))
    streams = run_arrivals(llm, arrivals)
    for arrival in arrivals:
        assert streams[arrival.name].token_ids == greedy_tokens(table, arrival.prompt, arrival.params), arrival.name
    assert (llm.stats()["preemptions"] > 3) == ("num_gpu_blocks_override" in options)
