"""Outputs: plain values that compare and serialise as their fields."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.request import FinishReason


def completion(finish_reason: FinishReason | None) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text="ab",
        token_ids=[5, 6],
        cumulative_logprob=-0.5,
        logprobs=[{5: Logprob(logprob=-0.25, rank=1, decoded_token="a")}],
        finish_reason=finish_reason,
        stop_reason=None,
    )


def test_a_sample_is_finished_once_it_has_a_reason() -> None:
    assert not completion(None).finished
    assert completion(FinishReason.LENGTH).finished


def test_finish_reason_is_the_plain_word_for_callers() -> None:
    assert completion(FinishReason.STOP).finish_reason == "stop"
    output = RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[completion(FinishReason.LENGTH)],
        finished=True,
        num_cached_tokens=0,
        metrics=None,
    )
    plain = json.loads(json.dumps(dataclasses.asdict(output)))
    assert plain["outputs"][0]["finish_reason"] == "length"
    assert plain["outputs"][0]["token_ids"] == [5, 6]


def test_outputs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion(None).text = "c"  # pyright: ignore[reportAttributeAccessIssue]
