"""gpu_check's lines for a GPU, run on a CPU with a GPU's answers put in their place."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import graphs
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import attention, baselines, machine, peers, sections
from scripts.gpu_check.context import Context, DeviceLost
from scripts.gpu_check.record import Record
from scripts.gpu_check.sizes import Sizes

DRY = Sizes.create(dry=True)
LIMIT = 80 << 30


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """The module sees one H200 with 80 GiB, half of it in use."""
    device = SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H200",
        core_count=132,
        compute_capability="9.0",
        memory_stats=lambda: {"bytes_limit": LIMIT, "bytes_in_use": LIMIT // 2},
    )
    monkeypatch.setattr(f"scripts.gpu_check.{module}.jax.devices", lambda: [device])


def section(tmp_path, name: str, sizes: Sizes = DRY) -> Context:
    record = Record.create(tmp_path, dry=False)
    record.begin(name)
    return Context(section=name, sizes=sizes, record=record, deadline=time.monotonic() + 60)


@pytest.mark.parametrize(("kernel", "rows"), [("triton", (16, 128)), ("mosaic", (64, 128))])
def test_batches_get_the_gpus_own_tiles(kernel, rows):
    with jax.sharding.use_abstract_mesh(graphs.target("h200").mesh):
        work = attention.work_config(kernel, heads=(8, 4, 128), block_size=16, cache_dtype="bfloat16")
    assert work.prefill is not None
    assert (work.num_sms, work.decode.query_rows, work.prefill.query_rows) == (132, *rows)


def test_a_pool_beyond_free_memory_is_refused(monkeypatch):
    pretend_gpu(monkeypatch, "attention")
    attention.check_memory(30 << 30)
    with pytest.raises(ValueError, match=r"wanted 33\.0 GiB"):
        attention.check_memory(33 << 30)


def test_the_device_is_described(monkeypatch):
    pretend_gpu(monkeypatch, "machine")
    facts = machine.describe()
    assert (facts["device"], facts["multiprocessors"], facts["memory_gib"]) == ("NVIDIA H200", 132, 80.0)


def test_cudnns_attention_takes_what_it_is_given(monkeypatch, tmp_path):
    """JAX's private interface checks shapes and dtypes when it is traced; only running it takes cuDNN."""
    traced = []

    def trace(step, *arguments, repeats, rounds):
        traced.append((jax.eval_shape(step, *arguments), arguments[0]))
        return 1e-6

    pretend_gpu(monkeypatch, "baselines")
    monkeypatch.setattr(baselines, "timed", trace)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    sizes = replace(DRY, dtype="bfloat16")
    row = baselines._cudnn(section(tmp_path, "baselines", sizes), 2, 32, 16)
    assert row["gb_per_second"] == pytest.approx(2 * 2 * 32 * 2 * 16 * 2 / 1e-6 / 1e9)
    ((out, q),) = traced
    assert (out.shape, out.dtype) == (q.shape, jnp.bfloat16)


def test_a_peer_runs_in_its_own_process(monkeypatch, tmp_path):
    """torch is not there on purpose: a module of its name answers as torch without a GPU does."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n", "utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    here = section(tmp_path, "peers")
    peers.run(here)
    rows = here.record.sections["peers"]["rows"]
    assert len(rows) == 3
    assert all("torch sees no GPU" in row["error"] for row in rows)


def test_what_a_peer_prints_is_its_row(monkeypatch):
    printed = SimpleNamespace(returncode=0, stdout='loading\n{"tokens_per_second": 7.0}\n', stderr="")
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: printed)
    assert peers._run({"peer": "transformers generate"}, 5.0) == {"tokens_per_second": 7.0}


def test_a_section_that_fails_leaves_the_others(monkeypatch, tmp_path):
    def fail(_):
        raise KeyError("mistake")

    def lose(_):
        raise DeviceLost("illegal access")

    ran = []
    runs = {"ceilings": fail, "decode": ran.append, "matmul": lose, "prefill": ran.append}
    monkeypatch.setattr(sections, "import_module", lambda name: SimpleNamespace(run=runs[name.rpartition(".")[2]]))
    record = Record.create(tmp_path, dry=True)
    assert sections.run_sections(list(runs), DRY, record, time.monotonic() + 60) == sections.LOST
    status = {name: content["status"] for name, content in record.sections.items()}
    assert status["ceilings"] == "failed: KeyError: 'mistake'"
    assert status["decode"].startswith("done")
    assert status["matmul"] == "the device was lost: illegal access"
    assert "prefill" not in status and len(ran) == 1


def test_a_section_for_which_no_time_is_left_is_not_begun(tmp_path):
    record = Record.create(tmp_path, dry=False)
    assert sections.run_sections(["engine"], Sizes.create(dry=False), record, time.monotonic() + 20) == 0
    assert record.sections["engine"]["status"].startswith("skipped: 20 s left")


def test_a_process_that_hangs_is_stopped(monkeypatch, tmp_path):
    def hang(command, **options):
        record = Record.load(tmp_path)
        record.begin("ceilings")
        time.sleep(0.3)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(gpu_check.subprocess, "run", hang)
    arguments = ["--sections", "ceilings,decode", "--budget-seconds", "0.2", "--out", str(tmp_path)]
    assert gpu_check.main(arguments) == 1
    status = {name: content["status"] for name, content in Record.load(tmp_path).sections.items()}
    assert status["ceilings"] == "stopped: still running when the budget was spent"
    assert status["decode"].startswith("skipped")
