"""The scheduler when the pool or the budget is too small for all: preemption, fairness, order."""

from __future__ import annotations

import pytest

from jaxpaged.request import FinishReason, Request, Status
from tests.support.scheduling import Loop, make_request, serve

EOS = 2


# A pool that is too small


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [5, 64])
def test_preemption_changes_no_answer(budget: int, enable_prefix_caching: bool) -> None:
    """After a preemption tokens were missing, doubled or different: the outputs must be computed again as well."""
    prompts = [[10 * i + j for j in range(6)] for i in range(4)]
    answers = []
    for num_blocks in (10, 200):
        loop = Loop(num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=enable_prefix_caching)
        requests = serve(loop, *prompts, max_tokens=20)
        assert (loop.scheduler.stats.preemptions > 0) == (num_blocks == 10)
        assert all(r.finish_reason == FinishReason.LENGTH for r in requests)
        answers.append([r.output_ids for r in requests])
    assert answers[0] == answers[1] and len(answers[0][0]) == 20


def test_a_request_survives_three_preemptions() -> None:
    """The youngest is preempted each time older ones need its blocks; a token in flight is kept each time."""
    loop = Loop(num_blocks=11)
    limits = [11, 11, 20, 17, 18]
    requests = [loop.add(make_request(f"r{i}", [i] * 6, max_tokens=limit)) for i, limit in enumerate(limits)]
    young = requests[-1]
    in_flight = 0
    while loop.scheduler.has_unfinished:
        count, pending = young.num_preemptions, young.num_pending
        loop.step()
        in_flight += young.num_preemptions > count and pending > 0
    assert young.num_preemptions >= 3 and in_flight >= 1
    assert [r.output_ids for r in requests] == [[106 + i for i in range(limit)] for limit in limits]
    assert requests[0].num_preemptions == 0  # the oldest always gets on


def test_a_preempting_step_admits_nobody_and_the_preempted_comes_before_younger_ones() -> None:
    loop = Loop(num_blocks=5, depth=1, policy="priority", enable_prefix_caching=False)
    a, b = (loop.add(make_request(name, [i] * 8, max_tokens=6, priority=i)) for i, name in [(0, "a"), (2, "b")])
    loop.step()
    urgent, young = (loop.add(make_request(name, [3], max_tokens=1, priority=p)) for name, p in [("u", 1), ("y", 2)])
    plan = loop.schedule()
    assert plan is not None and plan.preempted == ("b",)
    assert [row.request for row in plan.rows] == [a]  # although one block is free now, enough for "u"
    assert (b.status, urgent.status) == (Status.PREEMPTED, Status.WAITING)
    loop.absorb()
    loop.finish()
    joined = [min(p.step for p in loop.plans[1:] for row in p.rows if row.request is r) for r in (a, urgent, b, young)]
    assert joined == sorted(joined)


def test_a_token_in_flight_can_end_a_preempted_request() -> None:
    loop = Loop(num_blocks=5, enable_prefix_caching=False, sample=lambda r: EOS if len(loop.plans) == 2 else 50)
    loop.add(make_request("a", [1] * 7, max_tokens=6))
    b = loop.add(make_request("b", [2] * 7, max_tokens=6, eos_ids=frozenset({EOS})))
    loop.schedule()
    loop.schedule()
    loop.absorb()
    loop.schedule()  # a needs a third block: b has to go while its end token is in flight
    assert b.status == Status.PREEMPTED and b.num_pending == 1
    loop.absorb()
    assert b.finished and b.output_ids == [50, EOS] and loop.scheduler.num_waiting == 0
    loop.finish()


@pytest.mark.parametrize(("length", "tokens"), [(31, 2), (32, 1), (33, None), (40, None)])
def test_a_request_that_cannot_fit_blocks_nobody(length: int, tokens: int | None) -> None:
    """A prompt below max_model_len but above the pool was admitted and retried for ever, all others behind it."""
    loop = Loop(max_model_len=64, num_blocks=9)
    request = make_request("big", range(length), max_tokens=30)
    if tokens is None:
        with pytest.raises(ValueError, match=f"holds 32 tokens .8 usable blocks of 4., got {length}"):
            loop.scheduler.add(request)
    else:
        loop.add(request)
    small = loop.add(make_request("small", [1, 2, 3, 4], max_tokens=30))
    loop.finish(most=200)
    assert small.finish_reason == FinishReason.LENGTH and len(small.output_ids) == 29  # 33 tokens, 32 of them stored
    if tokens is not None:
        assert request.finish_reason == FinishReason.LENGTH and len(request.output_ids) == tokens


# Fairness and order


def test_a_long_prefill_does_not_stop_decoding() -> None:
    """Steps with prefill work skipped decoding, so running streams froze until a long prompt was done."""
    loop = Loop(max_num_batched_tokens=16, max_model_len=300, num_blocks=200)
    a = loop.add(make_request("a", [1, 2], max_tokens=40))
    loop.step()
    b = loop.add(make_request("b", range(200), max_tokens=2))
    while b.num_computed < 200:
        plan = loop.schedule()
        assert plan is not None and a in [row.request for row in plan.rows]
        assert plan.num_tokens <= 16
        if len(loop.flight) == 2:
            loop.absorb()
    # 15 tokens of each step are the prompt's.
    assert len([plan for plan in loop.plans if any(row.request is b for row in plan.rows)]) == 14
    loop.finish()


def test_a_prefill_before_decoding_requests_leaves_them_their_tokens() -> None:
    """Under the priority policy an urgent long prompt stands before the running requests."""
    loop = Loop(policy="priority", max_num_batched_tokens=8)
    others = [loop.add(make_request(f"o{i}", [i], max_tokens=30, priority=1)) for i in range(3)]
    loop.step()
    urgent = loop.add(make_request("urgent", range(40), max_tokens=1, priority=0))
    loop.step()
    while urgent.num_computed < 40:
        plan = loop.schedule()
        assert plan is not None and {row.request for row in plan.rows} == {urgent, *others}
        loop.absorb()
    loop.finish()


def test_steady_arrivals_starve_nobody() -> None:
    loop = Loop(max_num_batched_tokens=16, max_num_seqs=4)
    a = loop.add(make_request("a", [1, 2], max_tokens=60))
    waits: dict[Request, int] = {}
    turn = 0
    while not a.finished and turn < 100:
        turn += 1
        waits[loop.add(make_request(f"r{turn}", range(turn, turn + 12), max_tokens=3))] = turn
        loop.step()
    assert turn <= 62
    for i, request in enumerate(waits):
        assert request.status != Status.WAITING or i > len(waits) // 4, "a later request overtook an earlier one"
    loop.finish()


def test_more_sequences_than_budget_tokens_are_not_admitted() -> None:
    """With fewer budget tokens than running requests somebody would be starved."""
    loop = Loop(max_num_batched_tokens=3, max_num_seqs=8)
    requests = serve(loop, *([i] for i in range(6)), max_tokens=8)
    assert all(len(r.output_ids) == 8 for r in requests)
    assert max(len(plan.rows) for plan in loop.plans) == 3


def test_rows_are_single_tokens_longest_first_then_chunks_in_order() -> None:
    loop = Loop(max_num_batched_tokens=40)
    short, long = (loop.add(make_request(name, [1] * n)) for name, n in [("short", 3), ("long", 9)])
    loop.step()
    chunks = [loop.add(make_request(name, [2] * n)) for name, n in [("c", 5), ("d", 8)]]
    plan = loop.schedule()
    assert plan is not None and [row.request for row in plan.rows] == [long, short, *chunks]


def test_rows_join_and_leave_at_different_steps() -> None:
    loop = Loop(num_blocks=40)
    lengths = [1, 15, 16, 17, 33]
    requests = []
    for i, length in enumerate(lengths):
        requests.append(loop.add(make_request(f"r{i}", [i] * length, max_tokens=3 + 4 * (i % 3))))
        loop.step()
    loop.finish()
    assert [r.output_ids for r in requests] == [[100 + r.num_prompt + i for i in range(r.max_tokens)] for r in requests]


def test_priority_decides_who_runs_and_who_is_preempted() -> None:
    loop = Loop(policy="priority", max_num_seqs=1)
    first, low, high = (
        loop.add(make_request(n, [1], max_tokens=2, priority=p)) for n, p in [("f", 5), ("l", 4), ("h", 1)]
    )
    loop.schedule()
    assert high.status == Status.RUNNING and first.status == low.status == Status.WAITING
    loop.scheduler.set_priority("f", 0)
    loop.scheduler.set_priority("nobody", 0)
    loop.finish()
    order = list(dict.fromkeys(row.request.request_id for plan in loop.plans for row in plan.rows))
    assert order == ["h", "f", "l"]

    loop = Loop(policy="priority", num_blocks=5, depth=1, enable_prefix_caching=False)
    older, newer = (loop.add(make_request(n, [i] * 7, max_tokens=6, priority=9 - i)) for i, n in enumerate("ab"))
    loop.finish()
    assert older.num_preemptions > 0 and newer.num_preemptions == 0
