"""AsyncLLM's event loops and its thread: they end, die and are left, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from jaxpaged import AsyncLLM, EngineDead, RequestOutput
from jaxpaged.engine import Engine
from tests.support.asynchrony import LONG, assert_idle, blocks_used, ids_of, last_of, read_all, text_checkpoint
from tests.support.driving import greedy
from tests.support.engines import small_llm


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return small_llm(text_checkpoint(tmp_path_factory.mktemp("async") / "tiny")).engine


@pytest.fixture
def llm(engine: Engine) -> Iterator[AsyncLLM]:
    """Another thread for the same engine in each test; afterwards nothing may be left."""
    made = AsyncLLM.from_engine(engine)
    yield made
    made.shutdown()
    assert_idle(engine)


# --- event loops


def test_loops_in_several_threads(llm: AsyncLLM) -> None:
    answers: dict[int, list[list[list[int]]]] = {}

    async def main(index: int) -> None:
        streams = [llm.generate([7, 8, prompt], greedy(max_tokens=12)) for prompt in range(5)]
        answers[index] = [ids_of(output) for output in await asyncio.gather(*map(last_of, streams))]

    threads = [threading.Thread(target=lambda index=index: asyncio.run(main(index))) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1] == answers[2]
    assert llm._thread._postmen == {}, "a loop that has ended is held"


def test_a_loop_that_is_closed_in_the_middle(llm: AsyncLLM) -> None:
    """Handing an output to a closed loop raised in the engine's thread, and everyone was left waiting."""
    loop = asyncio.new_event_loop()
    lost = llm.generate([1, 2, 3], LONG)
    loop.run_until_complete(anext(lost))
    loop.close()

    async def main() -> None:
        assert (await last_of(llm.generate([4], greedy(max_tokens=20)))).finished
        assert await llm.call(lambda engine: engine.num_unfinished) == 0
        assert await blocks_used(llm) == 0

    asyncio.run(main())
    assert llm._thread._postmen == {}
    with pytest.raises(StopIteration):
        lost.aclose().send(None)  # closing it late does no harm


# --- the thread


def test_an_idle_engine_uses_no_time(llm: AsyncLLM) -> None:
    async def main() -> None:
        await last_of(llm.generate([1], greedy(max_tokens=3)))
        before = await llm.call(lambda engine: time.thread_time())
        await asyncio.sleep(0.5)
        used = await llm.call(lambda engine: time.thread_time()) - before
        assert used < 0.01

    asyncio.run(main())


def test_shutdown_ends_what_runs(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine(engine) as llm:
            assert llm.is_running
            streams = [llm.generate([index], LONG) for index in range(12)]
            readers = [asyncio.ensure_future(last_of(stream)) for stream in streams]
            await asyncio.sleep(0.01)
        assert not llm.is_running and not llm.errored
        outputs = await asyncio.gather(*readers, return_exceptions=True)
        reasons = {one.outputs[0].finish_reason if isinstance(one, RequestOutput) else type(one) for one in outputs}
        assert reasons <= {"abort", EngineDead}
        with pytest.raises(EngineDead, match="shut down"):
            await anext(llm.generate([1], LONG))
        with pytest.raises(EngineDead):
            await llm.stats()
        llm.shutdown()

    asyncio.run(main())
    assert_idle(engine)
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxpaged-engine"]


def test_a_forgotten_one_ends_its_thread(engine: Engine) -> None:
    thread = AsyncLLM.from_engine(engine)._thread._thread
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_an_error_of_the_thread_reaches_the_readers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for ever."""

    async def main() -> None:
        llm = AsyncLLM.from_engine(engine)
        stream = llm.generate([1], LONG)
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", lambda self: 1 / 0)
            with pytest.raises(EngineDead, match="ZeroDivisionError"):
                await read_all(stream)
        assert llm.errored and not llm.is_running
        assert isinstance(llm.dead_error, ZeroDivisionError)
        with pytest.raises(EngineDead):
            await anext(llm.generate([1], LONG))

    asyncio.run(main())
    for name in tuple(engine._groups):
        engine.abort(name)
    assert_idle(engine)


def test_a_call_that_raises_harms_nobody(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await llm.call(lambda engine: 1 / 0)
        assert await llm.reset_prefix_cache()
        assert llm.is_running

    asyncio.run(main())
