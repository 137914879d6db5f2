"""Several samples of one prompt, and what the scheduler counts and keeps."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpaged.request import FinishReason, Status
from jaxpaged.scheduler import Scheduler
from tests.support.scheduling import Loop, make_request, serve

# Several samples of one prompt


@pytest.mark.parametrize(("length", "copies"), [(1, 0), (4, 3), (5, 0), (6, 3), (9, 0)])
def test_samples_share_their_prompt_blocks(length: int, copies: int) -> None:
    """Each sample computed and stored the prompt again, or wrote into the block it shared."""
    loop = Loop(enable_prefix_caching=False)
    prompt = list(range(length))
    first = loop.add(make_request("0", prompt, max_tokens=6))
    children = [loop.add(make_request(f"{i}", prompt, max_tokens=6, sibling=first)) for i in range(1, 4)]
    loop.schedule()
    assert loop.scheduler.num_waiting == (3 if length > 1 else 0)
    plan = loop.schedule()
    assert plan is not None and len(plan.copies) == copies
    assert [child.num_cached for child in children] == [length - 1] * 3
    assert loop.scheduler.stats.blocks_shared == (length - 1) // 4
    loop.finish()
    assert all(r.output_ids == first.output_ids for r in children)


def test_samples_wait_until_a_chunked_prompt_is_there() -> None:
    loop = Loop(max_num_batched_tokens=4)
    first = loop.add(make_request("0", range(10), max_tokens=2))
    child = loop.add(make_request("1", range(10), max_tokens=2, sibling=first))
    other = loop.add(make_request("2", [50], max_tokens=1))
    loop.schedule()
    assert child.status == Status.WAITING
    loop.finish()
    starts = [row.start for plan in loop.plans for row in plan.rows if row.request is child]
    assert starts[0] == 9 and other.finished


@pytest.mark.parametrize("how", ["aborted", "finished", "preempted"])
def test_a_sample_whose_sibling_is_gone_runs_by_itself(how: str) -> None:
    """The other samples waited for ever for a first one that was not coming back."""
    loop = Loop(num_blocks=9, max_num_seqs=2, depth=1, enable_prefix_caching=False)
    blocker = loop.add(make_request("blocker", [8] * 7, max_tokens=20))
    first = loop.add(make_request("0", range(10), max_tokens=1 if how == "finished" else 20))
    child = loop.add(make_request("1", range(10), max_tokens=3, sibling=first))
    loop.step()
    if how == "aborted":
        loop.scheduler.abort("0")
    while how == "preempted" and first.num_preemptions == 0:
        loop.step()
    loop.scheduler.abort("blocker")
    loop.finish()
    assert blocker.finished and len(child.output_ids) == 3


def test_a_sample_does_not_wait_for_a_preempted_sibling() -> None:
    """An urgent sample stood in the queue until its preempted sibling had found room again."""
    loop = Loop(num_blocks=9, max_num_seqs=2, depth=1, policy="priority", enable_prefix_caching=False)
    loop.add(make_request("blocker", [8] * 8, max_tokens=20))
    first = loop.add(make_request("0", range(10), max_tokens=20, priority=1))
    child = loop.add(make_request("1", range(10), max_tokens=3, priority=1, sibling=first))
    while first.num_preemptions == 0:
        loop.step()
    loop.scheduler.set_priority("1", 0)
    loop.step()
    assert child.status == Status.RUNNING and first.status == Status.PREEMPTED
    assert (loop.plans[-1].rows[-1].start, child.num_cached) == (0, 0)
    loop.finish()


def test_a_sibling_with_another_prompt_is_refused() -> None:
    loop = Loop()
    first = loop.add(make_request("0", [1, 2]))
    with pytest.raises(ValueError, match="same prompt"):
        loop.scheduler.add(make_request("1", [1, 3], sibling=first))


# Counters


def test_stats_tell_used_shared_and_cached() -> None:
    loop = Loop(depth=1)
    serve(loop, range(9), max_tokens=2)
    serve(loop, range(9), range(9), max_tokens=2)
    stats = loop.scheduler.stats
    assert (stats.prefix_queries, stats.prefix_hits, stats.blocks_reused) == (27, 16, 4)
    assert (stats.blocks_used, stats.blocks_used_peak, stats.blocks_shared, stats.blocks_shared_peak) == (0, 4, 0, 2)
    assert (stats.num_blocks, stats.preemptions, stats.num_running, stats.num_waiting) == (63, 0, 0, 0)


def test_nothing_is_kept_of_finished_requests() -> None:
    """Host memory rose with every request served."""
    loop = Loop(num_blocks=20)
    for i in range(30):
        serve(loop, [i] * 7, [i + 1] * 3, max_tokens=3)
    scheduler: Scheduler = loop.scheduler
    assert scheduler.num_in_flight == scheduler.num_running == scheduler.num_waiting == 0
    blocks = scheduler._blocks
    assert not len(scheduler._roster) and not blocks._chains
    assert blocks._cache is not None and len(blocks._cache) <= 19


def test_a_request_with_broken_logits_ends_with_error_and_leaves_nothing_to_hit() -> None:
    """One request's non-finite keys and values were found by later requests with the same prompt."""
    loop = Loop(depth=1)
    bad, good = (loop.add(make_request(name, [i] * 9)) for i, name in enumerate("ab"))
    loop.schedule()
    result = loop.flight.popleft()
    assert loop.scheduler.absorb(dataclasses.replace(result, failed={0: "broken"})) == [bad, good]
    loop.scheduler.check()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "broken")
    assert bad.output_ids == [] and not good.finished
    loop.finish()
    assert [r.num_cached for r in serve(loop, [0] * 9, [1] * 9)] == [0, 8]
