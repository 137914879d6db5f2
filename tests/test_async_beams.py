"""Beam search from coroutines: LLM's hypotheses, beside other requests, and nothing left of a search given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, QueueFull
from jaxpaged.engine import Engine
from tests.support.asynchrony import assert_idle, blocks_used, ids_of, last_of, text_checkpoint, until
from tests.support.driving import greedy
from tests.support.engines import small_llm

ASKS = BeamSearchParams(beam_width=3, max_tokens=8)
LONG = BeamSearchParams(beam_width=3, max_tokens=100, ignore_eos=True)
PROMPTS: list[Any] = [[7, 8, 9], list(range(60)), "hello"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("beams") / "tiny")


@pytest.fixture(scope="module")
def whole(path: Path) -> LLM:
    return small_llm(path)


@pytest.fixture
def llm(whole: LLM) -> Iterator[AsyncLLM]:
    """Another thread for the same engine in each test; afterwards nothing may be left."""
    made = AsyncLLM.from_engine(whole.engine)
    yield made
    made.shutdown()
    assert_idle(whole.engine)


def found(output: BeamSearchOutput) -> list[tuple[list[int], str, float, Any]]:
    return [(one.token_ids, one.text, round(one.score, 4), one.finish_reason) for one in output.sequences]


def test_the_hypotheses_are_those_of_llm(path: Path, llm: AsyncLLM) -> None:
    plain = small_llm(path)
    wanted = [found(plain.beam_search([prompt], ASKS)[0]) for prompt in PROMPTS]
    (answer,) = plain.generate([[4, 2]], greedy(max_tokens=9), use_tqdm=False)

    async def main() -> None:
        searches = [llm.beam_search(prompt, ASKS) for prompt in PROMPTS]
        *got, beside = await asyncio.gather(*searches, last_of(llm.generate([4, 2], greedy(max_tokens=9))))
        assert [found(output) for output in got] == wanted
        assert ids_of(beside) == ids_of(answer)

    asyncio.run(main())


async def until_beams(llm: AsyncLLM, count: int) -> None:
    """Wait until so many tokens have been computed since the engine began."""

    async def there() -> bool:
        return (await llm.stats())["output_tokens"] >= count

    await until(there)


@pytest.mark.parametrize("tokens", [None, 0, 1, 20], ids=str)
def test_a_search_given_up_frees_its_blocks(llm: AsyncLLM, tokens: int | None) -> None:
    """Before it is queued, while its prompt is read and while its beams go on."""

    async def main() -> None:
        begun = (await llm.stats())["output_tokens"]
        task = asyncio.ensure_future(llm.beam_search(PROMPTS[1], LONG))
        await asyncio.sleep(0)
        if tokens is not None:
            await until_beams(llm, begun + tokens)
        before = (await llm.stats())["steps"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await llm.stats()
        assert stats["blocks_used"] == 0 and stats["num_running"] == stats["num_waiting"] == 0
        assert stats["steps"] <= before + 3
        assert await llm.call(lambda engine: engine.num_unfinished) == 0
        assert not llm._thread._open and llm._thread._num_open == 0
        await llm.call(Engine.check_invariants)

    asyncio.run(main())


def test_abort_gives_what_there_is(llm: AsyncLLM) -> None:
    async def main() -> None:
        begun = (await llm.stats())["output_tokens"]
        task = asyncio.ensure_future(llm.beam_search([1, 2], LONG, "mine"))
        await until_beams(llm, begun + 12)
        with pytest.raises(ValueError, match="'mine' is in use"):
            await llm.beam_search([1, 2], ASKS, "mine")
        await llm.abort("mine")
        assert await blocks_used(llm) == 0
        output = await task
        assert {one.finish_reason for one in output.sequences} == {"abort"}
        assert all(one.token_ids for one in output.sequences)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], ASKS, "at least one token"),
        ([1], greedy(), "wanted BeamSearchParams"),
        ([1], BeamSearchParams(beam_width=9, max_tokens=2), "beam_width must be at most 8"),
    ],
)
def test_bad_searches(llm: AsyncLLM, prompt: Any, params: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        asyncio.run(llm.beam_search(prompt, params))


def test_beams_count_in_the_queue(path: Path) -> None:
    """A search of three beams counted as one sequence: a full queue took many times what it should hold."""
    llm = AsyncLLM.from_engine(small_llm(path, max_num_seqs=3, max_num_queued_reqs=2).engine)

    async def main() -> None:
        async with llm:
            first = asyncio.ensure_future(llm.beam_search([1], ASKS))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull, match="3 sequences are open"):
                await llm.beam_search([2], ASKS)
            assert len((await first).sequences) == 3
            assert len((await llm.beam_search([2], ASKS)).sequences) == 3

    asyncio.run(main())
