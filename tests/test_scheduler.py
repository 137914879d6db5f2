"""The scheduler's behaviour in scripted situations; test_state_machine.py looks for the unscripted ones."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.plan import StepResult
from jaxpaged.request import FinishReason, Status
from tests.support.scheduling import Loop, make_request, serve

EOS, OTHER_EOS, STOP = 2, 7, 5


def script(*tokens: int) -> Loop:
    """A loop that samples these tokens, for each request from its first output on."""
    loop = Loop(sample=lambda r: tokens[len(loop.device.sequences[r].tokens) - r.num_prompt])
    return loop


# Life of one request


def test_one_request_prefill_then_decode_ahead_of_its_results() -> None:
    loop = Loop()
    request = loop.add(make_request("a", [11, 12, 13], max_tokens=4))
    first, second = loop.schedule(), loop.schedule()
    assert first is not None and second is not None
    (row,) = first.rows
    assert (row.start, row.count, row.samples, row.token_on_device) == (0, 3, True, False)
    assert row.tokens.tolist() == [11, 12, 13] and row.kv_len == 3
    (row,) = second.rows
    assert (row.start, row.count, row.samples, row.token_on_device) == (3, 1, True, True)
    assert request.num_pending == 2 and request.output_ids == []
    assert loop.absorb() == [request]
    loop.finish()
    assert request.output_ids == [103, 104, 105, 106] and request.finish_reason == FinishReason.LENGTH
    assert len(loop.plans) == 4  # nothing was planned past the last token


def test_schedule_says_none_when_everything_is_in_flight() -> None:
    """A row was planned beyond max_tokens because the tokens in flight were not counted."""
    loop = Loop()
    request = loop.add(make_request("a", [11], max_tokens=1))
    assert loop.schedule() is not None
    assert loop.schedule() is None
    loop.absorb()
    assert request.finished and loop.schedule() is None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_results_do_not_depend_on_how_far_ahead_is_planned(depth: int) -> None:
    loop = Loop(depth=depth, num_blocks=12)
    requests = serve(loop, [1] * 6, [2] * 9, [3], [4] * 5, max_tokens=12)
    assert [r.output_ids for r in requests] == [[100 + r.num_prompt + i for i in range(12)] for r in requests]


def test_results_must_come_in_order_and_complete() -> None:
    loop = Loop()
    loop.add(make_request("a", [11, 12]))
    plan = loop.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="wanted step 0, got 1"):
        loop.scheduler.absorb(StepResult(step=1, token_ids=np.array([3], np.int32), logprobs=(None,)))
    with pytest.raises(ValueError, match="samples 1 tokens, got 2"):
        loop.scheduler.absorb(StepResult(step=0, token_ids=np.array([3, 4], np.int32), logprobs=(None, None)))
    assert loop.absorb()  # a refused result takes nothing away
    with pytest.raises(ValueError, match="wanted step none"):
        loop.scheduler.absorb(StepResult(step=1, token_ids=np.array([3], np.int32), logprobs=(None,)))


# Ends


def test_every_end_of_sequence_id_ends_with_stop_and_no_reason() -> None:
    """Only the tokenizer's end token was honoured, so the model ran on past its end of turn."""
    for end in (EOS, OTHER_EOS):
        loop = script(11, 12, end, 13, 14)
        (request,) = serve(loop, [1], eos_ids=frozenset({EOS, OTHER_EOS}))
        assert request.output_ids == [11, 12, end]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_stop_ids_end_with_their_id_even_without_end_of_sequence() -> None:
    (request,) = serve(script(11, EOS, STOP, 13), [1], eos_ids=frozenset(), stop_token_ids=[STOP])
    assert request.output_ids == [11, EOS, STOP]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, STOP)


def test_min_tokens_holds_back_every_stop_token() -> None:
    """An end token before min_tokens ended the output; one as token number min_tokens + 1 may."""
    (request,) = serve(
        script(EOS, STOP, EOS, EOS, 11), [1], eos_ids=frozenset({EOS}), stop_token_ids=[STOP], min_tokens=3
    )
    assert request.output_ids == [EOS, STOP, EOS, EOS] and request.finish_reason == FinishReason.STOP


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (3, "stop"), (4, "stop")])
def test_an_end_token_at_the_limit_counts_as_stop(max_tokens: int, reason: str) -> None:
    (request,) = serve(script(11, 12, EOS, 13), [1], eos_ids=frozenset({EOS}), max_tokens=max_tokens)
    assert len(request.output_ids) == min(max_tokens, 3) and request.finish_reason == reason


def test_the_token_planned_beyond_the_end_is_dropped() -> None:
    """The end is seen one step late; the extra token was appended after it."""
    loop = script(11, EOS, 13, 14)
    request = loop.add(make_request("a", [1], eos_ids=frozenset({EOS})))
    loop.finish()
    assert sum(row.samples for plan in loop.plans for row in plan.rows) == 3
    assert request.output_ids == [11, EOS] and request.num_tokens == 3


def test_the_host_can_finish_a_request_between_steps() -> None:
    loop = Loop()
    request, other = (loop.add(make_request(name, [1, 2], max_tokens=6)) for name in "ab")
    loop.step()
    loop.step()
    loop.scheduler.finish(request, FinishReason.STOP, "text")
    loop.scheduler.finish(request, FinishReason.LENGTH, None)  # too late: nothing changes
    assert (request.status, request.finish_reason, request.stop_reason) == (Status.FINISHED, "stop", "text")
    loop.finish()
    assert len(request.output_ids) == 1 and len(other.output_ids) == 6


def test_abort_in_every_state_gives_everything_back() -> None:
    """Blocks and slots of requests whose client had gone stayed taken until max_tokens."""
    loop = Loop(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=8)
    decoding = loop.add(make_request("decoding", [1] * 4, max_tokens=20))
    prefilling = loop.add(make_request("prefilling", [2] * 20, max_tokens=5))
    waiting = loop.add(make_request("waiting", [3] * 20, max_tokens=5))
    loop.step()
    assert prefilling.num_computed == 4 and waiting.status == Status.WAITING
    for request in (waiting, prefilling):
        assert loop.scheduler.abort(request.request_id) is request
        loop.scheduler.check()
    assert loop.scheduler.abort("prefilling") is None and loop.scheduler.abort("nobody") is None
    assert loop.scheduler.stats.blocks_used == 1
    loop.add(make_request("prefilling", [4] * 20, max_tokens=1))  # the id is free again
    loop.scheduler.abort("decoding")
    loop.finish()
    assert decoding.finish_reason == FinishReason.ABORT


# Length limits


def test_length_limits_of_the_model() -> None:
    """A prompt exactly as long as the model length was said to be longer; one token less must give one token."""
    loop = Loop(max_model_len=32, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="32 tokens and max_model_len is 32: no room is left"):
        loop.scheduler.add(make_request("a", range(32)))
    with pytest.raises(ValueError, match="shorter than max_model_len=32 tokens, got 33"):
        loop.scheduler.add(make_request("b", range(33)))
    with pytest.raises(ValueError, match="at least one token"):
        loop.scheduler.add(make_request("c", []))
    assert not loop.scheduler.has_unfinished
    neighbour, request = serve(loop, [1, 2], range(31), max_tokens=10)
    assert len(request.output_ids) == 1 and request.finish_reason == FinishReason.LENGTH
    assert len(neighbour.output_ids) == 10


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    loop = Loop(max_num_batched_tokens=8)
    serve(loop, range(30), max_tokens=2)
    assert [(row.start, row.count, row.samples) for plan in loop.plans for row in plan.rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 8, False),
        (24, 6, True),
        (30, 1, True),
    ]


def test_checking_a_prompt_changes_nothing() -> None:
    loop = Loop(max_model_len=32)
    loop.scheduler.check_prompt(31)
    with pytest.raises(ValueError, match="no room"):
        loop.scheduler.check_prompt(32)


def test_an_id_in_use_is_refused() -> None:
    loop = Loop()
    loop.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        loop.scheduler.add(make_request("a", [2]))
    assert loop.scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "lottery"}, "policy must be one of fcfs, priority, got 'lottery'"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_model_len": 1}, "at least 2"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
    ],
)
def test_impossible_settings_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Loop(**change)
