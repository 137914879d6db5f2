"""Which implementation of paged_attention serves which device, and what is said when none does."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxpaged import graphs
from jaxpaged.pallas_kernels import implementations, paged_attention
from jaxpaged.pallas_kernels.paged_attention.api import choose_implementation
from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.platform import DeviceTarget, current_target
from tests.support.attention import Shape, make_case

CPU = DeviceTarget(platform="cpu", kind="cpu", capability=None, num_cores=None)
A100 = DeviceTarget(platform="gpu", kind="NVIDIA A100-SXM4-80GB", capability=(8, 0), num_cores=108)
H200 = DeviceTarget(platform="gpu", kind="NVIDIA H200", capability=(9, 0), num_cores=132)
T4 = DeviceTarget(platform="gpu", kind="Tesla T4", capability=(7, 5), num_cores=40)
SHAPE = Shape(counts=[1, 3], lens=[5, 9], head_dim=16)


def call(shape: Shape, *, interpret: bool = False, cache_blocks: int | None = None) -> AttentionCall:
    case = make_case(shape)
    cache = jax.ShapeDtypeStruct((cache_blocks or case.k.shape[0], *case.k.shape[1:]), case.k.dtype)
    return AttentionCall(
        q=jax.ShapeDtypeStruct(case.q.shape, case.q.dtype),
        cache=cache,
        batch=case.batch,
        spec=case.spec,
        extras=case.extras,
        interpret=interpret,
    )


def test_auto_follows_the_device():
    assert choose_implementation("auto", CPU, call(SHAPE)) == "numba"
    assert choose_implementation("auto", CPU, call(replace(SHAPE, head_dim=24))) == "tiled"
    assert choose_implementation("auto", CPU, call(replace(SHAPE, cache_dtype="int8"))) == "tiled"
    assert choose_implementation("auto", A100, call(SHAPE)) == "triton"
    assert choose_implementation("reference", H200, call(SHAPE)) == "reference"
    assert choose_implementation("triton", CPU, call(SHAPE, interpret=True)) == "triton"


@pytest.mark.parametrize(
    ("name", "target", "changes", "why"),
    [
        ("triton", CPU, {}, "needs an NVIDIA GPU"),
        ("auto", T4, {}, r"Tesla T4.*triton: needs compute capability 8\.0"),
        ("auto", replace(A100, capability=None), {}, "capability is known"),
        ("auto", A100, {"cache_dtype": "float8_e4m3fn"}, "int8 cache"),
        ("auto", H200, {"head_dim": 24}, "multiple of 16"),
    ],
)
def test_why_none_fits_is_said(name, target, changes, why):
    with pytest.raises(ValueError, match=why):
        choose_implementation(name, target, call(replace(SHAPE, **changes)))


def test_without_numba_the_rest_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_implementation("auto", CPU, call(SHAPE)) == "tiled"
    with pytest.raises(ValueError, match=r"pip install 'jaxpaged\[cpu\]'"):
        choose_implementation("numba", CPU, call(SHAPE))


def test_a_batch_without_work_list_is_refused():
    given = call(SHAPE)
    with pytest.raises(ValueError, match="WorkConfig"):
        choose_implementation("auto", H200, replace(given, batch=replace(given.batch, work=None)))


def test_offsets_that_would_overflow_are_refused():
    """Offsets into arrays of up to 4 GiB are signed 32-bit numbers: a one-byte cache of 3 GiB would wrap around."""
    shape = replace(SHAPE, cache_dtype="int8")
    per_block = int(np.prod(make_case(shape).k.shape[1:]))
    with pytest.raises(ValueError, match="num_blocks"):
        choose_implementation("auto", H200, call(shape, cache_blocks=3 * 2**30 // per_block))
    assert choose_implementation("auto", H200, call(shape, cache_blocks=5 * 2**30 // per_block)) == "triton"


def test_unknown_implementation_is_named():
    case = make_case(SHAPE)
    with pytest.raises(ValueError, match="nope"):
        paged_attention(case.q, case.k, case.v, case.batch, case.spec, implementation="nope")
    assert "triton" in implementations()


@pytest.mark.parametrize("changes", [{"cache_dtype": "int8"}, {}])
def test_a_cache_needs_the_scales_that_its_dtype_calls_for(changes):
    case = make_case(replace(SHAPE, **changes))
    other = make_case(replace(SHAPE, cache_dtype=None if changes else "int8"))
    with pytest.raises(ValueError, match="scale"):
        paged_attention(case.q, case.k, case.v, case.batch, case.spec, implementation="reference", extras=other.extras)


@pytest.mark.parametrize(
    ("name", "capability"), [("a100", (8, 0)), ("l4", (8, 9)), ("h200", (9, 0)), ("b200", (10, 0))]
)
def test_a_described_device_is_known(name, capability):
    with jax.sharding.use_abstract_mesh(graphs.target(name).mesh):
        assert current_target().capability == capability
        assert current_target().platform == "gpu"


def test_the_device_at_hand_is_known():
    assert current_target() == DeviceTarget(platform="cpu", kind="cpu", capability=None, num_cores=None)
