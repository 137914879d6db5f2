"""LLM.enqueue and wait: requests that are queued now and read later, in any order, beside calls and streams."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.driver import Driver
from tests.support.driving import greedy
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import BYTE_SIZE, byte_tokenizer

PROMPTS = [[7, 8, 9], list(range(40)), "hello", [3]]
PARAMS = [greedy(max_tokens=8), SamplingParams(n=2, seed=3, max_tokens=6, logprobs=1), greedy(max_tokens=20), greedy()]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ ending }}"


@pytest.fixture(scope="module")
def module_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = tiny_checkpoint(
        tmp_path_factory.mktemp("enqueue") / "tiny",
        vocab_size=BYTE_SIZE,
        tokenizer=byte_tokenizer(adds_bos=False),
        tokenizer_options={"chat_template": TEMPLATE},
    )
    return small_llm(path)


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    """Afterwards nothing may be left, in the engine or in the front end."""
    yield module_llm
    module_llm.engine.step()  # the one that ran ahead
    assert module_llm.engine.num_unfinished == 0
    assert module_llm.stats()["blocks_used"] == 0
    assert module_llm._driver._mail == {}
    module_llm.engine.check_invariants()


def seen(outputs: list[Any]) -> list[list[tuple[Any, ...]]]:
    return [[(one.text, list(one.token_ids), one.finish_reason) for one in output.outputs] for output in outputs]


def test_answers_are_those_of_generate(llm: LLM) -> None:
    wanted = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    steps = llm.stats()["steps"]
    ids = llm.enqueue(PROMPTS, PARAMS)
    assert llm.stats()["steps"] == steps, "enqueue() has made a step"
    outputs = llm.wait(ids, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert seen(outputs) == seen(wanted)


def test_waiting_in_any_order_and_for_all(llm: LLM) -> None:
    wanted = seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    ids = llm.enqueue(PROMPTS[:2], PARAMS[:2]) + llm.enqueue(PROMPTS[2:], PARAMS[2:])
    assert seen(llm.wait([ids[2], ids[0]], use_tqdm=False)) == [wanted[2], wanted[0]]
    assert seen(llm.wait_for_completion(use_tqdm=False)) == [wanted[1], wanted[3]]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_calls_and_streams_in_between(llm: LLM) -> None:
    """What their steps gave for enqueued requests was lost."""
    wanted = seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    stream = llm.generate_stream(PROMPTS[2], PARAMS[2])
    ids = llm.enqueue(PROMPTS, PARAMS)
    parts = [next(stream)]
    assert seen(llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)) == wanted[:1]
    parts += stream
    assert "".join(part.outputs[0].text for part in parts) == wanted[2][0][0]
    assert seen(llm.wait(ids, use_tqdm=False)) == wanted


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (wanted,) = llm.chat(conversation, greedy(max_tokens=4), use_tqdm=False, chat_template_kwargs={"ending": "!"})
    ids = llm.enqueue_chat([conversation] * 2, greedy(max_tokens=4), chat_template_kwargs={"ending": "!"})
    outputs = llm.wait(ids, use_tqdm=False)
    assert seen(outputs) == seen([wanted, wanted])
    assert outputs[0].prompt == "hello!"
    with pytest.raises(TypeError, match="enqueue_chat got an unknown keyword 'chat_tempalte'.*'chat_template'"):
        llm.enqueue_chat(conversation, chat_tempalte="x")


def test_bad_requests_queue_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1: .*embedding"):
        llm.enqueue([[1], [10**6]])
    assert llm.engine.num_unfinished == 0
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_each_output_is_given_once(llm: LLM) -> None:
    ids = llm.enqueue([[1], [2]], greedy(max_tokens=2))
    for wrong in (["nobody"], [ids[0], ids[0]], [*ids, "nobody"]):
        with pytest.raises(ValueError, match="each once, got"):
            llm.wait(wrong, use_tqdm=False)
    assert len(llm.wait(ids, use_tqdm=False)) == 2
    with pytest.raises(ValueError, match="waited for"):
        llm.wait(ids[0], use_tqdm=False)


def test_abort(llm: LLM) -> None:
    ids = llm.enqueue([[1, 2], [3, 4], [5, 6]], greedy(max_tokens=100))
    llm._driver._step()
    llm.abort(ids[0])
    llm.abort([ids[1], "nobody"])
    outputs = llm.wait(ids, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort", "length"]
    llm.abort(ids)  # are over


def test_a_request_that_was_ended_behind_the_front_end(llm: LLM) -> None:
    """wait() waited for its output for ever."""
    (request_id,) = llm.enqueue([1, 2], greedy(max_tokens=100))
    llm.engine.abort(request_id)
    with pytest.raises(RuntimeError, match="ended on the engine itself"):
        llm.wait(request_id, use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_ctrl_c_leaves_them_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ids = llm.enqueue(PROMPTS, PARAMS)
    plain, count = Driver._step, 0

    def pressed(driver: Driver) -> list[str]:
        nonlocal count
        count += 1
        reached = plain(driver)
        if count == 10:
            signal.raise_signal(signal.SIGINT)  # outputs that came with this step are not lost
        return reached

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "_step", pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.wait(ids, use_tqdm=False)
    signal.signal(signal.SIGINT, before)
    assert seen(llm.wait(ids, use_tqdm=False)) == wanted
