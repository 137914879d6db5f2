"""AsyncLLM in tests: an engine that several share, readers, and what must be so when all is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from jaxpaged import AsyncLLM, RequestOutput
from jaxpaged.engine import Engine
from tests.support.driving import greedy
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import BYTE_SIZE, byte_tokenizer

LONG = greedy(max_tokens=100)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def text_checkpoint(path: Path) -> Path:
    """A tiny model with text and a chat template; returns `path`."""
    return tiny_checkpoint(
        path,
        vocab_size=BYTE_SIZE,
        tokenizer=byte_tokenizer(adds_bos=False),
        tokenizer_options={"chat_template": TEMPLATE},
    )


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request."""
    engine.step()  # the one that ran ahead of an early end
    assert not engine.has_unfinished
    assert engine.num_unfinished == 0
    assert engine.stats()["blocks_used"] == 0
    engine.check_invariants()


async def read_all(outputs: AsyncGenerator[RequestOutput]) -> list[RequestOutput]:
    """Every output, as it comes."""
    return [output async for output in outputs]


async def last_of(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    """The last output."""
    return (await read_all(outputs))[-1]


def ids_of(output: RequestOutput) -> list[list[int]]:
    """Token ids of each sample."""
    return [list(sample.token_ids) for sample in output.outputs]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    """Wait for it, with an upper limit; every look is made between two steps."""
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "it has not come about"
        await asyncio.sleep(0.005)


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until no request runs or waits."""

    async def idle() -> bool:
        return await llm.call(lambda engine: engine.num_unfinished == 0)

    await until(idle)


async def blocks_used(llm: AsyncLLM) -> int:
    """Blocks of the KV cache that requests hold."""
    return (await llm.stats())["blocks_used"]
