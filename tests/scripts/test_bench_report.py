"""The benchmark's report: figures from a recorded run, and what it says when something is missing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_report
from scripts.bench import reference_tokens
from scripts.bench_engines import EngineSpec
from scripts.costs import ModelCosts

RECORD = Path(__file__).parent / "bench_record.json"


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def _spec(name: str, rank: int) -> EngineSpec:
    return EngineSpec(
        name=name, python="python", module="m", model="x", options={}, weight_bytes=4.0, reference_rank=rank
    )


def test_report_of_a_recorded_run(record: dict[str, Any]):
    report = bench_report.markdown(record)
    assert record["machine"]["cpu"] in report
    for entry in record["engines"]:
        assert entry["name"] in report
    assert "## W1: 4 request(s)" in report
    assert "## W2: 1 request(s), 64 prompt + 128 output tokens" in report
    assert json.loads(bench_report.dump(record))["rounds"] == record["rounds"]


def test_figures_of_a_made_up_engine(record: dict[str, Any]):
    """Two rounds of 2 and 4 seconds; 10 output tokens; a token every 0.1 s after the first at 1 s."""
    run = {"first_token_s": [1.0], "finish_s": [1.9], "stats": {"device_wait_s": 1.5}, "compared": 1, "identical": 1}
    record["workloads"] = {"W2": [[20, 10]]}
    record["probes"] = [{"gemm_gflops": 100.0, "read_gbps": 10.0}, {"gemm_gflops": 80.0, "read_gbps": 9.0}]
    record["model"]["costs"] = {"layer_weights": 10**8, "head_weights": 10**7, "attention_width": 0}
    record["engines"] = [
        {
            "name": "made up",
            "options": {},
            "weight_bytes": 4.0,
            "versions": {},
            "load_s": [5.0, 6.0],
            "error": None,
            "runs": {"W2": [{"wall_s": 2.0, **run}, {"wall_s": 4.0, **run, "identical": 0}]},
        }
    ]
    (summary,) = bench_report.summarise(record, "W2")
    assert summary.wall_s == 3.0
    assert summary.spread == pytest.approx(2 / 3)
    assert summary.output_rate == pytest.approx(10 / 3)
    assert summary.total_rate == pytest.approx(10.0)
    assert summary.token_s == pytest.approx(0.1)
    assert summary.bandwidth_share == pytest.approx(0.44 / 0.1 / 10)
    assert summary.compute_share == pytest.approx((2 * 0.1 * 29 + 2 * 0.01 * 10) / 3 / 100)
    assert summary.host_share == pytest.approx((0.25 + 0.625) / 2)
    assert (summary.identical, summary.compared) == (0, 1)
    assert summary.load_s == 5.5


def test_an_engine_that_failed_is_named_and_the_others_are_reported(record: dict[str, Any]):
    failed = copy.deepcopy(record["engines"][-1])
    failed |= {"name": "broken", "runs": {}, "load_s": [], "versions": {}, "error": "Traceback\nOSError: no such file"}
    record["engines"].append(failed)
    report = bench_report.markdown(record)
    assert "- broken: did not run" in report
    assert "OSError: no such file" in report


def test_unknown_times_are_left_open(record: dict[str, Any]):
    for entry in record["engines"]:
        for runs in entry["runs"].values():
            for run in runs:
                run |= {
                    "first_token_s": [None] * len(run["finish_s"]),
                    "finish_s": [None] * len(run["finish_s"]),
                    "compared": 0,
                }
    for summary in bench_report.summarise(record, "W1"):
        assert summary.first_token_s is summary.token_s is summary.identical is None
    assert bench_report.MISSING in bench_report.markdown(record)


def test_reference_is_the_sequential_run_where_there_is_one():
    """Padding of a static batch changes roundings, so its tokens serve only where nothing better ran."""
    specs = [_spec("sequential", 2), _spec("other", 0), _spec("batched", 1)]
    outputs = [[({}, [[1]], "W1")], [({}, [[9], [9], [9]], "W1")], [({}, [[2], [3]], "W1")]]
    assert reference_tokens(specs, outputs) == {"W1": {0: [1], 1: [3]}}


def test_costs_by_hand():
    config = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    costs = ModelCosts.from_config({**config, "num_key_value_heads": 1, "vocab_size": 10})
    assert costs.layer_weights == 2 * (4 * 4 + 4 * 4 + 2 * 4 * 2 + 3 * 4 * 8)
    assert costs.head_weights == 40
    assert costs.attention_width == 2 * 4
    assert costs.flops([(3, 2)]) == 2 * costs.layer_weights * 4 + 2 * 40 * 2 + 4 * 8 * (1 + 2 + 3 + 4)
    assert costs.step_bytes(2.0) == 2 * (costs.layer_weights + 40)
