"""Exceptions inside a step: they end whom they concern, all others get their answers, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpaged import LLM, RequestOutput, SamplingParams
from jaxpaged.constraints import BadWords
from jaxpaged.detokenizer import Detokenizer
from jaxpaged.runner import ModelRunner
from jaxpaged.scheduler import Scheduler
from tests.support.driving import greedy
from tests.support.engines import small_llm
from tests.support.mix import Ask, alone, assert_same, mixed_asks
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import BYTE_SIZE, byte_tokenizer

ASKS = mixed_asks(vocab_size=BYTE_SIZE, max_tokens=12)
# Three sequences at once: of the eleven requests most wait when a step fails.
OPTIONS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("failures") / "tiny", vocab_size=BYTE_SIZE, tokenizer=byte_tokenizer(adds_bos=False)
    )


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "waiting"])
def llm(request: pytest.FixtureRequest, path: Path) -> LLM:
    return small_llm(path, async_scheduling=request.param, **OPTIONS)


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[RequestOutput]:
    return alone(llm, ASKS)


@pytest.fixture(autouse=True)
def unharmed(llm: LLM, wanted: list[RequestOutput]):
    """After each test nothing is left behind and the engine answers as before."""
    yield
    assert llm.engine.num_unfinished == 0
    llm.engine.step()  # the one that ran ahead of an early end
    assert not llm.engine.has_unfinished
    assert llm.stats()["blocks_used"] == 0
    llm.engine.check_invariants()
    assert_same(wanted[:3], [run(llm, [ask])[0] for ask in ASKS[:3]])


def run(llm: LLM, asks: list[Ask]) -> list[RequestOutput]:
    return llm.generate([ask.ids for ask in asks], [ask.params for ask in asks], use_tqdm=False)


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, when: Callable[..., bool], error: BaseException
) -> None:
    """A method that raises, instead of doing anything, where `when` says so of its arguments."""
    original = getattr(owner, method)

    def wrapped(self: Any, *args: Any, **keywords: Any) -> Any:
        if when(self, *args, **keywords):
            raise error
        return original(self, *args, **keywords)

    monkeypatch.setattr(owner, method, wrapped)


def at_call(number: int) -> Callable[..., bool]:
    """True at the number-th call."""
    calls = iter(range(1, 1_000_000))
    return lambda *_, **__: next(calls) == number


def assert_some_failed(wanted: list[RequestOutput], got: list[RequestOutput], error: str) -> int:
    """Requests with a failed sample say why; all others are as wanted. How many failed."""
    whole = []
    for one, other in zip(wanted, got, strict=True):
        reasons = [sample.finish_reason for sample in other.outputs]
        if "error" not in reasons:
            whole.append((one, other))
            continue
        for sample, good in zip(other.outputs, one.outputs, strict=True):
            assert sample.token_ids == good.token_ids[: len(sample.token_ids)]
            assert (sample.error is None) == (sample.finish_reason != "error")
            assert sample.error is None or error in sample.error
            assert sample.logprobs is None or len(sample.logprobs) == len(sample.token_ids)
    assert_same([one for one, _ in whole], [other for _, other in whole])
    return len(got) - len(whole)


# --- one request's own affairs


def test_a_request_whose_decoding_raises(llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch):
    """An exception in one request's decoding ended the whole engine: every client lost its answer."""
    original = Detokenizer.__init__

    def marked(self: Any, tokenizer: Any, params: SamplingParams) -> None:
        original(self, tokenizer, params)
        self.breaks = params.stop_strings == ("never",)

    monkeypatch.setattr(Detokenizer, "__init__", marked)
    third = at_call(3)
    failing(monkeypatch, Detokenizer, "push", lambda self, *_, **__: self.breaks and third(), RuntimeError("no glyph"))
    bad = Ask(ids=[9, 8, 7], params=greedy(max_tokens=12, stop=["never"], logprobs=1))
    got = run(llm, [*ASKS[:4], bad, *ASKS[4:]])
    (sample,) = got.pop(4).outputs
    assert (sample.finish_reason, sample.error) == ("error", "RuntimeError: no glyph")
    assert 2 <= len(sample.token_ids) <= 3
    assert_same(wanted, got)


def test_one_of_several_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Its siblings go on."""
    params = SamplingParams(n=3, seed=4, max_tokens=8)
    (whole,) = llm.generate([1, 2, 3], params, use_tqdm=False)
    with monkeypatch.context() as patch:
        failing(patch, Detokenizer, "push", at_call(5), RuntimeError("no glyph"))
        (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
    reasons = [sample.finish_reason for sample in output.outputs]
    assert sorted(reasons) == ["error", "length", "length"]
    for one, other in zip(whole.outputs, output.outputs, strict=True):
        if other.finish_reason == "length":
            assert (one.token_ids, one.text) == (other.token_ids, other.text)


def test_a_text_that_cannot_be_read(llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch):
    """Making the output fails: the request still gets one."""
    texts = at_call(1)

    def broken(self: Detokenizer) -> str:
        if texts():
            raise MemoryError
        return original.__get__(self)

    original: Any = Detokenizer.text
    monkeypatch.setattr(Detokenizer, "text", property(broken))
    got = run(llm, ASKS)
    assert assert_some_failed(wanted, got, "MemoryError") == 1


def test_a_stream_ends_with_the_error(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, Detokenizer, "push", at_call(3), RuntimeError("no glyph"))
    outputs = list(llm.generate_stream([4, 2], greedy(max_tokens=10)))
    assert [output.finished for output in outputs].index(True) == len(outputs) - 1
    assert outputs[-1].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_constraint_that_raises(llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, method: str):
    """A rule for one request's next token is asked while a step is made; that step has other requests, too."""
    failing(monkeypatch, BadWords, method, at_call(3), RuntimeError("no rule"))
    bad = Ask(ids=[9, 8, 7], params=greedy(max_tokens=12, bad_words=["never said"]))
    got = run(llm, [ASKS[0], bad, *ASKS[1:]])
    (sample,) = got.pop(1).outputs
    assert (sample.finish_reason, sample.error) == ("error", "RuntimeError: no rule")
    assert len(sample.token_ids) == (2 if method == "fill" else 3)
    assert_same(wanted, got)


# --- a whole step


@pytest.mark.parametrize("call", [1, 7])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(ModelRunner, "dispatch"), (ModelRunner, "collect"), (Scheduler, "absorb")],
    ids=["dispatch", "collect", "absorb"],
)
def test_a_step_that_raises(
    llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
):
    """The plan that got no answer stayed in flight: this call hung or raised, and so did every later one."""
    before = llm.stats()["failed_steps"]
    with monkeypatch.context() as patch:
        failing(patch, owner, method, at_call(call), RuntimeError("device is hot"))
        got = run(llm, ASKS)
    assert 1 <= assert_some_failed(wanted, got, "RuntimeError: device is hot") <= OPTIONS["max_num_seqs"]
    assert llm.stats()["failed_steps"] == before + 1


def test_planning_that_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Nobody can be blamed: all end, and the books are opened anew."""
    with monkeypatch.context() as patch:
        failing(patch, Scheduler, "_admit", at_call(4), MemoryError())
        got = run(llm, ASKS)
    assert all(output.finished for output in got)
    assert any(sample.finish_reason == "error" for output in got for sample in output.outputs)


@pytest.mark.parametrize("method", ["dispatch", "collect"])
@pytest.mark.parametrize("call", [1, 6])
def test_a_lost_cache(llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, method: str, call: int):
    """A program that fails takes the donated cache along: every later step raised of deleted arrays."""
    original = getattr(ModelRunner, method)
    now = at_call(call)

    def wrapped(self: ModelRunner, argument: Any) -> Any:
        if not now():
            return original(self, argument)
        for array in jax.tree.leaves(self._cache):
            array.delete()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, method, wrapped)
        got = run(llm, ASKS)
    assert 1 <= assert_some_failed(wanted, got, "out of memory") <= OPTIONS["max_num_seqs"]


@pytest.mark.parametrize("lost", [False, True])
def test_penalties_after_a_failed_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, lost: bool):
    """The counts of generated tokens on the device had counted those of the steps that were given up."""
    asks = [
        Ask(ids=[5, 6], params=greedy(max_tokens=20)),
        Ask(ids=[7, 8], params=SamplingParams(seed=1, max_tokens=20, frequency_penalty=2.0)),
    ]
    wanted = run(llm, asks)
    stream = llm.generate_stream(asks[1].ids, asks[1].params)
    ids = [token for _ in range(6) for token in next(stream).outputs[0].token_ids]
    original = ModelRunner.dispatch
    with monkeypatch.context() as patch:

        def dispatch(self: ModelRunner, plan: Any) -> Any:
            if lost:
                self.adjusted.histories.delete()
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(ModelRunner, "dispatch", dispatch)
        with pytest.raises(KeyboardInterrupt):
            run(llm, asks[:1])
    assert ModelRunner.dispatch is original
    for output in stream:
        ids += output.outputs[0].token_ids
    assert ids == wanted[1].outputs[0].token_ids


def test_every_step_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """A device that is gone: every request ends, none hangs."""
    with monkeypatch.context() as patch:
        failing(patch, ModelRunner, "dispatch", lambda *_: True, RuntimeError("no device"))
        got = run(llm, ASKS)
    assert all(sample.error == "RuntimeError: no device" for output in got for sample in output.outputs)


def test_a_step_torn_in_two(llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch):
    """A second Ctrl-C is not held back: the open stream of another caller goes on all the same."""
    ask = next(ask for ask in ASKS if ask.params.logprobs is None and ask.params.n == 1)
    whole = wanted[ASKS.index(ask)].outputs[0]
    stream = llm.generate_stream(ask.ids, ask.params)
    ids = list(next(stream).outputs[0].token_ids)
    with monkeypatch.context() as patch:
        failing(patch, ModelRunner, "dispatch", at_call(3), KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(llm, ASKS)
    for output in stream:
        ids += output.outputs[0].token_ids
    assert ids == whole.token_ids


def test_an_id_in_use_leaves_nothing_behind(llm: LLM):
    """The second sample's id was taken: the first one was queued all the same, and belonged to nobody."""
    llm.engine.add("a#1", [1, 2], greedy(max_tokens=3), prompt=None, priority=0)
    with pytest.raises(ValueError, match="in use"):
        llm.engine.add("a", [1, 2], SamplingParams(n=2, max_tokens=3), prompt=None, priority=0)
    assert llm.engine.num_unfinished == 1
    while llm.engine.has_unfinished:
        llm.engine.step()
