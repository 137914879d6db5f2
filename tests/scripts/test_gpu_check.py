"""gpu_check: the whole of it on CPU, and what it does when a section takes the device down."""

from __future__ import annotations

import json
import time

import pytest

from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check.context import Context, DeviceLost
from scripts.gpu_check.record import Record
from scripts.gpu_check.sections import ORDER
from scripts.gpu_check.sizes import Sizes


def test_dry_run_measures_everything(tmp_path, capsys):
    code = gpu_check.main(["--dry-run", "--budget-seconds", "900", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "gpu-check.json").read_text("utf-8"))
    sections = content["sections"]
    assert {name: section["status"] for name, section in sections.items() if "done" not in section["status"]} == {}
    assert list(sections) == list(ORDER)
    rows = [row for section in sections.values() for row in section["rows"]]
    assert [row for row in rows if "error" in row] == []
    assert all(row["right"] for row in sections["correctness"]["rows"] if "note" not in row)
    for name, figure in (
        ("decode", "share_of_copy"),
        ("matmul", "microseconds"),
        ("prefill", "share_of_matmul"),
        ("engine", "tokens_per_second"),
        ("sweep", "gb_per_second"),
        ("baselines", "microseconds"),
    ):
        assert any(row.get(figure, 0) > 0 for row in sections[name]["rows"]), name
    assert code == 0
    assert "dry run on CPU: no figure here means anything" in capsys.readouterr().out


def test_a_crash_costs_one_section(tmp_path, monkeypatch):
    """After an illegal access every later call of the process fails: all further sections were lost with it."""
    calls = []

    def run_child(options, sections, seconds):
        calls.append(list(sections))
        record = Record.load(options.out)
        for name in sections:
            record.begin(name)
            if name == "decode":
                return "the process ended with exit code -6"
            record.add(name, {"right": True})
            record.end(name, "done in 1 s")
        return None

    monkeypatch.setattr(gpu_check, "_run_child", run_child)
    names = ["ceilings", "decode", "matmul"]
    assert gpu_check.main(["--sections", ",".join(names), "--out", str(tmp_path)]) == 1
    assert calls == [names, ["matmul"]]
    status = {name: section["status"] for name, section in Record.load(tmp_path).sections.items()}
    assert status["decode"] == "the process ended with exit code -6"
    assert status["ceilings"] == status["matmul"] == "done in 1 s"


def test_without_time_everything_is_skipped_and_noted(tmp_path):
    assert gpu_check.main(["--budget-seconds", "0", "--out", str(tmp_path)]) == 0
    sections = Record.load(tmp_path).sections
    assert list(sections) == list(ORDER)
    assert all(section["status"].startswith("skipped") for section in sections.values())


def test_unknown_sections_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--sections", "nope", "--out", str(tmp_path)])
    assert "nope" in capsys.readouterr().err


def context(tmp_path, *, seconds: float = 60.0) -> Context:
    record = Record.create(tmp_path, dry=False)
    record.begin("decode")
    deadline = time.monotonic() + seconds
    return Context(section="decode", sizes=Sizes.create(dry=False), record=record, deadline=deadline)


def test_cases_are_written_as_they_come_refusals_and_errors_included(tmp_path):
    here = context(tmp_path)

    def fail():
        raise RuntimeError("out of\nregisters")

    def refuse():
        raise ValueError("needs a newer GPU")

    here.case({"n": 1}, lambda: {"microseconds": 2.0}, seconds=1)
    here.case({"n": 2}, refuse, seconds=1)
    here.case({"n": 3}, fail, seconds=1)
    here.case({"n": 4}, fail, seconds=1000)
    rows = json.loads((tmp_path / "gpu-check.json").read_text("utf-8"))["sections"]["decode"]["rows"]
    assert rows[:3] == [
        {"n": 1, "microseconds": 2.0},
        {"n": 2, "note": "refused: needs a newer GPU"},
        {"n": 3, "error": "RuntimeError: out of registers"},
    ]
    assert rows[3]["note"].startswith("skipped")
    assert here.record.has_failures
    assert "| 1 | 2 |" in (tmp_path / "gpu-check.md").read_text("utf-8")


def test_a_wrong_result_fails_the_check(tmp_path):
    here = context(tmp_path)
    here.record.end("decode", "done in 1 s")
    assert not here.record.has_failures
    here.record.add("decode", {"right": False})
    assert here.record.has_failures
    assert "| NO |" in here.record.markdown()


def test_a_lost_device_is_noticed_after_an_error(tmp_path, monkeypatch):
    here = context(tmp_path)

    def broken(*_):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("scripts.gpu_check.context.jax.block_until_ready", broken)
    with pytest.raises(DeviceLost, match="ILLEGAL"):
        here.case({}, broken, seconds=1)
