"""Ctrl-C in the middle of a call: KeyboardInterrupt, nothing left queued, and the next call works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine import Engine
from jaxpaged.interrupts import undivided
from jaxpaged.runner import ModelRunner
from jaxpaged.scheduler import Scheduler
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

PROMPTS = [[1, 2, 3], list(range(40, 49)), [5]]
GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = tiny_checkpoint(tmp_path_factory.mktemp("interrupts") / "tiny")
    return small_llm(path, max_num_batched_tokens=8, max_model_len=32, skip_tokenizer_init=True)


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """As in a program of its own; test workers ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c_in(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int) -> None:
    """The call-th call of a method is interrupted as it begins."""
    original: Callable[..., Any] = getattr(owner, method)
    count = 0

    def wrapped(*args: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **keywords)

    monkeypatch.setattr(owner, method, wrapped)


def ids(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (ModelRunner, "dispatch", 1),
        (ModelRunner, "dispatch", 5),
        (ModelRunner, "collect", 1),
        (ModelRunner, "collect", 2),
        (Scheduler, "absorb", 5),
        (Engine, "step", 2),
        (Scheduler, "add", 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_generate(llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int) -> None:
    """A step torn in two left a plan without an answer, and the next call waited for it."""
    wanted = ids(llm)
    with monkeypatch.context() as patch:
        press_ctrl_c_in(patch, owner, method, call)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["blocks_used"] == 0
    llm.engine.check_invariants()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ids(llm) == wanted


def test_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ids(llm)
    stream = llm.generate_stream(PROMPTS[0], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        press_ctrl_c_in(patch, ModelRunner, "dispatch", 2)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert llm.engine.num_unfinished == 0
    assert ids(llm) == wanted


def test_a_second_interrupt_is_not_held_back() -> None:
    """Who presses twice does not want to wait."""
    reached: list[int] = []

    def press_twice() -> None:
        with undivided():
            for press in (1, 2):
                signal.raise_signal(signal.SIGINT)
                reached.append(press)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == [1]


def test_an_error_inside_wins_over_the_interrupt() -> None:
    def press_and_fail() -> None:
        with undivided():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        press_and_fail()


def test_handlers_of_the_program_stay_in_charge() -> None:
    """And other threads, which cannot have handlers, run the block as it is."""
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, frame: pressed.append(signum))
    with undivided():
        signal.raise_signal(signal.SIGINT)
        assert pressed == [signal.SIGINT]
    ran: list[bool] = []

    def work() -> None:
        with undivided():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
