"""Benchmark adapter: jaxpaged itself. Options: the engine's keyword arguments."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import jaxpaged
from jaxpaged.output_builder import RequestMetrics
from scripts.peers.protocol import Answer, Job, Request, adapter_main

_COUNTERS = (
    *("steps", "computed_tokens", "padded_tokens", "output_tokens", "late_compilations"),
    *("step_s", "device_wait_s", "host_s"),
)


class JaxPaged:
    """LLM.generate() on token ids."""

    def __init__(self, job: Job) -> None:
        self._llm = jaxpaged.LLM(job.model, use_tqdm_on_load=False, **job.options)
        self._llm.engine.finish_warm_up()  # a warm start goes on reading programs behind the first requests

    def generate(self, requests: Sequence[Request]) -> Answer:
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        params = [
            jaxpaged.SamplingParams(temperature=0.0, max_tokens=request.out_len, ignore_eos=True)
            for request in requests
        ]
        before = self._llm.stats()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        return Answer(
            token_ids=[list(output.outputs[0].token_ids) for output in outputs],
            first_token_s=[seconds_after_arrival(row, row.first_token_time) for row in metrics],
            finish_s=[seconds_after_arrival(row, row.finished_time) for row in metrics],
            stats=stats_delta(before, self._llm.stats()),
        )

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("jaxpaged", "jax", "jaxlib")}

    def close(self) -> None:
        """Nothing to do."""


def stats_delta(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """How much the counters of LLM.stats() grew."""
    return {name: after[name] - before[name] for name in _COUNTERS}


def seconds_after_arrival(metrics: RequestMetrics, time: float | None) -> float | None:
    """A request's time as seconds since it was queued."""
    return None if time is None else time - metrics.arrival_time


if __name__ == "__main__":
    adapter_main(JaxPaged)
