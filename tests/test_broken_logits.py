"""Weights that give no finite logits for one token: its request ends with an error, and nobody else notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, RequestOutput, SamplingParams
from tests.support.engines import small_llm
from tests.support.mix import assert_same
from tests.support.tiny import tiny_checkpoint

NAN, INFINITE = 0, 7  # ids with broken embeddings; padding tokens have id 0, so the trash block is full of NaN, too
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=12)
GOOD = [[11, 12, 13], list(range(40, 57)), [11, 12, 13, 14, 15, 16, 17, 18, 19], [200]]
# 11 usable blocks for 4 good requests and a bad one: blocks change hands all the time.
OPTIONS = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 8, "max_model_len": 40, "skip_tokenizer_init": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The same checkpoint whole and with broken rows, and what the whole one answers."""

    whole: LLM
    broken: LLM
    greedy: list[RequestOutput]
    sampled: list[RequestOutput]


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "waiting"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    whole = tiny_checkpoint(tmp_path_factory.mktemp("broken") / "whole")
    broken = tiny_checkpoint(whole.parent / "broken")
    break_rows(broken, "model.embed_tokens.weight", {NAN: np.nan, INFINITE: np.inf})
    one = small_llm(whole, async_scheduling=request.param, **OPTIONS)
    greedy, sampled = (one.generate(GOOD, params, use_tqdm=False) for params in (GREEDY, SAMPLED))
    used = {token for output in [*greedy, *sampled] for token in output.outputs[0].token_ids}
    assert not used & {NAN, INFINITE}, "choose other good prompts"
    other = small_llm(broken, async_scheduling=request.param, **OPTIONS)
    return Pair(whole=one, broken=other, greedy=greedy, sampled=sampled)


def break_rows(path: Path, name: str, rows: dict[int, float]) -> None:
    tensors = load_file(path / "model.safetensors")
    for row, value in rows.items():
        tensors[name][row] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def assert_good_ones_unharmed(pair: Pair) -> None:
    for params, wanted in ((GREEDY, pair.greedy), (SAMPLED, pair.sampled)):
        assert_same(wanted, pair.broken.generate(GOOD, params, use_tqdm=False))
    pair.broken.engine.check_invariants()
    assert pair.broken.engine.num_unfinished == 0
    assert pair.broken.stats()["blocks_used"] == 0


def test_good_requests_do_not_see_padding(pair: Pair) -> None:
    """Padding computes NaN and writes it to the trash block, which every short sequence's table points to."""
    assert_good_ones_unharmed(pair)


@pytest.mark.parametrize(
    "bad",
    [[NAN], [INFINITE, 5], [5, 6, NAN, 8], [*range(40, 52), INFINITE], [*range(40, 48), NAN, *range(60, 72)]],
    ids=["alone", "first", "middle", "last", "between-chunks"],
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_bad_request_among_good_ones(pair: Pair, bad: list[int], params: SamplingParams) -> None:
    """Such an engine answered with token 0 for ever; a weight of 0 times a stranger's NaN is NaN."""
    wanted = pair.greedy if params is GREEDY else pair.sampled
    outputs = pair.broken.generate([GOOD[0], bad, *GOOD[1:]], params, use_tqdm=False)
    (completion,) = outputs.pop(1).outputs
    assert completion.finish_reason == "error"
    assert list(completion.token_ids) == []
    assert_same(wanted, outputs)
    assert_good_ones_unharmed(pair)


def test_breaking_while_generating(pair: Pair, tmp_path: Path) -> None:
    """A token that the request itself made: what came before stays, then the request ends."""
    wanted = list(pair.greedy[1].outputs[0].token_ids)
    prompts = {token for prompt in GOOD for token in prompt}
    step, token = next((i, t) for i, t in enumerate(wanted) if i >= 3 and t not in prompts | set(wanted[:i]))
    path = tiny_checkpoint(tmp_path / "tiny")
    break_rows(path, "model.embed_tokens.weight", {token: np.nan})
    llm = small_llm(path, async_scheduling=pair.broken.engine.config.async_scheduling, **OPTIONS)
    for _ in range(2):
        outputs = llm.generate(GOOD, GREEDY, use_tqdm=False)
        assert list(outputs[1].outputs[0].token_ids) == wanted[: step + 1]
        assert outputs[1].outputs[0].finish_reason == "error"
        for index in (0, 2, 3):
            if token not in pair.greedy[index].outputs[0].token_ids:
                assert_same([pair.greedy[index]], [outputs[index]])


def test_bad_tokens_after_a_cached_beginning(pair: Pair) -> None:
    """The good beginning is found in the cache again; nothing computed from the bad token is."""
    start = list(range(300, 308))
    wanted = ask(pair.whole, [[*start, 1]])
    for _ in range(2):
        (bad,) = pair.broken.generate([*start, NAN, 1, 2, 3, 4], GREEDY, use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert ask(pair.broken, [[*start, 1]]) == wanted


def test_every_sample_of_a_bad_request_ends(pair: Pair) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4)
    (output,) = pair.broken.generate([5, 6, NAN, 8, 9], params, use_tqdm=False)
    assert [sample.finish_reason for sample in output.outputs] == ["error"] * 3
    assert_good_ones_unharmed(pair)


def ask(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
