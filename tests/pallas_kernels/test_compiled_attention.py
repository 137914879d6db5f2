"""paged_attention through the real compiler for GPUs that are not there: no spills, the right instructions."""

from __future__ import annotations

import pytest

from jaxpaged import graphs
from tests.support.absent_gpu import require_compiler
from tests.support.compiled_attention import (
    EXPECTED,
    VARIANTS,
    attention_kernels,
    compile_variant,
    instructions,
    variant_work,
)

pytestmark = pytest.mark.usefixtures("_compiler")
SM_REGISTERS = 65536
SHARED_OF_A_PROGRAM = 1024  # bytes that the driver takes for each, besides its own
QUICK = {("h200", "decode: bf16"), ("a100", "prefill: bf16")}
CASES = [
    pytest.param(gpu, name, marks=() if (gpu, name) in QUICK else pytest.mark.slow, id=f"{gpu}-{name}")
    for gpu in ("a100", "l4", "h200", "b200")
    for name in VARIANTS
    if not (gpu == "a100" and "fp8" in name)
]


@pytest.fixture(scope="module")
def _compiler():
    require_compiler()


@pytest.mark.parametrize(("gpu", "name"), CASES)
def test_variant_compiles_well(gpu, name):
    target = graphs.target(gpu)
    report = compile_variant(target, VARIANTS[name])
    kernels = attention_kernels(report)
    for kernel, shared in kernels.values():
        assert kernel.spills == 0, kernel
        assert kernel.static_shared + shared <= target.spec.shared_per_block
    work = variant_work(target, VARIANTS[name], "triton")
    phases = [(kernel, shared) for kernel, shared in kernels.values() if "merge" not in kernel.name]
    for (kernel, shared), tile in zip(phases, filter(None, (work.decode, work.prefill)), strict=True):
        assert SM_REGISTERS // (kernel.registers * 32 * tile.num_warps) >= tile.occupancy, kernel
        assert target.spec.shared_per_core // (shared + SHARED_OF_A_PROGRAM) >= tile.occupancy, kernel
    found = instructions(report)
    assert found.get("cp.async.cg")
    large = VARIANTS[name].phase == "prefill"
    assert found.get(EXPECTED.get(target.spec.architecture, "mma.sync") if large else "mma.sync")


def test_a_decode_step_leaves_the_cache_alone():
    """Attention that copied its cache would need temporaries of the cache's size."""
    report = compile_variant(graphs.target("h200"), VARIANTS["decode: bf16"])
    assert report.memory.temporaries < 32 << 20
