"""The Hopper kernel through the real compiler for GPUs that are not there: no spills, TMA, wgmma, what fits an SM."""

from __future__ import annotations

import pytest

from jaxpaged import graphs
from tests.support.absent_gpu import require_compiler
from tests.support.compiled_attention import VARIANTS, compile_variant, instructions

pytestmark = pytest.mark.usefixtures("_compiler")
SERVED = [name for name in VARIANTS if not any(word in name for word in ("int8", "fp8", "width 80", "width 96"))]
QUICK = ("decode: bf16", "prefill: bf16")
SM_REGISTERS = 65536
PROGRAMS = {64: 3, 128: 2, 256: 1}  # that the decode kernel's tiles count on for an SM, by head_dim


@pytest.fixture(scope="module")
def _compiler():
    require_compiler()


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        pytest.param(gpu, name, marks=() if gpu == "h200" and name in QUICK else pytest.mark.slow, id=f"{gpu}-{name}")
        for gpu in ("h200", "h100")
        for name in (SERVED if gpu == "h200" else QUICK)
    ],
)
def test_variant_compiles_well(gpu, name):
    variant = VARIANTS[name]
    report = compile_variant(graphs.target(gpu), variant, "mosaic")
    (kernel,) = report.kernels_named("paged_attention_hopper")
    assert kernel.spills == 0
    found = instructions(report)
    assert found.get("wgmma.mma_async")
    assert found.get("cp.async.bulk.tensor")
    # Attention that copied its cache would need temporaries of the cache's size; partial results are below this.
    assert report.memory.temporaries < 64 << 20
    if variant.phase == "decode":
        assert SM_REGISTERS // (kernel.registers * 128) >= PROGRAMS[variant.head_dim]
