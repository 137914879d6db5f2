"""quantized_matmul compiled for GPUs that are absent: what XLA reads and keeps, what the kernels need."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.graphs import CompileReport, Target
from jaxpaged.pallas_kernels import LAYOUTS, QuantizedWeight, quantized_matmul
from tests.support.compiled import MAX_SHARED, absent_gpu, count_instructions, results_of_entry

INPUTS, OUTPUTS, GROUP = 2048, 4096, 128
TENSOR_CORES = {"a100": ("mma.sync",), "h200": ("mma.sync", "wgmma"), "b200": ("mma.sync", "tcgen05.mma")}


def abstract_weight(gpu: Target, name: str) -> QuantizedWeight:
    layout = LAYOUTS[name]
    groups, words = INPUTS // GROUP, layout.per_word
    if not layout.grouped:
        values, scales = gpu.abstract((OUTPUTS, INPUTS), jnp.int8), gpu.abstract((OUTPUTS,), jnp.float32)
        return QuantizedWeight(values=values, scales=scales, zeros=None, layout=layout, group_size=INPUTS)
    shape = (INPUTS // words, OUTPUTS) if layout.axis == "in" else (INPUTS, OUTPUTS // words)
    return QuantizedWeight(
        values=gpu.abstract(shape, jnp.int32),
        scales=gpu.abstract((groups, OUTPUTS), jnp.float16),
        zeros=gpu.abstract((groups, OUTPUTS // words), jnp.int32),
        layout=layout,
        group_size=GROUP,
    )


def compile_product(gpu: Target, name: str, tokens: int, *, int8_activations: bool = False) -> CompileReport:
    call = partial(quantized_matmul, implementation="auto", int8_activations=int8_activations)
    return gpu.compile(call, gpu.abstract((tokens, INPUTS), jnp.bfloat16), abstract_weight(gpu, name))


def weight_sized(report: CompileReport) -> list[tuple[str, int, str]]:
    return [result for result in results_of_entry(report) if result[1] >= INPUTS * OUTPUTS]


@pytest.mark.parametrize(
    ("tokens", "int8_activations"),
    [
        (16, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(512, False, marks=pytest.mark.slow),
        (64, True),
    ],
)
def test_int8_weight_is_read_as_it_is(tokens, int8_activations):
    """The scale before the product made XLA write the whole weight in bfloat16 in every call, twice the bytes."""
    report = compile_product(absent_gpu("h200"), "int8", tokens, int8_activations=int8_activations)
    assert weight_sized(report) == [("s8", INPUTS * OUTPUTS, "parameter")]
    assert report.memory.temporaries < INPUTS * OUTPUTS  # partial sums of the tokens, no copy of the weight


def test_the_check_sees_a_weight_that_is_written_out():
    gpu = absent_gpu("h200")

    def scale_first(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        full = weight.values.astype(x.dtype) * weight.scales.astype(x.dtype)[:, None]
        return jax.lax.dot_general(x, full, (((1,), (1,)), ((), ())))

    report = gpu.compile(scale_first, gpu.abstract((16, INPUTS), jnp.bfloat16), abstract_weight(gpu, "int8"))
    assert any(dtype == "bf16" for dtype, _, _ in weight_sized(report))


SLOW = [
    pytest.param(gpu, name, tokens, marks=pytest.mark.slow)
    for gpu in MAX_SHARED
    for name in ("gptq-int4", "awq-int4", "gptq-int8")
    for tokens in (1, 64, 1024)
    if (gpu, name, tokens) != ("h200", "gptq-int4", 64)
]


@pytest.mark.parametrize(("name", "layout", "tokens"), [("h200", "gptq-int4", 64), *SLOW])
def test_kernel_fits_and_uses_tensor_cores(name, layout, tokens):
    report = compile_product(absent_gpu(name), layout, tokens)
    (kernel,) = report.kernels_named("quantized_matmul")
    (launch,) = report.launches_of(kernel)
    assert kernel.spills == 0
    assert launch.dynamic_shared + kernel.static_shared <= MAX_SHARED[name]
    assert count_instructions(report, *TENSOR_CORES[name])
    assert count_instructions(report, "cp.async.cg", "cp.async.ca", "cp.async.bulk")
    assert not [dtype for dtype, _, operation in weight_sized(report) if operation != "parameter"]
