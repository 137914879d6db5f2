"""How bench.py talks to an engine in its own process: a job file in, a result file out, and the adapters' main.

Standard library only, Python 3.10 or newer: adapters run in the peers' interpreters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Request:
    """As scripts/workload.py's."""

    prompt_ids: list[int]
    out_len: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an adapter is asked to do: load the model, run warmup untimed, then each workload."""

    model: str
    threads: int
    options: dict[str, Any]
    warmup: list[Request]
    workloads: dict[str, list[Request]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An engine's outputs, in request order. Times are seconds since the call; None where they are not known."""

    token_ids: list[list[int]]
    first_token_s: list[float | None]
    finish_s: list[float | None]
    stats: dict[str, Any] = field(default_factory=dict)  # the engine's own counters over this call


class Engine(Protocol):
    """What an adapter wraps."""

    def generate(self, requests: Sequence[Request]) -> Answer:
        """Greedy tokens for all requests, out_len each, end-of-sequence tokens ignored."""
        ...

    def versions(self) -> dict[str, str]:
        """Packages that matter and their versions."""
        ...

    def close(self) -> None:
        """Free what the process does not free by itself."""
        ...


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)))


def read_job(path: Path) -> Job:
    raw = json.loads(path.read_text())
    raw["warmup"] = [Request(**request) for request in raw["warmup"]]
    raw["workloads"] = {name: [Request(**request) for request in rows] for name, rows in raw["workloads"].items()}
    return Job(**raw)


def adapter_main(load: Callable[[Job], Engine]) -> None:
    """Run the job file named by argv[1] and write the result file argv[2].

    The process keeps to its first `threads` processors, whatever threads the engine's libraries start.
    """
    job = read_job(Path(sys.argv[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    began = time.perf_counter()
    engine = load(job)
    load_s = time.perf_counter() - began
    try:
        if job.warmup:
            engine.generate(job.warmup)
        runs = {name: _timed(engine, requests) for name, requests in job.workloads.items()}
        result = {"versions": engine.versions(), "load_s": load_s, "runs": runs}
    finally:
        engine.close()
    Path(sys.argv[2]).write_text(json.dumps(result))


def _timed(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    began = time.perf_counter()
    answer = engine.generate(requests)
    wall_s = time.perf_counter() - began
    wanted = [request.out_len for request in requests]
    got = [len(ids) for ids in answer.token_ids]
    if wanted != got:
        raise ValueError(f"wanted output lengths {wanted}, got {got}: end-of-sequence tokens have to be ignored")
    return {"wall_s": wall_s, **asdict(answer)}
