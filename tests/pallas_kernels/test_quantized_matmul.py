"""quantized_matmul: every implementation against the reference over random shapes, packing, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import LAYOUTS, MatmulTiles, dequantize, quantize, quantized_matmul
from jaxpaged.pallas_kernels.cpu.tile_unit import tile_unit_is_missing
from jaxpaged.pallas_kernels.platform import DeviceTarget
from jaxpaged.pallas_kernels.quantized_matmul.amx import op
from jaxpaged.pallas_kernels.quantized_matmul.api import choose_matmul
from jaxpaged.pallas_kernels.quantized_matmul.packing import pack, unpack
from jaxpaged.pallas_kernels.quantized_matmul.reference import quantize_rows
from jaxpaged.pallas_kernels.quantized_matmul.tiles import choose_tiles
from jaxpaged.pallas_kernels.quantized_matmul.triton import make_plan

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
GROUPED = [name for name, layout in LAYOUTS.items() if layout.grouped]
needs_tiles = pytest.mark.skipif(tile_unit_is_missing() is not None, reason=str(tile_unit_is_missing()))
TILES = MatmulTiles(tokens=32, outputs=128, inputs=128, warps=4, stages=2, instances_per_core=1)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def make(name, *, inputs, outputs, group, zero_points=False, seed=0):
    rng = np.random.default_rng(seed)
    return quantize(normal(rng, outputs, inputs) + 0.3, LAYOUTS[name], group, zero_points=zero_points)


def error(got: jax.Array, want: jax.Array) -> float:
    """Largest difference over the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", GROUPED)
@given(
    tokens=st.integers(1, 150),
    groups=st.integers(1, 5),
    group=st.sampled_from([8, 32, 96, 128, 256]),
    outputs=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    zero_points=st.booleans(),
    instances=st.sampled_from([1, 7]),
    seed=st.integers(0, 9),
)
@settings(max_examples=4)
def test_kernel_equals_reference(name, tokens, groups, group, outputs, dtype, zero_points, instances, seed):
    """Shapes that are no multiples of tiles, groups smaller and larger than a tile, split inputs."""
    outputs *= LAYOUTS[name].per_word if LAYOUTS[name].axis == "out" else 3
    rng = np.random.default_rng(seed)
    x, w = normal(rng, tokens, group * groups, dtype=dtype), normal(rng, outputs, group * groups) + 0.3
    tiles = replace(TILES, instances_per_core=instances)

    @jax.jit  # one program: op by op, each shape compiles dozens
    def both(x, w):
        weight = quantize(w, LAYOUTS[name], group, zero_points=zero_points)
        got = quantized_matmul(x, weight, implementation="triton", int8_activations=False, tiles=tiles, interpret=True)
        return got, quantized_matmul(x, weight, implementation="reference", int8_activations=False)

    got, want = both(x, w)
    assert got.dtype == x.dtype
    # Of a random sum's usual size, if all there are have cancelled to less.
    usual = jnp.maximum(jnp.sqrt((x.astype(jnp.float32) ** 2 @ (w**2).T).max()), jnp.abs(want).max())
    assert float(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max() / usual) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_xla_equals_reference(name, dtype, tokens):
    inputs = 192
    weight = make(name, inputs=inputs, outputs=72, group=64 if LAYOUTS[name].grouped else inputs)
    x = normal(np.random.default_rng(1), tokens, inputs, dtype=dtype)
    got = jax.jit(lambda x, w: quantized_matmul(x, w, implementation="xla", int8_activations=False))(x, weight)
    want = quantized_matmul(x, weight, implementation="reference", int8_activations=False)
    assert error(got, want) <= TOLERANCE[dtype]


@given(tokens=st.integers(1, 40), inputs=st.integers(1, 300), outputs=st.integers(1, 50), seed=st.integers(0, 9))
@settings(max_examples=4)
def test_integer_activations_equal_the_rounded_reference(tokens, inputs, outputs, seed):
    """A row of zeros has a scale too: 0 / 0 was NaN for padding tokens."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((tokens, inputs), np.float32), normal(rng, outputs, inputs)
    x[-1] = 0

    @jax.jit
    def run(x, w):
        weight = quantize(w, LAYOUTS["int8"], inputs, zero_points=False)
        return [quantized_matmul(x, weight, implementation=i, int8_activations=True) for i in ("xla", "reference")]

    got, want = run(x, w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))
    assert not got[-1].any()


@needs_tiles
@given(tokens=st.integers(1, 90), inputs=st.integers(1, 400), outputs=st.integers(1, 150), seed=st.integers(0, 9))
@settings(max_examples=12)
@example(tokens=1, inputs=1, outputs=1, seed=0)
@example(tokens=33, inputs=576, outputs=600, seed=0)  # helper threads join in
def test_tile_products_equal_the_reference(tokens, inputs, outputs, seed):
    """With activations in int8 to float32's rounding, but for a value halfway between two steps, which may go to
    either; without, to the 65,025 steps of a row."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((tokens, inputs), np.float32), normal(rng, outputs, inputs)
    x[-1] = 0
    weight = quantize(w, LAYOUTS["int8"], inputs, zero_points=False)
    usual = np.sqrt(inputs)
    for int8_activations, off in ((True, 2e-5), (False, 2e-4)):
        got, want = (
            np.asarray(jitted(x, weight, name, int8_activations)).astype(np.float64) for name in ("amx", "reference")
        )
        far = np.abs(got - want).max(1) > off * usual
        assert far.mean() <= (0.05 if int8_activations else 0)
        assert np.abs(got - want).max() < 0.1 * usual
        assert not got[-1].any()


@needs_tiles
@pytest.mark.parametrize("int8_activations", [True, False])
def test_tile_products_of_the_largest_integers(int8_activations):
    """8,192 products of 127 · 127, of one sign: nothing saturates on the way."""
    x, w = jnp.full((17, 8192), -3.0), jnp.full((33, 8192), 0.5)
    weight = quantize(w, LAYOUTS["int8"], 8192, zero_points=False)
    np.testing.assert_allclose(jitted(x, weight, "amx", int8_activations), -3 * 0.5 * 8192, rtol=1e-5)


@needs_tiles
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("int8_activations", [True, False])
def test_what_is_not_finite_stays_in_its_row(bad, int8_activations):
    x = np.random.default_rng(0).standard_normal((20, 100), np.float32)
    x[3, 99] = bad
    got = np.asarray(jitted(x, make("int8", inputs=100, outputs=40, group=100), "amx", int8_activations))
    np.testing.assert_array_equal(np.isfinite(got).all(1), np.arange(20) != 3)


@partial(jax.jit, static_argnums=(2, 3))
def jitted(x, weight, name, int8_activations):
    return quantized_matmul(x, weight, implementation=name, int8_activations=int8_activations)


def test_rows_are_rounded_to_the_nearest_of_255_steps():
    integers, scale = quantize_rows(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    np.testing.assert_array_equal(integers, [[64, -127, 32], [0, 0, 0]])
    np.testing.assert_allclose(scale[:, 0], [2 / 127, 1], rtol=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("zero_points", [False, True])
def test_quantized_weight_is_the_weight_to_half_a_step(name, zero_points):
    grouped = LAYOUTS[name].grouped
    rng = np.random.default_rng(3)
    w = normal(rng, 24, 96) + 1.0  # off centre: zero points matter
    weight = quantize(w, LAYOUTS[name], 32 if grouped else 96, zero_points=zero_points and grouped)
    step = weight.scales.T.repeat(32, axis=1) if grouped else weight.scales[:, None]
    off = jnp.abs(dequantize(weight, jnp.dtype("float32")) - w)
    assert bool((off <= 0.5001 * step).all()) or (zero_points and bool((off <= 1.001 * step).all()))


def test_words_are_those_of_the_checkpoints():
    """By hand: GPTQ packs inputs in order and stores zero points less one, AWQ interleaves outputs."""
    row = jnp.arange(1, 9)[None]
    assert int(pack(row, LAYOUTS["gptq-int4"].order)[0, 0]) & 0xFFFFFFFF == 0x87654321
    assert int(pack(row, LAYOUTS["awq-int4"].order)[0, 0]) & 0xFFFFFFFF == 0x86427531
    for layout in (LAYOUTS["gptq-int8"], LAYOUTS["awq-int4"]):
        np.testing.assert_array_equal(unpack(pack(row, layout.order), layout.order, 8), row)
    weight = replace(
        make("gptq-int4", inputs=8, outputs=1, group=8),
        values=pack(row, LAYOUTS["gptq-int4"].order).T,
        scales=jnp.full((1, 1), 0.5),
        zeros=jnp.array([[7]]),  # stored 7 is zero point 8
    )
    np.testing.assert_array_equal(dequantize(weight, jnp.dtype("float32"))[0], (np.arange(1, 9) - 8) * 0.5)


def test_inputs_are_split_to_fill_the_device_and_no_split_is_empty():
    weight = make("gptq-int4", inputs=1408, outputs=70, group=128)
    plan = make_plan(5, weight, TILES, num_cores=4)
    assert (plan.num_tiles, plan.splits, plan.tokens, plan.scale_sums) == (11, 4, 16, True)
    assert make_plan(5, weight, TILES, num_cores=7).splits == 6  # seven of two tiles each: the last had none
    assert make_plan(65, weight, TILES, num_cores=4).splits == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(group_size=40), "group_size: wanted a divisor of 128"),
        (dict(scales=jnp.ones((2, 16))), r"scales: wanted shape \(4, 16\)"),
        (dict(values=jnp.zeros((16, 16), jnp.int8)), "values: wanted int32"),
        (dict(zeros=jnp.zeros((4, 3), jnp.int32)), r"zeros: wanted shape \(4, 2\)"),
        (dict(zeros=jnp.zeros((4, 2), jnp.int8)), "zeros: wanted int32"),
        (dict(group_size=4, scales=jnp.ones((32, 16))), "group_size: wanted a multiple of 8"),
    ],
)
def test_arrays_that_do_not_fit_the_layout_are_named(change, message):
    weight = replace(make("gptq-int4", inputs=128, outputs=16, group=32), **change)
    with pytest.raises(ValueError, match=message):
        quantized_matmul(jnp.ones((1, 128)), weight, implementation="xla", int8_activations=False)


def test_activations_that_do_not_fit_are_refused():
    weight = make("gptq-int4", inputs=128, outputs=16, group=32)
    for x, message in ((jnp.ones((1, 64)), "128"), (jnp.ones((1, 128), jnp.float8_e4m3fn), "bfloat16")):
        with pytest.raises(ValueError, match=message):
            quantized_matmul(x, weight, implementation="xla", int8_activations=False)
    with pytest.raises(ValueError, match="scale per output"):
        quantized_matmul(jnp.ones((1, 128)), weight, implementation="xla", int8_activations=True)
    with pytest.raises(ValueError, match="quantize: wanted inputs that are a multiple"):
        make("gptq-int4", inputs=100, outputs=16, group=32)
    small = replace(TILES, inputs=64)
    with pytest.raises(ValueError, match="tiles for gptq-int4"):
        quantized_matmul(
            jnp.ones((1, 128)), weight, implementation="triton", int8_activations=False, tiles=small, interpret=True
        )


def test_implementation_is_chosen_by_layout_and_device():
    h200 = DeviceTarget(platform="gpu", kind="NVIDIA H200", capability=(9, 0), num_cores=132)
    t4 = DeviceTarget(platform="gpu", kind="Tesla T4", capability=(7, 5), num_cores=40)
    cpu = DeviceTarget(platform="cpu", kind="cpu", capability=None, num_cores=None)
    int8, gptq = LAYOUTS["int8"], LAYOUTS["gptq-int4"]
    chosen = [choose(layout=layout, device=device) for layout in (int8, gptq) for device in (h200, t4)]
    assert chosen == ["xla", "xla", "triton", "xla"]
    assert choose(layout=gptq, device=cpu) == "xla"
    for name, layout, device, message in (
        ("triton", int8, h200, "without a copy"),
        ("triton", gptq, t4, "compute capability 8.0"),
        ("triton", gptq, cpu, "needs an NVIDIA GPU"),
        ("nope", gptq, cpu, "wanted auto or one of"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(name, layout=layout, device=device)


@pytest.mark.parametrize(("obstacle", "wanted"), [(None, "amx"), ("this processor lacks amx_int8", "xla")])
def test_tiles_of_the_processor_serve_int8_where_they_are(monkeypatch, obstacle, wanted):
    monkeypatch.setattr(op, "tile_unit_is_missing", lambda: obstacle)
    cpu = DeviceTarget(platform="cpu", kind="cpu", capability=None, num_cores=None)
    int8 = LAYOUTS["int8"]
    assert choose(layout=int8, device=cpu) == wanted
    assert choose(layout=int8, device=cpu, dtype="bfloat16") == "xla"
    for layout, dtype, message in (
        (int8, "bfloat16", "it takes float32 activations"),
        (LAYOUTS["gptq-int4"], "float32", "a scale per output"),
        *([(int8, "float32", obstacle)] if obstacle else []),
    ):
        with pytest.raises(ValueError, match=message):
            choose("amx", layout=layout, device=cpu, dtype=dtype)


def choose(name="auto", *, layout, device, dtype="float32"):
    return choose_matmul(name, layout, device, jnp.dtype(dtype), interpret=False)


def test_tiles_are_for_the_phase():
    layout = LAYOUTS["awq-int4"]
    decode, prefill = (choose_tiles("NVIDIA H200", layout, tokens) for tokens in (64, 65))
    assert decode.tokens >= 64  # each weight is read once
    assert prefill.tokens > decode.tokens
