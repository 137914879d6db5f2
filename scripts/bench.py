"""Throughput and latency of jaxpaged and its peers on W1 and W2, side by side in one run.

Every engine runs in a process of its own through an adapter in scripts/peers/. A round runs each engine once, in an
order that rotates from round to round; the report gives medians over the rounds. Peers are used where named:

    python -m scripts.bench --reference-python PYTHON_WITH_TORCH \\
        --openvino-python PYTHON --openvino-model f32=DIR int8=DIR \\
        --llama-server PATH --llama-model F32=FILE Q8_0=FILE --rounds 3

Writes NAME.json (everything measured) and NAME.md (the report) into --out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpaged.demo import cache_directory, fetch_demo_model
from scripts import bench_report
from scripts.bench_engines import EngineSpec, engines_from_options
from scripts.costs import ModelCosts
from scripts.export_hf import export
from scripts.machine import describe_machine, probe
from scripts.peers import protocol
from scripts.workload import Request, workloads_of

ROOT = Path(__file__).parent.parent
WARMUP_REQUESTS = 4
WARMUP_PROMPT = 32  # tokens
WARMUP_OUTPUT = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of running an engine once: a result of its adapter, or the last lines of its error output."""

    result: Mapping[str, Any] | None
    error: str | None


def run_engine(
    spec: EngineSpec, workloads: Mapping[str, Sequence[Request]], *, threads: int, timeout_s: float
) -> Outcome:
    """Run the adapter once over the workloads that the engine takes, cut to its first requests where it says so."""
    cut = {name: list(rows[: spec.first_requests.get(name)]) for name, rows in workloads.items()}
    cut = {name: rows for name, rows in cut.items() if rows}
    first = next(iter(cut.values()))
    job = protocol.Job(
        model=spec.model,
        threads=threads,
        options=dict(spec.options),
        warmup=[
            # Backwards, so that no prefix cache helps the timed run.
            protocol.Request(prompt_ids=row.prompt_ids[:WARMUP_PROMPT][::-1], out_len=WARMUP_OUTPUT)
            for row in first[:WARMUP_REQUESTS]
        ],
        workloads={name: [protocol.Request(**asdict(row)) for row in rows] for name, rows in cut.items()},
    )
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        protocol.write_job(job_file, job)
        command = [spec.python, "-m", spec.module, str(job_file), str(result_file)]
        # OpenMP and BLAS pools are sized before the adapter can say anything.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            return Outcome(result=None, error=str(error))
        if done.returncode != 0:
            return Outcome(result=None, error="\n".join(done.stderr.splitlines()[-5:]))
        return Outcome(result=json.loads(result_file.read_text()), error=None)


def measure(
    specs: Sequence[EngineSpec],
    workloads: Mapping[str, Sequence[Request]],
    *,
    rounds: int,
    threads: int,
    timeout_s: float,
) -> tuple[list[dict[str, Any]], dict[str, dict[int, list[int]]]]:
    """Run all engines `rounds` times. Returns the engines' entries of the record and the reference's tokens.

    An engine that fails is not tried again. The tokens are by workload and request index.
    """
    entries = [spec.entry() for spec in specs]
    outputs: list[list[tuple[dict[str, Any], list[list[int]], str]]] = [[] for _ in specs]
    for number in range(rounds):
        for position in range(len(specs)):
            index = (position + number) % len(specs)
            spec, entry = specs[index], entries[index]
            if entry["error"] is not None:
                continue
            outcome = run_engine(spec, workloads, threads=threads, timeout_s=timeout_s)
            if outcome.result is None:
                entry["error"] = outcome.error
                print(f"round {number + 1}: {spec.name} failed: {outcome.error}", flush=True)
                continue
            entry["versions"] = outcome.result["versions"]
            entry["load_s"].append(outcome.result["load_s"])
            for name, run in outcome.result["runs"].items():
                kept = {key: run[key] for key in ("wall_s", "first_token_s", "finish_s", "stats")}
                entry["runs"].setdefault(name, []).append(kept)
                outputs[index].append((kept, run["token_ids"], name))
                print(f"round {number + 1}: {spec.name} {name} {run['wall_s']:.1f} s", flush=True)
    reference = reference_tokens(specs, outputs)
    for rows in outputs:
        for kept, token_ids, name in rows:
            known = reference.get(name, {})
            kept["compared"] = sum(index in known for index in range(len(token_ids)))
            kept["identical"] = sum(ids == known.get(index) for index, ids in enumerate(token_ids))
    return entries, reference


def reference_tokens(
    specs: Sequence[EngineSpec], outputs: Sequence[Sequence[tuple[Any, list[list[int]], str]]]
) -> dict[str, dict[int, list[int]]]:
    """Float32 tokens of Hugging Face by workload and request: one request at a time where that ran, else batched."""
    reference: dict[str, dict[int, list[int]]] = {}
    ranked = sorted(zip(specs, outputs, strict=True), key=lambda pair: pair[0].reference_rank)
    for spec, rows in ranked:
        for _, token_ids, name in rows if spec.reference_rank else ():
            reference.setdefault(name, {}).update(enumerate(token_ids))
    return reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory, for jaxpaged and transformers; default: the demo model"
    )
    parser.add_argument("--jaxpaged-option", nargs="*", default=[], metavar="NAME=JSON", help="of jaxpaged.LLM")
    parser.add_argument("--reference-python", help="interpreter with torch and transformers")
    parser.add_argument("--sequential", type=int, default=16, help="requests of W1 for transformers one at a time")
    parser.add_argument("--openvino-python", help="interpreter with openvino-genai")
    parser.add_argument("--openvino-model", nargs="*", default=[], metavar="LABEL=DIR", help="label f32, f16 or int8")
    parser.add_argument("--llama-server", help="llama.cpp's llama-server")
    parser.add_argument("--llama-model", nargs="*", default=[], metavar="LABEL=FILE", help="label F32, F16 or Q8_0")
    parser.add_argument("--engines", nargs="*", help="only the engines whose names hold one of these words")
    parser.add_argument("--workloads", nargs="*", default=["W1", "W2"], choices=("W1", "W2"))
    parser.add_argument("--first", type=int, help="only the first requests of W1 (trial runs)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one engine in one round")
    parser.add_argument("--note", default="", help="how the machine was used meanwhile; goes into the report")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements")
    parser.add_argument("--name", help="of the files; default bench-DATE")
    options = parser.parse_args()
    options.model = options.model or demo_directory()
    specs = engines_from_options(options)
    if not specs:
        parser.error(f"no engine's name holds one of {options.engines}")
    workloads = {name: rows[: options.first] for name, rows in _workloads(options).items()}
    now = datetime.datetime.now(datetime.UTC)
    record: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "note": options.note,
        "machine": describe_machine(options.threads),
        "probes": [probe(options.threads)],
        "model": {"name": options.model.name, "costs": _costs(options.model)},
        "workloads": {name: [[len(row.prompt_ids), row.out_len] for row in rows] for name, rows in workloads.items()},
        "rounds": options.rounds,
    }
    record["engines"], _ = measure(
        specs, workloads, rounds=options.rounds, threads=options.threads, timeout_s=options.timeout
    )
    record["probes"].append(probe(options.threads))
    name = options.name or f"bench-{now.date().isoformat()}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(bench_report.dump(record))
    report = bench_report.markdown(record)
    (options.out / f"{name}.md").write_text(report)
    sys.stdout.write(report)


def demo_directory() -> Path:
    """The demo model as a Hugging Face directory in float32, written into jaxpaged's cache at first use."""
    directory = cache_directory() / "demo-hf"
    if not (directory / "tokenizer_config.json").exists():  # written last
        export(fetch_demo_model(), directory)
    return directory


def _workloads(options: argparse.Namespace) -> dict[str, list[Request]]:
    made = workloads_of(options.model / "tokenizer.json", seed=0)
    return {name: made[name] for name in options.workloads}


def _costs(model: Path) -> dict[str, int]:
    return asdict(ModelCosts.from_config(json.loads((model / "config.json").read_text())))


if __name__ == "__main__":
    main()
