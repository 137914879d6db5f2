"""The engine's steps, compiled for absent GPUs: the cache stays in place, nothing spills, one CUDA graph a step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import pytest

from jaxpaged import cli
from jaxpaged.graphs import CompileReport, ServingPrograms, serving_programs, target
from jaxpaged.graphs.serving import read_model
from tests.support.absent_gpu import require_compiler
from tests.support.shapes import SHAPES, shaped_config

FIXED_TEMPORARIES = 48 << 20  # partial results of split attention, whatever the model's depth


def small_engine(gpu: str, *, layers: int = 2) -> ServingPrograms:
    config = shaped_config("smollm2-135m", layers=layers)
    return serving_programs(config, target(gpu), max_num_seqs=32, max_num_batched_tokens=128, max_model_len=4096)


def tree_bytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_step(programs: ServingPrograms, name: str, report: CompileReport) -> None:
    """What every forward step must hold."""
    _, cache, _, step = programs.recipes[name].arguments
    tokens, model = step.inputs.tokens.shape[0], programs.blueprint.model
    assert report.memory.aliased == tree_bytes(cache)
    activations = 4 * tokens * (model.mlp_dim + model.hidden_size) * programs.blueprint.dtype.itemsize
    assert report.memory.temporaries <= FIXED_TEMPORARIES + activations
    attention = report.kernels_named("paged_attention")
    assert [kernel for kernel in attention if kernel.spills] == []
    shared = [kernel.static_shared + report.launches_of(kernel)[0].dynamic_shared for kernel in attention]
    assert max(shared) <= programs.target.spec.shared_per_block
    assert report.command_buffers == 1 and report.outside_command_buffers == ()


def test_a_decode_step_is_one_cuda_graph_and_writes_the_cache_in_place() -> None:
    """Were a layer's cache copied, the temporaries would hold it: 100 times what they may be."""
    require_compiler()
    programs = small_engine("h200")
    check_step(programs, "forward 32", programs.compile("forward 32"))


def test_block_copies_are_one_cuda_graph_in_place(tmp_path: Path) -> None:
    require_compiler()
    programs = small_engine("h200")
    report = programs.compile("copy", dump=tmp_path)
    assert report.memory.aliased == tree_bytes(programs.recipes["copy"].arguments[0])
    assert report.outside_command_buffers == ()
    assert list((tmp_path / "xla").glob("*.ptx")) and (tmp_path / "optimized_hlo.txt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100", "b200"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("step", ["forward 256", "forward 2048"])
def test_the_steps_of_each_model_on_each_gpu(gpu: str, shape: str, step: str) -> None:
    """All layers: the widest decode step and the widest mixed one."""
    require_compiler()
    programs = serving_programs(shaped_config(shape), target(gpu), max_model_len=8192)
    check_step(programs, step, programs.compile(step))


# --- what needs no compiler


def test_programs_are_those_of_the_engine() -> None:
    programs = small_engine("h200")
    names = list(programs.recipes)
    assert names[:7] == [f"forward {tokens}" for tokens in (128, 64, 48, 32, 16, 8, 1)]
    assert names[-1] == "copy" and {"sample 32 greedy", "sample 32 logprobs adjusts", "history"} <= set(names)
    assert programs.largest() == ["forward 32", "forward 128", "sample 32 greedy", "copy"]
    with pytest.raises(ValueError, match="program: wanted one of .*'forward 128'.*, got 'forward 7'"):
        programs.compile("forward 7")


def test_the_single_streams_program_launches_one_list_of_attention() -> None:
    """Its token is never one of a row of many queries, whose kernels every layer would launch for nothing."""
    programs = small_engine("h200")
    steps = {name: programs.recipes[name].arguments[3] for name in ("forward 1", "forward 8")}
    lists = {name: step.inputs.attention.work.prefill for name, step in steps.items()}
    assert lists["forward 1"] is None and lists["forward 8"] is not None


def test_the_cache_gets_what_the_weights_leave() -> None:
    """8.03 billion parameters of two bytes, in 90 % of 85.1 GB; a block of 16 tokens takes 2 MiB."""
    programs = serving_programs(shaped_config("llama-3.1-8b"), target("a100"))
    weights = tree_bytes(programs.blueprint.abstract_params)
    assert weights == 2 * 8_030_261_248
    assert programs.blueprint.limits.num_blocks == (int(85_100_068_864 * 0.9) - weights) // (2 << 20)
    half = serving_programs(shaped_config("llama-3.1-8b"), target("a100", devices=2), kv_cache_memory_bytes=1 << 30)
    assert half.blueprint.spec.batch.work is not None
    assert half.blueprint.spec.batch.work.num_kv_heads == 4


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="KV cache: wanted memory for at least 2 blocks"):
        serving_programs(shaped_config("llama-3.1-8b", layers=100), target("l4"))
    with pytest.raises(ValueError, match="wanted the target's 2 devices, got 1"):
        serving_programs(shaped_config("smollm2-135m"), target("l4", devices=2), tensor_parallel_size=1)


def test_a_config_alone_is_a_model(tmp_path: Path) -> None:
    model = read_model(str(write_config(tmp_path)), layers=3)
    assert (model.num_layers, len(model.windows), model.hidden_size) == (3, 3, 576)
    assert read_model(str(tmp_path), layers=None).num_layers == 30
    with pytest.raises(ValueError, match="layers: wanted 1 to the model's 30, got 31"):
        read_model(str(tmp_path), layers=31)


# --- the command


def test_the_command_lists_the_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graphs", str(write_config(tmp_path)), "--target", "b200", "--list", "--max-num-seqs", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("up to 8 sequences of 8192") and "1 × b200" in lines[0]
    assert lines[1] == "forward 2048" and lines[-1] == "copy"


def test_the_command_compiles_dumps_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_compiler()
    config, dump, page = write_config(tmp_path), tmp_path / "dump", tmp_path / "page.md"
    arguments = ["--layers", "1", "--only", "copy", "--dump", str(dump), "--report", str(page)]
    assert cli.main(["graphs", str(config), *arguments, "--max-num-seqs", "8"]) == 0
    assert "| copy | " in capsys.readouterr().out
    assert "| copy | " in page.read_text("utf-8")
    assert '"command_buffer"' in (dump / "copy" / "report.json").read_text("utf-8")


def test_the_command_tells_errors_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graphs", str(write_config(tmp_path)), "--target", "h300"]) == 2
    assert capsys.readouterr().err.startswith("jaxpaged: error: GPU: wanted one of ['a100', ")


def write_config(folder: Path) -> Path:
    """A config.json without weights beside it."""
    path = folder / "config.json"
    path.write_text(json.dumps(shaped_config("smollm2-135m")), "utf-8")
    return path
