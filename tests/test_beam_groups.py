"""Beam searches in the engine: results of transformers, alone and in company, and nothing left behind."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from jaxpaged.beam_groups import BeamGroup
from jaxpaged.runner import ModelRunner
from jaxpaged.scheduler import Scheduler
from tests.support.beams import asks_of, load_beam_goldens
from tests.support.engines import small_llm
from tests.support.goldens import weights_digest
from tests.support.tiny import tiny_checkpoint

GOLDENS = load_beam_goldens()
PROMPTS = [[1, 2, 3], list(range(40, 53)), [7], [*range(40, 50), 9]]
ASKS = BeamSearchParams(beam_width=4, max_tokens=10)
SIZES: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("beams") / "tiny")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return small_llm(path, **SIZES)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[BeamSearchOutput]:
    """Each search in a call of its own, in an engine with room."""
    return [llm.beam_search(prompt, ASKS)[0] for prompt in PROMPTS]


def assert_same(wanted: Sequence[BeamSearchOutput], got: Sequence[BeamSearchOutput]) -> None:
    for one, other in zip(wanted, got, strict=True):
        assert [s.token_ids for s in other.sequences] == [s.token_ids for s in one.sequences]
        assert [s.score for s in other.sequences] == pytest.approx([s.score for s in one.sequences], abs=1e-4)
        assert [s.finish_reason for s in other.sequences] == [s.finish_reason for s in one.sequences]


def assert_clean(llm: LLM) -> None:
    llm.engine.check_invariants()
    assert llm.engine.num_unfinished == 0
    llm.engine.step()  # the one that ran ahead of an early end
    assert not llm.engine.has_unfinished
    assert llm.stats()["blocks_used"] == 0
    assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0


def check_golden(llm: LLM, search: Mapping[str, Any]) -> None:
    (found,) = llm.beam_search([search["prompt_ids"]], asks_of(search))
    assert [one.token_ids for one in found.sequences] == search["token_ids"]
    # A penalty below 0 multiplies: sums of a few hundred, of which float32 holds seven digits.
    assert [one.score for one in found.sequences] == pytest.approx(search["scores"], abs=1e-4, rel=2e-6)


@pytest.mark.parametrize("golden", GOLDENS["tiny"], ids=lambda golden: golden["name"])
def test_transformers_beams(golden: dict[str, Any], tmp_path: Path) -> None:
    """Ids and scores of every hypothesis, in transformers' order."""
    path = tiny_checkpoint(tmp_path / "tiny", seed=golden["seed"], **golden["config"])
    assert weights_digest(path) == golden["weights_sha256"]
    llm = small_llm(path, **SIZES)
    assert len(golden["searches"]) >= 20
    for search in golden["searches"]:
        check_golden(llm, search)
    assert_clean(llm)


def test_goldens_end_in_every_way() -> None:
    """Equality would mean little if no hypothesis ended before the last token, or all did."""
    lengths = [
        (len(ids), search["max_tokens"])
        for golden in GOLDENS["tiny"]
        for search in golden["searches"]
        for ids in search["token_ids"]
    ]
    assert sum(length < most for length, most in lengths) > 30
    assert sum(length == most for length, most in lengths) > 50


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 4},  # prompts in chunks; a search's beams fill a step
        {"max_num_seqs": 4},  # one search's beams at a time
        {"num_gpu_blocks_override": 12},
        {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 8, "enable_prefix_caching": False},
        {"block_size": 16},
        {"scheduling_policy": "priority"},
    ],
    ids=str,
)
def test_company_and_shortage_change_nothing(path: Path, alone: list[BeamSearchOutput], options: dict) -> None:
    """Beams that were preempted, queued, chunked or placed beside others took another's blocks or tokens, or hung."""
    llm = small_llm(path, **{**SIZES, **options})
    assert_same(alone, llm.beam_search(PROMPTS, ASKS))
    assert_clean(llm)
    if options.get("num_gpu_blocks_override", 99) < 10:
        assert llm.stats()["preemptions"] > 0


def test_beside_ordinary_requests(path: Path, llm: LLM, alone: list[BeamSearchOutput]) -> None:
    """Both in the same steps, in a pool too small for all: each gets what it gets alone."""
    params = [
        SamplingParams(temperature=0, max_tokens=15),
        SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, logprobs=2),
    ]
    wanted = [llm.generate(PROMPTS[1], one, use_tqdm=False)[0] for one in params]
    tight = small_llm(path, **{**SIZES, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 12})
    for index, one in enumerate(params):
        tight.engine.add(f"plain{index}", PROMPTS[1], one, prompt=None, priority=0)
    for index, prompt in enumerate(PROMPTS):
        tight.engine.submit(f"beams{index}", tight.engine.check_beams(prompt, ASKS), priority=0)
    finished = {}
    while tight.engine.has_unfinished:
        for output in tight.engine.step():
            if output.finished:
                finished[output.request_id] = output
        tight.engine.check_invariants()
    for index, output in enumerate(wanted):
        assert [s.token_ids for s in finished[f"plain{index}"].outputs] == [s.token_ids for s in output.outputs]
    for index, search in enumerate(alone):
        got = finished[f"beams{index}"].outputs
        assert [s.token_ids for s in got] == [s.token_ids for s in search.sequences]
    assert tight.stats()["preemptions"] > 0
    assert_clean(tight)


def test_beams_share_memory(path: Path) -> None:
    """Beams kept, or copied, whole sequences: 8 of 44 tokens need 88 blocks of 4 by themselves."""
    llm = small_llm(path, **SIZES)
    prompt = list(range(100, 132))
    (found,) = llm.beam_search([prompt], BeamSearchParams(beam_width=8, max_tokens=12))
    assert {len(one.tokens) for one in found.sequences} == {44}
    stats = llm.stats()
    assert stats["blocks_shared_peak"] >= 8  # the prompt's
    assert stats["blocks_used_peak"] <= 8 + 8 * 3
    assert_clean(llm)


def test_a_beam_is_no_request_more(llm: LLM) -> None:
    """One search is one request to its caller, and its output is an ordinary one."""
    llm.engine.submit("search", llm.engine.check_beams(PROMPTS[0], ASKS), priority=0)
    outputs = []
    while llm.engine.has_unfinished:
        assert llm.engine.num_unfinished == 1
        outputs += llm.engine.step()
    (output,) = outputs
    assert output.finished and [one.index for one in output.outputs] == [0, 1, 2, 3]
    for one in output.outputs:
        logprobs = [entries[token].logprob for token, entries in zip(one.token_ids, one.logprobs, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(logprobs))
    ticket = llm.engine.check_beams(PROMPTS[0], ASKS)
    llm.engine.submit("search", ticket, priority=0)
    with pytest.raises(ValueError, match="in use"):
        llm.engine.submit("search", ticket, priority=0)
    assert llm.engine.abort("search") is not None


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_in_the_middle(llm: LLM, alone: list[BeamSearchOutput], steps: int) -> None:
    llm.engine.submit("search", llm.engine.check_beams(PROMPTS[0], ASKS), priority=0)
    for _ in range(steps):
        llm.engine.step()
    output = llm.engine.abort("search")
    assert output is not None and {one.finish_reason for one in output.outputs} == {"abort"}
    assert llm.engine.abort("search") is None
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_clean(llm)
    assert_same(alone[:1], llm.beam_search(PROMPTS[0], ASKS))


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("owner", "method", "call"), [(ModelRunner, "dispatch", 3), (Scheduler, "fork", 2), (BeamGroup, "advance", 4)]
)
@pytest.mark.usefixtures("python_handles_interrupts")
def test_interrupts_leave_nothing(
    llm: LLM, alone: list[BeamSearchOutput], monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> None:
    """Ctrl-C between two forks."""
    original, count = getattr(owner, method), 0

    def pressed(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search(PROMPTS, ASKS)
    assert_clean(llm)
    assert_same(alone, llm.beam_search(PROMPTS, ASKS))


@pytest.mark.parametrize(("owner", "method", "call"), [(ModelRunner, "collect", 4), (Scheduler, "fork", 3)])
def test_an_exception_ends_its_search(
    llm: LLM, alone: list[BeamSearchOutput], monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> None:
    """A fork that failed left half a family behind."""
    original, count = getattr(owner, method), 0

    def failing(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise ZeroDivisionError("on purpose")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, failing)
        (found,) = llm.beam_search(PROMPTS[0], ASKS)
    assert {one.finish_reason for one in found.sequences} == {"error"}
    assert all("on purpose" in (one.error or "") for one in found.sequences)
    assert_clean(llm)
    assert_same(alone, llm.beam_search(PROMPTS, ASKS))


def test_broken_logits_in_a_beam(path: Path, alone: list[BeamSearchOutput], tmp_path: Path) -> None:
    """The search ends with an error, with what it has got so far; its neighbour does not notice."""
    target = alone[1].sequences[1].token_ids[4]
    assert all(target not in one.token_ids for one in alone[0].sequences)
    broken = tiny_checkpoint(tmp_path / "tiny")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][target] = np.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    llm = small_llm(broken, **SIZES)
    found = llm.beam_search(PROMPTS[:2], ASKS)
    assert_same(alone[:1], found[:1])
    assert {one.finish_reason for one in found[1].sequences} == {"error"}
    assert all(one.error and "finite" in one.error for one in found[1].sequences)
    assert_clean(llm)


def test_what_cannot_be_served_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="beam_width must be at most 16.*max_num_seqs"):
        llm.beam_search(PROMPTS[0], dataclasses.replace(ASKS, beam_width=17))
    with pytest.raises(ValueError, match="21 best.*raise max_logprobs"):
        llm.beam_search(PROMPTS[0], dataclasses.replace(ASKS, beam_width=16, stop_token_ids=range(5)))
    with pytest.raises(ValueError, match="prompt 1: .*token ids"):
        llm.beam_search([[1], [2000]], ASKS)
    with pytest.raises(ValueError, match="BeamSearchParams"):
        llm.beam_search([[1]], SamplingParams())
    with pytest.raises(ValueError, match="tokenizer"):
        llm.beam_search([[1]], dataclasses.replace(ASKS, stop="x"))
    assert llm.beam_search([], ASKS) == []
    assert_clean(llm)


def test_one_token_and_one_beam(llm: LLM) -> None:
    """The shortest search, and the narrowest, which is greedy."""
    (short,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=1))
    assert [len(one.token_ids) for one in short.sequences] == [1, 1, 1]
    (narrow,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=9))
    (greedy,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert narrow.sequences[0].token_ids == greedy.outputs[0].token_ids


def test_the_length_limit_ends_a_search(path: Path) -> None:
    """Of the model, and of the pool: a beam alone may be one token longer than the pool."""
    for options, room in (({"max_model_len": 12}, 9), ({"num_gpu_blocks_override": 4}, 10)):
        llm = small_llm(path, **{**SIZES, **options})
        (found,) = llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=3, max_tokens=50))
        assert {len(one.token_ids) for one in found.sequences} == {room}
        assert {one.finish_reason for one in found.sequences} == {"length"}
        assert_clean(llm)


@pytest.mark.e2e
def test_demo_beams() -> None:
    llm = LLM("demo", dtype="float32", max_model_len=256, max_num_seqs=8, warmup=False, use_tqdm_on_load=False)
    assert len(GOLDENS["demo"]) >= 2
    for search in GOLDENS["demo"]:
        check_golden(llm, search)
