"""Compiling any function for an absent GPU: what the report says, and what goes wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jaxpaged.graphs import GPUS, CompileError, CompilerMissing, target, toolchain
from jaxpaged.graphs import target as make_target
from jaxpaged.graphs.target import _donated, _last_words
from tests.support.absent_gpu import require_compiler

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
SHAPE = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)


def product(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)


def write_product(pool: dict[str, jax.Array], x: jax.Array, unused: jax.Array) -> dict[str, jax.Array]:
    """A closure's kernel, a donated pool in a dict, an argument nobody reads."""
    del unused
    block = pl.BlockSpec((64, 128), lambda i: (i, 0))
    kernel = pl.pallas_call(
        product, out_shape=SHAPE, grid=(2,), in_specs=[block, pl.BlockSpec()], out_specs=block, name="product_kernel"
    )
    return {"pages": pool["pages"].at[3].set(kernel(x, x))}


def test_a_pallas_kernel_is_reported_from_registers_to_cuda_graph() -> None:
    require_compiler()
    pages = jax.ShapeDtypeStruct((64, 128, 128), jnp.bfloat16)
    flags = ("--xla_gpu_graph_min_graph_size=1",)  # XLA makes no graph of fewer than five launches
    report = target("a100").compile(write_product, {"pages": pages}, SHAPE, SHAPE, donate_argnums=(0,), xla_flags=flags)
    (kernel,) = report.kernels_named("product_kernel")
    assert 16 <= kernel.registers <= 255 and kernel.spills == 0
    (launch,) = report.launches_of(kernel)
    assert launch.grid[0] == 2 and launch.threads[0] == 128 and launch.dynamic_shared > 0
    assert launch.command_buffer == 0 and report.command_buffers == 1 and report.outside_command_buffers == ()
    assert "mma.sync" in "".join(report.ptx) and ".target sm_80" in "".join(report.ptx)
    assert report.hlo.startswith("HloModule")
    pool = 64 * 128 * 128 * 2
    assert report.memory.aliased == pool  # written in place
    assert report.memory.arguments == pool + 128 * 128 * 2  # what is not read is no argument
    assert report.costs.dot_flops == 2 * 128**3
    assert report.costs.argument_bytes == report.memory.arguments


def test_sharded_arguments_are_counted_per_device() -> None:
    require_compiler()
    h200 = target("h200", devices=2)
    x = h200.abstract((64, 1024), jnp.bfloat16)
    w = h200.abstract((1024, 512), jnp.bfloat16, None, "model")
    report = h200.compile(lambda x, w: (x @ w).sum(), x, w)
    assert report.memory.arguments == 64 * 1024 * 2 + 1024 * 256 * 2
    assert "all-reduce" in report.hlo
    assert report.devices == 2


def test_what_the_compiler_refuses_is_told_in_its_words() -> None:
    """Two operands of 128 KiB are more shared memory than an A100 has."""
    require_compiler()

    def multiply(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    call = pl.pallas_call(multiply, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    x, y = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
    with pytest.raises(CompileError, match=r"does not compile for a100: .*[Ss]hared memory"):
        target("a100").compile(call, x, y)


def test_a_crash_is_an_error_with_the_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel for another architecture aborts the compiler, which must not take this process along."""
    require_compiler()
    child = tmp_path / "child.py"
    child.write_text(
        "import os, signal, sys\nprint('LLVM ERROR: Cannot select: elect.sync', flush=True)\n"
        f"os.kill(os.getpid(), signal.Signals({int(signal.SIGABRT)}))\n"
    )
    monkeypatch.setattr("jaxpaged.graphs.child.__file__", str(child))
    with pytest.raises(CompileError, match=r"crashed \(exit code -6\)(?s:.*)Cannot select: elect.sync"):
        target("h100").compile(jnp.sin, SHAPE)


def test_a_compilation_may_not_take_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_compiler()
    child = tmp_path / "child.py"
    child.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("jaxpaged.graphs.child.__file__", str(child))
    with pytest.raises(CompileError, match=r"more than 0\.2 s; give a longer timeout"):
        target("h100").compile(jnp.sin, SHAPE, timeout=0.2)


def test_without_the_wheels_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(toolchain, "_places", list)
    with pytest.raises(CompilerMissing, match=r"pip install 'jaxpaged\[gpu-aot\]'"):
        target("h100").compile(jnp.sin, SHAPE)


def test_wheels_in_a_folder_of_their_own_are_found_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inside the environment JAX would try the plugin at every start, and tell of the GPU it does not find."""
    folder = tmp_path / toolchain.FOLDER
    for name in (*toolchain.NEEDED, toolchain.PTXAS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.setattr(toolchain.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = toolchain.find_toolchain()
    assert found.ptxas == folder / toolchain.PTXAS
    environment = found.environment(tmp_path / "dump", ("--xla_flag=1",))
    assert environment["PYTHONPATH"] == f"{folder}{os.pathsep}elsewhere"
    assert environment["XLA_FLAGS"].endswith("--xla_flag=1")


def test_the_childs_settings_are_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With this process' XLA_FLAGS the tests compiled without optimisation; from its cache nothing was dumped."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "cache")
    environment = toolchain.Toolchain(ptxas=tmp_path, extra_path=None).environment(tmp_path, ())
    assert "optimization_level" not in environment["XLA_FLAGS"]
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
    assert environment["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_gpu_is_described(name: str) -> None:
    gpu = target(name)
    assert gpu.mesh.abstract_device.num_cores == gpu.spec.num_cores
    text = gpu.spec.text_proto()
    assert f"core_count: {gpu.spec.num_cores} " in text and "{{" not in text
    assert gpu.spec.architecture == {"a100": "sm_80", "l4": "sm_89", "b200": "sm_100a"}.get(name, "sm_90a")


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GPU: wanted one of .*'h200'.*, got 'h300'"):
        make_target("h300")
    with pytest.raises(ValueError, match="devices: wanted 1 or more, got 0"):
        make_target("h200", devices=0)


def test_donated_arguments_are_found_among_the_leaves() -> None:
    arguments = ((1, 2), {"a": 3}, "static", [4, 5, 6])
    assert _donated(arguments, (0, 3), (2,)) == [0, 1, 3, 4, 5]


def test_the_compilers_own_functions_are_left_out_of_a_crash() -> None:
    log = "first\nE LLVM ERROR: no\nF *** Begin stack trace ***\n\t\n_PyEval\n*** End stack trace ***"
    assert _last_words(log) == "first\nE LLVM ERROR: no"
