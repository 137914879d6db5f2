"""What was read off a prompt, in one piece: joined over steps, and as the log-probabilities a caller sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpaged.outputs import Logprob
from jaxpaged.plan import Reading
from jaxpaged.request import Request
from jaxpaged.tokenizer import Tokenizer

type PromptLogprobs = list[dict[int, Logprob] | None]


def complete_reading(request: Request) -> Reading | None:
    """One reading of all positions the request asked for, out of those of several steps; None if some are missing."""
    readings, readout = request.readings, request.readout
    if readout is None or sum(reading.count for reading in readings) != readout.stop - readout.first:
        return None

    def joined(name: str) -> np.ndarray | None:
        parts = [getattr(reading, name) for reading in readings]
        return None if parts[0] is None else np.concatenate(parts)

    sums = [reading.state_sum for reading in readings if reading.state_sum is not None]
    return Reading(
        count=sum(reading.count for reading in readings),
        **{name: joined(name) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")},
        state_sum=sum(sums[1:], start=sums[0]) if sums else None,
        failed=any(reading.failed for reading in readings),
    )


def prompt_logprobs(
    prompt_ids: Sequence[int], readings: Sequence[Reading], tokenizer: Tokenizer | None
) -> PromptLogprobs | None:
    """Per prompt token {token id: Logprob}: the token itself first, then the best ones, each with its true rank.

    The first token, which nothing comes before, has None. None altogether while positions are missing.
    """
    if sum(reading.count for reading in readings) != len(prompt_ids) - 1:
        return None

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        text = tokenizer.token_text(token) if tokenizer is not None else ""
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)

    rows: PromptLogprobs = [None]
    tokens = iter(prompt_ids[1:])
    for reading in readings:
        assert reading.logprobs is not None and reading.ranks is not None
        assert reading.top_ids is not None and reading.top_logprobs is not None
        own = zip(reading.logprobs.tolist(), reading.ranks.tolist(), strict=True)
        best = zip(reading.top_ids.tolist(), reading.top_logprobs.tolist(), strict=True)
        for (logprob, rank), (ids, logprobs) in zip(own, best, strict=True):
            token = next(tokens)
            row = {token: entry(token, logprob, rank)}
            for place, (top, value) in enumerate(zip(ids, logprobs, strict=True), 1):
                if top not in row:
                    row[top] = entry(top, value, place)
            rows.append(row)
    return rows
