"""A thousand requests at once, of which many are given up at any moment: the others do not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxpaged import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.engine import Engine
from tests.support.asynchrony import LONG, assert_idle, last_of, text_checkpoint
from tests.support.engines import small_llm

NUM_REQUESTS = 1000
NUM_ASKS = 40
KINDS = list(RequestOutputKind)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked, again and again."""

    prompt: list[int]
    temperature: float
    n: int
    max_tokens: int
    stop: tuple[str, ...]

    def params(self, kind: RequestOutputKind) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            n=self.n,
            seed=5,
            max_tokens=self.max_tokens,
            stop=self.stop,
            output_kind=kind,
        )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = text_checkpoint(tmp_path_factory.mktemp("crowd") / "tiny")
    # 120 blocks of 4 tokens: much less than 64 sequences need, so that some are preempted
    return small_llm(path, max_num_seqs=64, max_num_batched_tokens=128, num_gpu_blocks_override=120).engine


@pytest.fixture
def llm(engine: Engine) -> Iterator[AsyncLLM]:
    made = AsyncLLM.from_engine(engine)
    yield made
    made.shutdown()
    assert_idle(engine)


def asks(rng: random.Random) -> list[Ask]:
    """Short and long, greedy and sampled, one and several samples, beginnings that are shared."""
    shared = [rng.randrange(256) for _ in range(30)]

    def ask() -> Ask:
        own = [rng.randrange(256) for _ in range(rng.choice([1, 3, 10, 40]))]
        temperature = rng.choice([0.0, 0.9])
        return Ask(
            prompt=shared[: rng.choice([0, 0, 10, 30])] + own,
            temperature=temperature,
            n=rng.choice([1, 1, 1, 3]) if temperature else 1,
            max_tokens=rng.choice([1, 4, 12, 24]),
            stop=rng.choice([(), ("a",), ("th", "e")]),
        )

    return [ask() for _ in range(NUM_ASKS)]


type Seen = list[tuple[list[int], str, str | None]]


def seen(outputs: list[RequestOutput], kind: RequestOutputKind) -> Seen:
    """Ids, text and finish reason of each sample, whatever the kind."""
    parts = outputs if kind == RequestOutputKind.DELTA else outputs[-1:]
    return [
        (
            [token for output in parts for token in output.outputs[index].token_ids],
            "".join(output.outputs[index].text for output in parts),
            last.finish_reason,
        )
        for index, last in enumerate(outputs[-1].outputs)
    ]


async def read(llm: AsyncLLM, ask: Ask, kind: RequestOutputKind, name: str, fate: str, patience: int) -> Seen | None:
    """What one reader sees; None if it leaves or its request is ended before the end."""
    stream = llm.generate(ask.prompt, ask.params(kind), name)
    outputs: list[RequestOutput] = []
    async for output in stream:
        outputs.append(output)
        if fate == "sleeps":
            await asyncio.sleep(0.01 * patience)
        if len(outputs) > patience and fate == "closes":
            await stream.aclose()
            return None
        if len(outputs) > patience and fate == "aborts":
            await llm.abort(name)
    whole = seen(outputs, kind)
    return None if any(reason == "abort" for *_, reason in whole) else whole


async def cancel_some(tasks: list[asyncio.Task[Seen | None]], rng: random.Random) -> None:
    """A few at a time, in the queue, while they run and when they are over."""
    while tasks:
        for _ in range(rng.randrange(6)):
            if tasks:
                tasks.pop(rng.randrange(len(tasks))).cancel()
        await asyncio.sleep(rng.random() * 0.02)


def test_the_rest_of_a_thousand_get_what_they_get_alone(llm: AsyncLLM) -> None:
    """Neighbours that come and go changed an answer, kept blocks for ever, or left readers waiting."""
    rng = random.Random(0)
    all_asks = asks(rng)

    async def main() -> None:
        final = RequestOutputKind.FINAL_ONLY
        alone = [seen([await last_of(llm.generate(ask.prompt, ask.params(final)))], final) for ask in all_asks]
        before = await llm.stats()
        readers: dict[asyncio.Task[Seen | None], int] = {}
        doomed: list[asyncio.Task[Seen | None]] = []
        for index in range(NUM_REQUESTS):
            which, kind, patience = rng.randrange(NUM_ASKS), rng.choice(KINDS), rng.randrange(5)
            fate = rng.choice(["reads", "reads", "reads", "sleeps", "closes", "aborts", "cancelled"])
            task = asyncio.ensure_future(read(llm, all_asks[which], kind, f"r{index}", fate, patience))
            readers[task] = which
            if fate == "cancelled":
                doomed.append(task)
            if index % 100 == 99:
                await asyncio.sleep(rng.random() * 0.05)
        await cancel_some(doomed, rng)
        results = await asyncio.gather(*readers, return_exceptions=True)
        complete = 0
        for result, which in zip(results, readers.values(), strict=True):
            if not isinstance(result, asyncio.CancelledError) and result is not None:
                assert result == alone[which]
                complete += 1
        assert 500 < complete < NUM_REQUESTS - 100
        wave = [asyncio.ensure_future(last_of(llm.generate([index], LONG))) for index in range(200)]
        await asyncio.sleep(0.1)  # some run, most wait
        for task in wave:
            task.cancel()
        await asyncio.gather(*wave, return_exceptions=True)
        assert await llm.call(lambda engine: engine.num_unfinished) == 0
        after = await llm.stats()
        assert after["blocks_used"] == before["blocks_used"] == 0
        assert after["preemptions"] > before["preemptions"]
        assert after["failed_steps"] == 0

    asyncio.run(main())
