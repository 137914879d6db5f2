"""The Hopper kernel in Mosaic's GPU simulator against the reference, races looked for; what it refuses; its sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels.paged_attention.api import choose_implementation
from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.paged_attention.mosaic.backend import paged_attention_mosaic
from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import SHARED_MEMORY_OF_SM, geometry, mosaic_obstacle
from jaxpaged.pallas_kernels.paged_attention.mosaic.tiles import hopper_work_config
from jaxpaged.pallas_kernels.paged_attention.worklist import GpuTile
from jaxpaged.pallas_kernels.platform import DeviceTarget
from tests.support.attention import Case, Shape, error, make_case, run

TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}
HOPPER = DeviceTarget(platform="gpu", kind="NVIDIA H200", capability=(9, 0), num_cores=132)
SELF_FED = GpuTile(query_rows=64, kv=64, num_warps=4, num_stages=2, occupancy=1)
ONE_LOADED = GpuTile(query_rows=64, kv=64, num_warps=8, num_stages=2, occupancy=1)
TWO_LOADED = GpuTile(query_rows=128, kv=64, num_warps=12, num_stages=2, occupancy=1)
# Values are finite beyond a row's length, as write_kv leaves them, but far from the others; keys are NaN there.
PLAIN = Shape(
    counts=[1, 1],
    lens=[5, 200],
    kv_heads=1,
    dtype="bfloat16",
    poison_values=False,
    decode=SELF_FED,
    prefill=None,
    num_sms=1,
)
MIXED = replace(PLAIN, counts=[1, 40, 1, 18], lens=[31, 140, 70, 18], prefill=TWO_LOADED, num_sms=2)
SPLIT = replace(PLAIN, counts=[1, 1], lens=[400, 9], num_sms=4, sinks=True)


def simulate(case: Case, *, races: bool = False) -> np.ndarray:
    """The live tokens' output in float32."""
    params = plgpu.InterpretGPUParams(detect_races=races)
    call = partial(paged_attention_mosaic, spec=case.spec, interpret=params)
    out = jax.jit(call)(case.q, case.k, case.v, case.batch, extras=case.extras)
    return np.asarray(out, np.float32)[: case.num_live]


def check(shape: Shape, *, races: bool = False) -> None:
    case = make_case(shape)
    assert mosaic_obstacle(HOPPER, call_of(case)) is None
    assert error(simulate(case, races=races), run(case, "reference")) <= TOLERANCE[shape.dtype]


def call_of(case: Case) -> AttentionCall:
    q, cache = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (case.q, case.k))
    return AttentionCall(q=q, cache=cache, batch=case.batch, spec=case.spec, extras=case.extras, interpret=False)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(PLAIN, id="decode"),
        pytest.param(SPLIT, id="split"),
        pytest.param(MIXED, id="mixed", marks=pytest.mark.slow),
        pytest.param(replace(MIXED, prefill=ONE_LOADED, window=33), id="window", marks=pytest.mark.slow),
    ],
)
def test_equals_reference_without_races(shape):
    """No program reads what a copy is still writing, or is overwritten while it reads."""
    check(shape, races=True)


VARIANTS = {
    "two warpgroups": replace(MIXED, counts=[40], lens=[140], padding=0),
    "one warpgroup and a loader": replace(MIXED, prefill=ONE_LOADED, groups=7),
    "tiles of 128 keys": replace(MIXED, prefill=replace(TWO_LOADED, kv=128)),
    "verification rows": replace(PLAIN, counts=[5, 1, 4], lens=[205, 90, 4], num_sms=8),
    "float16": replace(MIXED, dtype="float16"),
    "width 128": replace(MIXED, head_dim=128),
    "width 256": replace(MIXED, head_dim=256, prefill=ONE_LOADED),
    "no groups": replace(MIXED, groups=1, kv_heads=3, padding=40),
    "groups of 3": replace(MIXED, groups=3, prefill=ONE_LOADED),
    "a group of 64": replace(MIXED, groups=64),
    "blocks of 32": replace(MIXED, block_size=32),
    "blocks of 64": replace(MIXED, block_size=64),
    "blocks of 128, tiles of 64": replace(MIXED, block_size=128),
    "window of 1": replace(MIXED, window=1),
    "window over splits": replace(SPLIT, window=150),
    "soft cap": replace(MIXED, soft_cap=5.0),
    "sinks": replace(MIXED, sinks=True),
    "alibi": replace(MIXED, alibi=True),
    "everything": replace(MIXED, sinks=True, alibi=True, soft_cap=3.0, window=50, num_sms=16, kv_heads=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "two warpgroups" else pytest.mark.slow) for n in VARIANTS]
)
def test_variant_equals_reference(name):
    """Each option alone, keys NaN and values huge wherever no query may look."""
    check(VARIANTS[name])


@st.composite
def shapes(draw) -> Shape:
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=4))
    before = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 200, 400])
    groups = draw(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16]))
    head_dim = draw(st.sampled_from([64, 64, 128]))
    return Shape(
        counts=counts,
        lens=[count + draw(before) for count in counts],
        kv_heads=draw(st.integers(1, 2)),
        groups=groups,
        head_dim=head_dim,
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        poison_values=False,
        padding=draw(st.sampled_from([0, 1, 40])),
        window=draw(st.sampled_from([None, None, 1, 5, 64, 100])),
        soft_cap=draw(st.sampled_from([None, None, 4.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        decode=draw(st.sampled_from([SELF_FED, replace(SELF_FED, kv=128), replace(SELF_FED, num_stages=1)])),
        prefill=draw(st.sampled_from([None, ONE_LOADED, TWO_LOADED if 64 % groups == 0 else ONE_LOADED])),
        num_sms=draw(st.sampled_from([1, 8, 32])),
    )


@pytest.mark.slow
@settings(max_examples=12)
@given(shape=shapes())
def test_random_batches_equal_reference(shape):
    """Any lengths, head counts, block sizes, options and numbers of SMs."""
    check(shape)


def test_tiles_fit_and_are_taken():
    """Every tile of the table is one that the kernel has, and as many programs as it says fit an SM's shared memory."""
    for groups in (1, 3, 4, 7, 8, 64):
        for head_dim in (64, 128, 256):
            config = hopper_work_config(
                HOPPER,
                groups=groups,
                num_kv_heads=1,
                head_dim=head_dim,
                block_size=16,
                cache_dtype=jnp.dtype("bfloat16"),
            )
            assert config.prefill is not None
            shape = replace(
                PLAIN, groups=groups, head_dim=head_dim, decode=config.decode, prefill=config.prefill, num_sms=132
            )
            call = call_of(make_case(shape))
            assert mosaic_obstacle(HOPPER, call) is None
            for tile in (config.decode, config.prefill):
                assert geometry(call, tile).sm_shared_memory() * tile.occupancy <= SHARED_MEMORY_OF_SM


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (replace(PLAIN, head_dim=96), "head_dim is 96"),
        (replace(PLAIN, groups=65, decode=replace(SELF_FED, query_rows=128)), "65 query heads"),
        (replace(PLAIN, block_size=8), "block size is 8"),
        (replace(PLAIN, dtype="float32"), "float32"),
        (replace(PLAIN, cache_dtype="int8"), "quantised"),
        (replace(PLAIN, decode=replace(SELF_FED, query_rows=16)), "query_rows is 16"),
        (replace(PLAIN, groups=3, prefill=TWO_LOADED, padding=40), "divisor of 64"),
        (replace(PLAIN, decode=replace(SELF_FED, kv=32)), "kv is 32"),
        (replace(PLAIN, decode=replace(SELF_FED, num_warps=2)), "num_warps is 2"),
        (replace(PLAIN, head_dim=256, decode=replace(SELF_FED, num_stages=4)), "shared memory"),
    ],
)
def test_refusals_say_why(shape, words):
    """A call that the kernel does not have is refused before it is built, with the reason."""
    assert words in (mosaic_obstacle(HOPPER, call_of(make_case(shape))) or "")


def test_is_chosen_by_name_alone():
    """It has not been timed: "auto" takes the portable kernel on Hopper too."""
    call = call_of(make_case(PLAIN))
    assert choose_implementation("mosaic", HOPPER, call) == "mosaic"
    assert choose_implementation("auto", HOPPER, call) == "triton"
    with pytest.raises(ValueError, match="mosaic: it needs a GPU of compute capability 9.0"):
        choose_implementation("mosaic", replace(HOPPER, capability=(8, 0)), call)


def test_needs_hopper():
    """Compiled for another GPU the kernel would crash the process."""
    call = call_of(make_case(PLAIN))
    for capability in ((8, 0), (10, 0), None):
        assert "9.0" in (mosaic_obstacle(replace(HOPPER, capability=capability), call) or "")
    assert "scale" in (mosaic_obstacle(HOPPER, replace(call, spec=replace(call.spec, scale=-1.0))) or "")
    assert "work list" in (mosaic_obstacle(HOPPER, replace(call, batch=replace(call.batch, work=None))) or "")


@pytest.mark.slow
def test_physical_places_do_not_matter():
    """Blocks in another order, tables following: the same bits."""
    case = make_case(SPLIT)
    order = np.random.default_rng(1).permutation(case.k.shape[0])  # new block i is old block order[i]
    tables = jnp.asarray(np.argsort(order).astype(np.int32))[case.batch.block_tables]
    moved = replace(case, k=case.k[order], v=case.v[order], batch=replace(case.batch, block_tables=tables))
    np.testing.assert_array_equal(simulate(case), simulate(moved))
