"""batch_invariant=True: bit for bit the same answers alone, among others, in pieces, from the cache, computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged import RequestOutput, SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(0, 1000, count).tolist() for count in (3, 9, 17, 40, 5, 33, 64, 21)]
ALL = range(len(PROMPTS))
NAMES = ("sampled", "greedy", "penalised", "scored")

type Answer = tuple[object, ...]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for products to be cut differently at different sizes: without the option most of this fails."""
    return tiny_checkpoint(tmp_path_factory.mktemp("invariant"), hidden_size=256, intermediate_size=768)


@pytest.fixture(scope="module")
def llm(path: Path) -> jaxpaged.LLM:
    return engine(path)


@pytest.fixture(scope="module")
def alone(llm: jaxpaged.LLM) -> dict[int, Answer]:
    """Each request's answer when nothing else is there and nothing is cached."""
    found: dict[int, Answer] = {}
    for index in ALL:
        llm.reset_prefix_cache()
        found |= answers(llm, [index])
    return found


def engine(path: Path, **options: Any) -> jaxpaged.LLM:
    return small_llm(path, skip_tokenizer_init=True, batch_invariant=True, **options)


def params(index: int) -> SamplingParams:
    """Requests of all kinds: each would be served by another sampler."""
    kind = NAMES[index % len(NAMES)]
    return SamplingParams(
        max_tokens=20,
        temperature=0.0 if kind == "greedy" else 0.8,
        top_p=0.9,
        seed=index,
        logprobs=3,
        presence_penalty=0.5 if kind == "penalised" else 0.0,
        prompt_logprobs=2 if kind == "scored" else None,
        detokenize=False,
    )


def answers(llm: jaxpaged.LLM, indices: Sequence[int]) -> dict[int, Answer]:
    outputs = llm.generate([PROMPTS[i] for i in indices], [params(i) for i in indices], use_tqdm=False)
    return {index: answer(output) for index, output in zip(indices, outputs, strict=True)}


def answer(output: RequestOutput) -> Answer:
    """Tokens and all log-probabilities, which compare bit for bit."""
    sample = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in row.items()} for row in sample.logprobs or ()]
    prompt = [row and {token: entry.logprob for token, entry in row.items()} for row in output.prompt_logprobs or ()]
    return tuple(sample.token_ids), repr(logprobs), repr(prompt)


@pytest.mark.parametrize("order", [list(ALL), list(reversed(ALL)), [6, 2], [5, 3, 0]], ids=str)
def test_neighbours_order_and_cache_do_not_matter(
    llm: jaxpaged.LLM, alone: dict[int, Answer], order: list[int]
) -> None:
    """Prefix hits too: the second time the prompts' beginnings come from the cache, and one chunk is a single token."""
    llm.reset_prefix_cache()
    wanted = {index: alone[index] for index in order}
    assert answers(llm, order) == wanted
    before = llm.stats()["prefix_hits"]
    assert answers(llm, order) == wanted
    assert llm.stats()["prefix_hits"] > before


def test_preemption_does_not_matter(path: Path, alone: dict[int, Answer]) -> None:
    """What decoding computed token by token is computed again in chunks."""
    llm = engine(path, num_gpu_blocks_override=40)
    assert answers(llm, ALL) == alone
    assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"async_scheduling": False}], ids=str)
def test_chunks_and_run_ahead_do_not_matter(path: Path, alone: dict[int, Answer], options: dict[str, Any]) -> None:
    assert answers(engine(path, **options), ALL) == alone


def test_neighbours_do_not_matter_to_the_portable_attention(path: Path) -> None:
    llm = engine(path, attention_backend="tiled", enable_prefix_caching=False)
    wanted = answers(llm, [3]) | answers(llm, [6])
    assert {index: found for index, found in answers(llm, ALL).items() if index in wanted} == wanted


def test_tokens_are_those_of_an_engine_without(path: Path, alone: dict[int, Answer]) -> None:
    plain = small_llm(path, skip_tokenizer_init=True)
    found = answers(plain, ALL)
    assert [found[i][0] for i in ALL if i % 4 == 1] == [alone[i][0] for i in ALL if i % 4 == 1]


def test_sizes_follow_the_number_of_sequences(path: Path) -> None:
    llm = engine(path, max_num_batched_tokens=None, max_num_seqs=20)
    assert llm.engine.limits.max_num_batched_tokens == 20
    llm.generate([PROMPTS[0]], params(0), use_tqdm=False)
    stats = llm.stats()
    assert stats["padded_tokens"] == 32 * stats["steps"]


def test_what_cannot_be_kept_is_refused(path: Path, llm: jaxpaged.LLM) -> None:
    with pytest.raises(ValueError, match="attention_backend"):
        engine(path, attention_backend="reference")
    own = SamplingParams(logits_processor=lambda history, logits: logits, detokenize=False)
    with pytest.raises(ValueError, match="batch_invariant"):
        llm.generate([PROMPTS[0]], own, use_tqdm=False)
