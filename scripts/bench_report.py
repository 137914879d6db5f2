"""From a benchmark's record to figures and a Markdown report. Pure: no engine is run here."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.costs import ModelCosts

MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """An engine on a workload: medians over the rounds. Times in seconds; None where the engine did not tell."""

    engine: str
    requests: int  # of the workload's first ones that ran
    wall_s: float
    spread: float  # (slowest - fastest) / median wall time of the rounds
    output_rate: float  # generated tokens per second
    total_rate: float  # prompt and generated tokens per second
    first_token_s: float | None  # median over the requests
    finish_s: float | None  # median over the requests
    token_s: float | None  # time per output token after the first, median over the requests
    identical: int | None  # requests with the reference's tokens, in the worst round
    compared: int
    compute_share: float  # of the float32 GEMM peak, all arithmetic over the wall time
    bandwidth_share: float | None  # single stream: weights read per decode step over the memory's rate
    host_share: float | None  # of the wall time spent outside compiled programs
    load_s: float


def summarise(record: Mapping[str, Any], workload: str) -> list[Summary]:
    """One summary for each engine that ran the workload, in the record's order."""
    return [_summary(record, workload, entry) for entry in record["engines"] if entry["runs"].get(workload)]


def _summary(record: Mapping[str, Any], workload: str, entry: Mapping[str, Any]) -> Summary:
    runs = entry["runs"][workload]
    costs = ModelCosts(**record["model"]["costs"])
    requests = [(prompt, output) for prompt, output in record["workloads"][workload]][: len(runs[0]["finish_s"])]
    prompts, outputs = (sum(column) for column in zip(*requests, strict=True))
    walls = [run["wall_s"] for run in runs]
    wall = statistics.median(walls)
    token_s = _median(_token_times(run, requests) for run in runs)
    compared = min(run["compared"] for run in runs)
    best = {key: max(probe[key] for probe in record["probes"]) for key in ("gemm_gflops", "read_gbps")}
    read = costs.step_bytes(entry["weight_bytes"]) / token_s / 1e9 / best["read_gbps"] if token_s else None
    return Summary(
        engine=entry["name"],
        requests=len(requests),
        wall_s=wall,
        spread=(max(walls) - min(walls)) / wall,
        output_rate=outputs / wall,
        total_rate=(prompts + outputs) / wall,
        first_token_s=_median(_known(run["first_token_s"]) for run in runs),
        finish_s=_median(_known(run["finish_s"]) for run in runs),
        token_s=token_s,
        identical=min(run["identical"] for run in runs) if compared else None,
        compared=compared,
        compute_share=costs.flops(requests) / wall / 1e9 / best["gemm_gflops"],
        bandwidth_share=read if len(requests) == 1 else None,
        host_share=_host_share(runs),
        load_s=statistics.median(entry["load_s"]),
    )


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _token_times(run: Mapping[str, Any], requests: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds per output token after the first, per request that has both times and more than one token."""
    rows = zip(run["first_token_s"], run["finish_s"], requests, strict=True)
    return [
        (finish - first) / (output - 1)
        for first, finish, (_, output) in rows
        if first is not None and finish is not None and output > 1
    ]


def _median(rounds: Iterable[Sequence[float]]) -> float | None:
    """Median over the rounds of the median within a round; None when no round has a value."""
    inner = [statistics.median(values) for values in rounds if values]
    return statistics.median(inner) if inner else None


def _host_share(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the wall time in which the host was not waiting for the device, from stats' device_wait_s."""
    shares = [1 - run["stats"]["device_wait_s"] / run["wall_s"] for run in runs if "device_wait_s" in run["stats"]]
    return statistics.median(shares) if shares else None


def dump(record: Mapping[str, Any]) -> str:
    """The record as JSON with rounded times."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, Mapping):
            return {key: rounded(inner) for key, inner in value.items()}
        return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value

    return json.dumps(rounded(record), ensure_ascii=False) + "\n"


def markdown(record: Mapping[str, Any]) -> str:
    """The report: machine, probe, a table per workload, what failed."""
    machine, probes = record["machine"], record["probes"]
    best = {key: max(probe[key] for probe in probes) for key in ("gemm_gflops", "read_gbps")}
    lines = [
        f"# Benchmark of {record['model']['name']}, {record['date']}",
        "",
        f"- Machine: {machine['cpu']}, {machine['threads_used']} of {machine['cores']} cores used, "
        f"{machine['memory_gib']} GiB, {' '.join(machine['vector_units'])}; {machine['system']}",
        f"- Load average at the start: {machine['load_average']:.1f}. {record['note']}".rstrip(),
        f"- float32 GEMM peak {best['gemm_gflops']:.0f} GFLOP/s, memory read {best['read_gbps']:.1f} GB/s (numpy); "
        + "before and after: "
        + ", ".join(f"{probe['gemm_gflops']:.0f} / {probe['read_gbps']:.1f}" for probe in probes),
        f"- {record['rounds']} round(s), interleaved; medians; each engine in its own process",
        "",
    ]
    for name in record["workloads"]:
        lines += _workload_section(record, name)
    lines += ["## Versions and options", ""]
    for entry in record["engines"]:
        versions = ", ".join(f"{package} {version}" for package, version in entry["versions"].items())
        lines.append(f"- {entry['name']}: {versions or 'did not run'}; `{json.dumps(entry['options'])}`")
        if entry["error"]:
            last = entry["error"].strip().splitlines()[-1]
            lines.append(f"  - failed: {last}")
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "engine",
    "requests",
    "wall s",
    "spread",
    "out tok/s",
    "all tok/s",
    "first row is",
    "first token s",
    "finish s",
    "ms/token",
    "of f32 peak",
    "of bandwidth",
    "host share",
    "same tokens",
    "load s",
)


def _workload_section(record: Mapping[str, Any], name: str) -> list[str]:
    sizes = record["workloads"][name]
    prompts, outputs = sum(row[0] for row in sizes), sum(row[1] for row in sizes)
    lines = [
        f"## {name}: {len(sizes)} request(s), {prompts} prompt + {outputs} output tokens",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
    ]
    rows = summarise(record, name)
    for row in rows:
        cells = (
            row.engine,
            str(row.requests),
            f"{row.wall_s:.1f}",
            f"{row.spread:.0%}",
            f"{row.output_rate:.1f}",
            f"{row.total_rate:.1f}",
            f"{rows[0].output_rate / row.output_rate:.2f}×",
            _number(row.first_token_s, "{:.2f}"),
            _number(row.finish_s, "{:.2f}"),
            _number(row.token_s and 1e3 * row.token_s, "{:.1f}"),
            f"{row.compute_share:.0%}",
            _number(row.bandwidth_share, "{:.0%}"),
            _number(row.host_share, "{:.1%}"),
            MISSING if row.identical is None else f"{row.identical}/{row.compared}",
            f"{row.load_s:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _number(value: float | None, style: str) -> str:
    return MISSING if value is None else style.format(value)


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())))
