"""Reading what XLA and ptxas print: schedules, registers; counting FLOPs; the tables made of it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.graphs import CompileReport, Costs, Kernel, Memory, render
from jaxpaged.graphs.assembler import parse_verbose
from jaxpaged.graphs.costs import count_costs
from jaxpaged.graphs.thunks import parse_thunks

SCHEDULE = """\
000: kCommandBuffer [source | sink] 
    001: kCustomKernel [source       | next=002 (1)] kern grid: [2, 2, 1] threads: [128, 1, 1]  shared_memory: 32768 bytes
    002: kAsyncStart   [prev=001 (1) | sink        ] stream=computation_stream[0], async_id=2
        003: kCopy [source | sink] kCopy
004: kWhile [source | sink] loop
    005: kCommandBuffer [source | sink]
        006: kCustomKernel [source | sink] kern grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501, W291
VERBOSE = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    40 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 132 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers
"""


def sample_report() -> CompileReport:
    return CompileReport(
        target="h200",
        devices=1,
        hlo="HloModule",
        ptx=(".version",),
        kernels=(
            Kernel(name="kern", registers=71, spill_stores=4, spill_loads=8, stack=0, static_shared=1024),
            Kernel(name="mosaic", registers=232, spill_stores=0, spill_loads=0, stack=0, static_shared=1),
        ),
        launches=parse_thunks(SCHEDULE),
        memory=Memory(arguments=19_100_000_000, outputs=1, aliased=32_640_000, temporaries=512),
        costs=Costs(dot_flops=2_000_000_000, argument_bytes=1, output_bytes=1, open_loops=0),
        seconds=1.5,
    )


def test_the_schedule_tells_what_is_in_which_cuda_graph() -> None:
    report = sample_report()
    kinds = [(launch.kind, launch.depth, launch.command_buffer) for launch in report.launches]
    assert kinds == [
        ("kCommandBuffer", 0, None),
        ("kCustomKernel", 1, 0),
        ("kAsyncStart", 1, 0),
        ("kCopy", 2, 0),
        ("kWhile", 0, None),
        ("kCommandBuffer", 1, None),
        ("kCustomKernel", 2, 1),
    ]
    assert report.command_buffers == 2
    assert [launch.kind for launch in report.outside_command_buffers] == ["kWhile"]
    first = report.launches_of(report.kernels[0])[0]
    assert (first.grid, first.threads, first.dynamic_shared) == ((2, 2, 1), (128, 1, 1), 32768)
    with pytest.raises(ValueError, match=r"wanted one named like 'attention', got \['kern', 'mosaic'\]"):
        report.kernels_named("attention")


def test_ptxas_is_read() -> None:
    first, second = parse_verbose(VERBOSE)
    assert first == Kernel(name="first", registers=168, spill_stores=8, spill_loads=12, stack=40, static_shared=132)
    assert first.spills == 20
    assert (second.name, second.registers, second.spills, second.static_shared) == ("second", 18, 0, 0)


def test_a_module_without_a_kernel_has_none() -> None:
    """A module of constants was read as a kernel without a name."""
    assert parse_verbose("ptxas info    : 128 bytes gmem\n") == []


def test_products_are_counted_through_loops_branches_and_grids() -> None:
    x = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ x_ref[...]

    def function(x, unused):
        square = pl.pallas_call(kernel, grid=(5,), out_shape=jax.ShapeDtypeStruct((8, 8), x.dtype), interpret=True)
        scanned, _ = lax.scan(lambda c, row: (c @ row, None), x[0], x)  # 4 products
        branched = lax.cond(x[0, 0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, scanned)  # 2 at most
        looped = lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y @ y, branched)  # counted once
        return jnp.einsum("bij,bjk->bik", x, x), square(looped)  # 4 products, 5 programs

    costs = count_costs(jax.jit(function).trace(x, x).jaxpr, (0,))
    assert costs.dot_flops == (4 + 2 + 1 + 4 + 5) * 2 * 8**3
    assert costs.open_loops == 1
    assert (costs.argument_bytes, costs.output_bytes) == (4 * 8 * 8 * 4, (4 + 1) * 8 * 8 * 4)


def test_tables_and_json() -> None:
    reports = {"forward 8": sample_report()}
    assert render.program_table(reports).splitlines()[2] == (
        "| forward 8 | 19.1 GB | 32.6 MB | 512 B | 2 | 2 | 1 | 12 B | 2.0 |"
    )
    kernels = render.kernel_table(reports).splitlines()
    assert kernels[2] == "| forward 8 | kern | 2 | 2 × 2 × 1 | 128 | 71 | 12 | 33.8 kB |"
    assert kernels[3] == "| forward 8 | mosaic | custom call |  |  | 232 | 0 | 1 B |"
    assert len(render.kernel_table(reports, "mosaic").splitlines()) == 3
    assert "nothing here was run" in render.markdown("title", reports)
    fields = json.loads(render.to_json(reports["forward 8"]))
    assert fields["kernels"][0]["registers"] == 71 and "hlo" not in fields


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (20736, "20.7 kB"), (193_463_328, "193 MB"), (2 * 10**12, "2.0 TB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert render.readable(size) == text
