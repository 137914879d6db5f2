"""Requests whose reader leaves: whatever they are doing just then, nothing of them is kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jaxpaged import AsyncLLM, SamplingParams
from jaxpaged.engine import Engine
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import Request, Status
from tests.support.asynchrony import ids_of, last_of, text_checkpoint
from tests.support.driving import greedy
from tests.support.engines import small_llm

FOREVER = greedy(max_tokens=100, ignore_eos=True)
SEVERAL = SamplingParams(n=3, seed=1, max_tokens=100, ignore_eos=True)


class Gate:
    """Lets an engine make its steps one by one; between them what it holds can be looked at from here."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._open = threading.Event()
        self._allowed, self._asked = threading.Semaphore(0), threading.Semaphore(0)
        self._stands = False
        self.steps = 0
        step = engine.step

        def gated() -> list[RequestOutput]:
            if not self._open.is_set():
                self._asked.release()
                self._allowed.acquire()
            self.steps += 1
            return step()

        monkeypatch.setattr(engine, "step", gated)

    async def until(self, condition: Callable[[Request], bool], name: str) -> None:
        """Steps until the sequence of that name is as wanted, and the thread stands before another one."""
        for _ in range(200):
            if self._stands:
                self._allowed.release()
            self._stands = await asyncio.to_thread(self._asked.acquire, timeout=60)
            assert self._stands, "the engine makes no step"
            if condition(self.sequence(name)):
                return
        raise AssertionError(f"{name} never came into the state that is wanted")

    def sequence(self, name: str) -> Request:
        return self._engine._owners[name][1].request

    def release(self) -> None:
        """One step, the one the thread stands before, and all others as they come."""
        self._open.set()
        self._allowed.release()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Three sequences at once, eight tokens a step, and too few blocks for two long ones."""
    path: Path = text_checkpoint(tmp_path_factory.mktemp("cancel") / "tiny")
    return small_llm(path, max_num_seqs=3, max_num_batched_tokens=8, num_gpu_blocks_override=33).engine


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(engine, monkeypatch)
    yield made
    made.release()


@asynccontextmanager
async def serving(engine: Engine, gate: Gate) -> AsyncIterator[AsyncLLM]:
    """Afterwards the engine's books, and its thread's, are as they were."""
    llm = AsyncLLM.from_engine(engine)
    try:
        yield llm
        stats = await llm.stats()
        assert stats["blocks_used"] == stats["num_running"] == stats["num_waiting"] == 0
        await llm.call(Engine.check_invariants)
        assert engine.num_unfinished == 0 and not engine._owners and not engine._groups
        assert not llm._thread._open and not llm._thread._postmen and llm._thread._num_open == 0
        answer = await last_of(llm.generate([1, 2], greedy(max_tokens=3)))  # at once, in a pool that is free
        assert len(ids_of(answer)[0]) == 3
    finally:
        gate.release()
        await asyncio.to_thread(llm.shutdown)


async def leave(llm: AsyncLLM, gate: Gate, *tasks: asyncio.Task[RequestOutput]) -> None:
    """Cancel the readers while the engine stands before a step: after that one their blocks are free."""
    before = gate.steps
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    gate.release()
    assert (await llm.stats())["blocks_used"] == 0
    assert gate.steps <= before + 2  # the second one only reads what was in flight


def start(llm: AsyncLLM, name: str, length: int, params: SamplingParams) -> asyncio.Task[RequestOutput]:
    return asyncio.ensure_future(last_of(llm.generate([ord(name[0])] * length, params, name)))


@pytest.mark.parametrize(
    ("state", "length"),
    [
        (lambda request: 0 < request.num_computed < 40, 60),  # eight tokens of the prompt a step
        (lambda request: len(request.output_ids) >= 3, 5),
    ],
    ids=["prompt half read", "decoding"],
)
@pytest.mark.parametrize("params", [FOREVER, SEVERAL], ids=["one", "several"])
def test_while_it_runs(
    engine: Engine, gate: Gate, params: SamplingParams, state: Callable[[Request], bool], length: int
) -> None:
    """Requests that nobody read went on to max_tokens, and held their blocks."""

    async def main() -> None:
        async with serving(engine, gate) as llm:
            task = start(llm, "a", length, params)
            await gate.until(state, "a" if params.n == 1 else "a#0")
            assert engine.stats()["blocks_used"] > 0
            await leave(llm, gate, task)

    asyncio.run(main())


@pytest.mark.parametrize("params", [FOREVER, SEVERAL], ids=["one", "several"])
def test_while_it_waits(engine: Engine, gate: Gate, params: SamplingParams) -> None:
    """One that waits has no blocks, but it had its place in the queue, and came to run after its reader had gone."""

    async def main() -> None:
        async with serving(engine, gate) as llm:
            running = [start(llm, name, 5, FOREVER) for name in "abc"]
            waiting = start(llm, "w", 5, params)
            await gate.until(lambda request: len(request.output_ids) > 2, "a")
            sequence = gate.sequence("w" if params.n == 1 else "w#0")
            assert sequence.status == Status.WAITING
            await leave(llm, gate, waiting, *running)
            assert sequence.finished and sequence.num_computed == 0

    asyncio.run(main())


@pytest.mark.parametrize("params", [FOREVER, SEVERAL], ids=["one", "several"])
def test_while_it_is_preempted(engine: Engine, gate: Gate, params: SamplingParams) -> None:
    """It is in the queue again, with the tokens it has."""

    async def main() -> None:
        async with serving(engine, gate) as llm:
            older = start(llm, "o", 50, FOREVER)
            await gate.until(lambda request: len(request.output_ids) > 0, "o")
            task = start(llm, "p", 40, params)
            await gate.until(lambda request: len(request.output_ids) > 1, "o")  # the engine has heard of it
            name = "p" if params.n == 1 else "p#2"
            await gate.until(lambda request: request.status == Status.PREEMPTED, name)
            assert gate.sequence(name).output_ids
            await leave(llm, gate, task, older)

    asyncio.run(main())
