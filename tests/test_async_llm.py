"""AsyncLLM: the same answers as LLM's, for any number of readers that come, go and wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import AsyncLLM, QueueFull, RequestOutputKind, SamplingParams
from jaxpaged.engine import Engine
from tests.support.asynchrony import (
    LONG,
    assert_idle,
    blocks_used,
    ids_of,
    last_of,
    read_all,
    text_checkpoint,
    until_idle,
)
from tests.support.driving import greedy
from tests.support.engines import small_llm

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("async") / "tiny")


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return small_llm(path).engine


@pytest.fixture
def llm(engine: Engine) -> Iterator[AsyncLLM]:
    """Another thread for the same engine in each test; afterwards nothing may be left."""
    made = AsyncLLM.from_engine(engine)
    yield made
    made.shutdown()
    assert_idle(engine)


# --- answers


def test_answers_are_those_of_llm(path: Path, llm: AsyncLLM) -> None:
    prompts = [[7, 8, 9], list(range(40)), "hello"]
    asks = [greedy(max_tokens=8), SamplingParams(n=2, seed=3, max_tokens=6, logprobs=1), greedy(max_tokens=5)]
    wanted = small_llm(path).generate(prompts, asks, use_tqdm=False)

    async def main() -> None:
        streams = [llm.generate(prompt, ask) for prompt, ask in zip(prompts, asks, strict=True)]
        answers = await asyncio.gather(*map(last_of, streams))
        for output, whole in zip(answers, wanted, strict=True):
            assert ids_of(output) == ids_of(whole)
            assert [one.text for one in output.outputs] == [one.text for one in whole.outputs]
            assert output.prompt == whole.prompt and output.finished

    asyncio.run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_each_kind_adds_up_to_the_same(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    async def main() -> None:
        whole = (await last_of(llm.generate([4, 2], greedy(max_tokens=9)))).outputs[0]
        outputs = await read_all(llm.generate([4, 2], greedy(max_tokens=9, output_kind=kind)))
        parts = outputs if kind == DELTA else outputs[-1:]
        assert [token for output in parts for token in output.outputs[0].token_ids] == whole.token_ids
        assert "".join(output.outputs[0].text for output in parts) == whole.text
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert kind != FINAL_ONLY or len(outputs) == 1

    asyncio.run(main())


def test_chat(llm: AsyncLLM) -> None:
    async def main() -> None:
        answer = await last_of(llm.chat([{"role": "user", "content": "hello"}], greedy(max_tokens=5)))
        same = await last_of(llm.generate("hello", greedy(max_tokens=5)))
        assert answer.prompt == "hello" and ids_of(answer) == ids_of(same)
        with pytest.raises(ValueError, match="one conversation, got 2"):
            await read_all(llm.chat([[{"role": "user", "content": "a"}]] * 2, LONG))  # type: ignore[list-item]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [([], {}, "at least one token"), ([10**6], {}, "embedding"), ([1], {"sampling_params": 5}, "sampling_params")],
)
def test_bad_requests(llm: AsyncLLM, prompt: Any, options: dict[str, Any], match: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=match):
            await read_all(llm.generate(prompt, **options))
        assert (await last_of(llm.generate([1], greedy(max_tokens=2)))).finished

    asyncio.run(main())


def test_an_id_in_use(llm: AsyncLLM) -> None:
    async def main() -> None:
        first = llm.generate([1], LONG, "mine")
        await anext(first)
        with pytest.raises(ValueError, match="'mine' is in use"):
            await anext(llm.generate([1], LONG, "mine"))
        await first.aclose()
        assert (await last_of(llm.generate([1], greedy(max_tokens=2), "mine"))).request_id == "mine"
        several = llm.generate([1], SamplingParams(n=2, max_tokens=100), "many")
        await anext(several)
        with pytest.raises(ValueError, match="'many#1' is in use"):  # found by the engine, on its thread
            await anext(llm.generate([1], LONG, "many#1"))
        await several.aclose()

    asyncio.run(main())


# --- readers that leave


def test_closing_frees_the_blocks_within_a_step(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.generate([1, 2, 3], LONG)
        await anext(stream)
        before = (await llm.stats())["steps"]
        await stream.aclose()
        stats = await llm.stats()  # asked for after the close, so answered after it
        assert stats["blocks_used"] == 0
        assert stats["steps"] <= before + 2

    asyncio.run(main())


@pytest.mark.parametrize("params", [LONG, SamplingParams(n=3, max_tokens=100)], ids=["one", "several"])
def test_cancelling_at_every_stage(llm: AsyncLLM, params: SamplingParams) -> None:
    """In the queue, while the prompt is read, while tokens come, just before the end: all was held until the end."""

    async def main() -> None:
        for turns in (0, 1, 2, 5, 40, 200):
            tasks = [asyncio.ensure_future(read_all(llm.generate(list(range(60)), params))) for _ in range(12)]
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns == 200:
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await blocks_used(llm) == 0
            assert await llm.call(lambda engine: engine.num_unfinished) == 0

    asyncio.run(main())


def test_abort_tells_the_reader(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.generate([1, 2], LONG, "mine")
        first = await anext(stream)
        await llm.abort(["mine", "nobody"])
        assert await blocks_used(llm) == 0
        *_, last = await read_all(stream)
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert len(last.outputs[0].token_ids) >= len(first.outputs[0].token_ids)
        await llm.abort("mine")  # is over

    asyncio.run(main())


# --- readers that are slow


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_an_unread_request_holds_one_output(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    """A queue of outputs for each reader grew as long as one did not read."""

    async def main() -> None:
        params = SamplingParams(n=2, seed=1, max_tokens=30, logprobs=1, output_kind=kind)
        whole = await last_of(llm.generate([4, 2], SamplingParams(n=2, seed=1, max_tokens=30, logprobs=1)))
        stream = llm.generate([4, 2], params)
        first = await anext(stream)
        await until_idle(llm)
        rest = await read_all(stream)
        assert len(rest) == 1
        for index, sample in enumerate(whole.outputs):
            parts = [output.outputs[index] for output in ([first, *rest] if kind == DELTA else rest)]
            assert [token for part in parts for token in part.token_ids] == sample.token_ids
            assert "".join(part.text for part in parts) == sample.text
            assert [row for part in parts for row in part.logprobs or []] == sample.logprobs

    asyncio.run(main())


def test_a_blocked_loop_is_called_once(llm: AsyncLLM) -> None:
    """Each step left a call with the event loop, however many were waiting there."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls: list[float] = []
        plain = loop.call_soon_threadsafe

        def counted(*args: Any, **keywords: Any) -> Any:
            calls.append(time.monotonic())
            return plain(*args, **keywords)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        before = llm._thread.engine.stats()["steps"]
        streams = [llm.generate([index], greedy(max_tokens=30)) for index in range(6)]
        readers = [asyncio.ensure_future(last_of(stream)) for stream in streams]
        await asyncio.sleep(0)  # all are queued
        while llm._thread.engine.num_unfinished or not llm._thread.engine.stats()["steps"] > before:
            time.sleep(0.01)
        assert len(calls) == 1
        await asyncio.gather(*readers)
        steps = llm._thread.engine.stats()["steps"] - before
        assert len(calls) <= steps + 1

    asyncio.run(main())


def test_the_queue_is_limited(path: Path) -> None:
    """Two sequences run and two may wait."""
    llm = AsyncLLM.from_engine(small_llm(path, max_num_seqs=2, max_num_queued_reqs=2).engine)

    async def main() -> None:
        async with llm:
            streams = [llm.generate([index], LONG) for index in range(2)]
            streams.append(llm.generate([9], SamplingParams(n=2, max_tokens=100)))
            readers = [asyncio.ensure_future(last_of(stream)) for stream in streams]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull, match="4 sequences are open"):
                await anext(llm.generate([5], LONG))
            readers[0].cancel()
            await asyncio.wait(readers[:1])
            assert (await last_of(llm.generate([5], greedy(max_tokens=2)))).finished
            assert all([(await reader).finished for reader in readers[1:]])

    asyncio.run(main())
