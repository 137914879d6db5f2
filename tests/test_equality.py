"""A request's result is its own: not of its neighbours, chunks, blocks, preemptions, caching or running ahead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, RequestOutput
from tests.support.engines import small_llm
from tests.support.mix import Ask, alone, assert_same, mixed_asks, together
from tests.support.tiny import tiny_checkpoint

# The reference: whole prompts, nothing cached, one step at a time.
PLAIN: dict[str, Any] = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 120,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "async_scheduling": False,
    "enable_prefix_caching": False,
}
# 15 usable blocks of 4: the longest request fits, the mix does not by far.
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 8}
EVERYTHING: dict[str, Any] = {"async_scheduling": True, "enable_prefix_caching": True}

MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 16,
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A checkpoint and what each request of the mix gives alone."""

    path: Path
    asks: list[Ask]
    llm: LLM
    outputs: list[RequestOutput]

    def engine(self, **options: Any) -> LLM:
        """An engine like the reference's but for some options."""
        return small_llm(self.path, **{**PLAIN, **options})


def make_reference(path: Path, **config: Any) -> Reference:
    """Run each request alone; the stop ids of one more request are taken from what came out."""
    tiny_checkpoint(path, seed=1, **config)
    llm, asks = small_llm(path, **PLAIN), mixed_asks()
    outputs = alone(llm, asks)
    stopping = dataclasses.replace(asks[1].params, stop_token_ids=(outputs[1].outputs[0].token_ids[6],))
    asks.append(Ask(ids=asks[1].ids, params=stopping))
    outputs += alone(llm, asks[-1:])
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert len(outputs[-1].outputs[0].token_ids) <= 7
    return Reference(path=path, asks=asks, llm=llm, outputs=outputs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("equality") / "tiny")


def assert_clean(llm: LLM) -> None:
    """Nothing is queued and every block is free."""
    llm.engine.check_invariants()
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["blocks_used"] == 0


def test_the_mix_tells_requests_apart(tiny: Reference) -> None:
    """Equality would mean nothing if all requests said the same: only the two equal ones may."""
    texts = [tuple(output.outputs[0].token_ids) for output in tiny.outputs]
    assert len(set(texts)) == len(texts) - 1
    samples = {tuple(sample.token_ids) for sample in tiny.outputs[7].outputs}
    assert len(samples) == 3


def test_batched_equals_alone(tiny: Reference) -> None:
    """In a batch every request read the first one's cache positions, so only batches of one were right."""
    assert_same(tiny.outputs, together(tiny.llm, tiny.asks))
    assert_clean(tiny.llm)


def test_order_of_requests_does_not_matter(tiny: Reference) -> None:
    order = np.random.default_rng(3).permutation(len(tiny.asks)).tolist()
    outputs = together(tiny.llm, [tiny.asks[i] for i in order])
    assert_same([tiny.outputs[i] for i in order], outputs)


@pytest.mark.parametrize("budget", [5, 8, 32])
def test_chunked_equals_whole(tiny: Reference, budget: int) -> None:
    """A chunk's queries must see the chunks before it, and nothing of what comes after them."""
    assert_same(tiny.outputs, together(tiny.engine(max_num_batched_tokens=budget), tiny.asks))


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_preempted_equals_undisturbed(tiny: Reference, options: dict[str, Any]) -> None:
    """Resumed requests were taken for decoding ones, or their outputs were appended twice."""
    llm = tiny.engine(**TIGHT, **options)
    assert_same(tiny.outputs, together(llm, tiny.asks))
    assert llm.stats()["preemptions"] > 0
    assert_clean(llm)


def test_cached_equals_computed(tiny: Reference) -> None:
    """Switching the prefix cache on changed greedy text: cold, for copies in one batch, and warm."""
    llm = tiny.engine(enable_prefix_caching=True, max_num_batched_tokens=8)
    for _ in range(2):
        outputs = together(llm, tiny.asks)
        assert_same(tiny.outputs, outputs)
    assert [output.num_cached_tokens for output in outputs[:3]] == [0, 32, 8]
    assert_same(tiny.outputs, alone(llm, tiny.asks))
    assert_clean(llm)


def test_running_ahead_equals_waiting(tiny: Reference) -> None:
    """Tokens fed from the device to the next step came from another request's place."""
    llm = tiny.engine(async_scheduling=True, max_num_batched_tokens=8)
    assert_same(tiny.outputs, together(llm, tiny.asks))
    assert_same(tiny.outputs, alone(llm, tiny.asks))
    assert_clean(llm)


@pytest.mark.parametrize(("block_size", "budget"), [(8, 8), (16, 16)])
def test_block_size_does_not_matter(tiny: Reference, block_size: int, budget: int) -> None:
    llm = tiny.engine(block_size=block_size, max_num_batched_tokens=budget, **EVERYTHING)
    assert_same(tiny.outputs, together(llm, tiny.asks))


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_number_of_sequences_does_not_matter(tiny: Reference, max_num_seqs: int) -> None:
    llm = tiny.engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=8, **EVERYTHING)
    assert_same(tiny.outputs, together(llm, tiny.asks))


def test_joining_late_equals_starting_together(tiny: Reference) -> None:
    """Requests come while others are being served, each three steps after the one before."""
    llm = tiny.engine(max_num_batched_tokens=8, **EVERYTHING)
    engine, waiting = llm.engine, list(enumerate(tiny.asks))
    done: dict[str, RequestOutput] = {}
    steps = 0
    while waiting or engine.has_unfinished:
        if waiting and steps % 3 == 0:
            index, ask = waiting.pop(0)
            engine.add(str(index), ask.ids, ask.params, prompt=None, priority=0)
        for output in engine.step():
            done[output.request_id] = output
        steps += 1
    assert_same(tiny.outputs, [done[str(index)] for index in range(len(tiny.asks))])
    assert_clean(llm)


def test_priorities_do_not_change_results(tiny: Reference) -> None:
    """The priority policy preempts in another order than first come, first served."""
    llm = tiny.engine(scheduling_policy="priority", **TIGHT, **EVERYTHING)
    ranks = [index * 7 % 5 for index in range(len(tiny.asks))]
    outputs = llm.generate(
        [ask.ids for ask in tiny.asks], [ask.params for ask in tiny.asks], use_tqdm=False, priority=ranks
    )
    assert_same(tiny.outputs, outputs)
    assert llm.stats()["preemptions"] > 0


def test_two_devices_equal_one(tiny: Reference) -> None:
    """Tensor parallelism: two devices with one KV head each."""
    llm = tiny.engine(tensor_parallel_size=2, max_num_batched_tokens=8, **EVERYTHING)
    assert_same(tiny.outputs, together(llm, tiny.asks))


@pytest.mark.parametrize("config", [MISTRAL, DYNAMIC], ids=["window", "dynamic-rope"])
def test_variants(config: dict[str, Any], tmp_path: Path) -> None:
    """A chunk beyond the window, and rope that depends on the prompt's length: batched, chunked, cached, preempted."""
    variant = make_reference(tmp_path / "model", **config)
    assert_same(variant.outputs, together(variant.llm, variant.asks))
    chunked = variant.engine(max_num_batched_tokens=5, **EVERYTHING)
    for _ in range(2):
        assert_same(variant.outputs, together(chunked, variant.asks))
    tight = variant.engine(**TIGHT, **EVERYTHING)
    assert_same(variant.outputs, together(tight, variant.asks))
    assert tight.stats()["preemptions"] > 0
    assert_clean(tight)
