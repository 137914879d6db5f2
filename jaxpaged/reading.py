"""Between plans and the scorer: which tokens a step scores, and what its answer says about each prompt."""

from __future__ import annotations

import jax
import numpy as np

from jaxpaged.plan import Reading, RowPlan, StepPlan
from jaxpaged.request import Readout
from jaxpaged.scoring import ReadOutput, Scores


def scoring_input(plan: StepPlan, size: int) -> tuple[np.ndarray, np.int32, np.bool_]:
    """For the scorer: (targets, padded to `size`; how many of them count; whether alternatives are asked for)."""
    targets = [
        token
        for row in plan.reading_rows
        if _readout(row).scores
        for token in row.request.prompt_ids[row.read.start + 1 : row.read.stop + 1]
    ]
    padded = np.zeros(size, np.int32)
    padded[: len(targets)] = targets
    return padded, np.int32(len(targets)), np.bool_(any(_readout(row).num_top for row in plan.reading_rows))


def collect_readings(plan: StepPlan, output: ReadOutput) -> tuple[Reading, ...]:
    """One Reading for each of the plan's reading_rows. Waits for the device; fetches only what the rows asked for."""
    rows = plan.reading_rows
    scores = jax.device_get(output.scores) if any(_readout(row).scores for row in rows) else None
    states = None if all(_readout(row).scores for row in rows) else jax.device_get(output.states)
    readings: list[Reading] = []
    begin = 0
    for row in rows:
        part = slice(begin, begin + len(row.read))
        begin = part.stop
        if scores is not None and _readout(row).scores:
            readings.append(_scored(scores, part, _readout(row).num_top))
        else:
            assert states is not None
            total = states[part].astype(np.float64).sum(0)
            failed = not np.isfinite(total).all()
            readings.append(Reading(count=len(row.read), state_sum=total, failed=failed))
    return tuple(readings)


def _scored(scores: Scores, part: slice, num_top: int) -> Reading:
    return Reading(
        count=part.stop - part.start,
        logprobs=np.asarray(scores.logprob[part]),
        ranks=np.asarray(scores.rank[part]),
        top_ids=np.asarray(scores.top_ids[part, :num_top]),
        top_logprobs=np.asarray(scores.top_logprobs[part, :num_top]),
        failed=bool(np.any(scores.bad[part])),
    )


def _readout(row: RowPlan) -> Readout:
    assert row.request.readout is not None, f"{row.request.request_id} is read without having asked"
    return row.request.readout
