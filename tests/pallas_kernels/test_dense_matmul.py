"""dense_matmul: the CPU's implementations against the exact product over random shapes, NaN, threads, refusals."""

from __future__ import annotations

import threading
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.pallas_kernels import dense_implementations, dense_matmul
from jaxpaged.pallas_kernels.cpu import tile_unit
from jaxpaged.pallas_kernels.cpu.tile_unit import tile_unit_is_missing
from jaxpaged.pallas_kernels.matmul import api
from jaxpaged.pallas_kernels.matmul.api import choose_dense
from jaxpaged.pallas_kernels.platform import DeviceTarget

CPU = DeviceTarget(platform="cpu", kind="cpu", capability=None, num_cores=None)
GPU = DeviceTarget(platform="gpu", kind="NVIDIA H200", capability=(9, 0), num_cores=132)
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))
needs_tiles = pytest.mark.skipif(tile_unit_is_missing() is not None, reason=str(tile_unit_is_missing()))
OURS = ["numba", pytest.param("amx", marks=needs_tiles)]


@cache
def compiled(implementation: str):
    return jax.jit(partial(dense_matmul, implementation=implementation))


def arrays(rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, inputs), np.float32), rng.standard_normal((outputs, inputs), np.float32)


def check(x: np.ndarray, w: np.ndarray, implementation: str) -> None:
    """Within float32's rounding of the exact product."""
    got = np.asarray(compiled(implementation)(x, w))
    want = x.astype(np.float64) @ w.astype(np.float64).T
    usual = np.sqrt(x.shape[1])  # of a random sum; this one may have cancelled to less
    np.testing.assert_allclose(got / usual, want / usual, rtol=0, atol=1e-5)


def shapes() -> list[tuple[int, int, int]]:
    """Rows of one to several blocks, sums and columns that are and are not multiples of 16, 24 and 128."""
    rng = np.random.default_rng(0)
    random = [(int(rng.integers(1, 600)), int(rng.integers(1, 400)), int(rng.integers(1, 200))) for _ in range(12)]
    edges = [(1, 1, 1), (16, 128, 24), (17, 129, 25), (32, 256, 48), (64, 127, 23), (65, 130, 100), (80, 144, 16)]
    return [*edges, *random]


@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), shapes())
def test_ours_are_exact(rows, inputs, outputs, implementation):
    check(*arrays(rows, inputs, outputs), implementation)


@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize("rows", [16, 48, 64])
def test_helpers_join_in(rows, implementation):
    """Large enough to wake helper threads; several times, as they may come early, late or not at all."""
    for seed in range(5):
        check(*arrays(rows, 576, 600, seed), implementation)


@needs_tiles
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_bfloat16_parts_lose_nothing(scale):
    """Errors are those of a sum in float32. A part, or one product of parts, left out would make them tens of times
    as large: parts are below 2⁻⁷ and 2⁻¹⁵ of the whole, float32's rounding below 2⁻²⁴."""
    x, w = arrays(64, 576, 96)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    got = np.asarray(compiled("amx")(x * np.float32(scale), w)) / np.float32(scale)
    plain = np.asarray(compiled("reference")(x, w))
    assert np.std(got - exact) < 1.5 * np.std(plain - exact)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_others_are_exact(implementation):
    check(*arrays(7, 33, 20), implementation)


@pytest.mark.parametrize("implementation", OURS)
def test_calls_from_several_threads(implementation):
    """One has the helpers, the others work alone: none may see another's job."""
    failures = []

    def run(seed: int) -> None:
        try:
            for _ in range(5):
                check(*arrays(40 + seed, 300, 400, seed), implementation)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(20, 130, 30), (64, 256, 48)])
def test_nan_stays_in_its_row_and_column(rows, inputs, outputs, implementation):
    """Rows share vectors and columns share tiles; a NaN, or an infinity, must not spread to a neighbour."""
    x, w = arrays(rows, inputs, outputs)
    x[3, inputs - 1], w[outputs - 1, 5], w[7, 0] = np.nan, np.nan, np.inf
    got = np.asarray(compiled(implementation)(x, w))
    bad = np.zeros((rows, outputs), bool)
    bad[3], bad[:, outputs - 1] = True, True
    infinite = ~bad & (np.arange(outputs) == 7)
    assert np.array_equal(np.isfinite(got), ~bad & ~infinite)
    if implementation != "amx":  # which has no parts of an infinity
        assert np.array_equal(np.isinf(got), infinite)


@pytest.mark.parametrize("implementation", OURS)
def test_a_transposed_weight_is_laid_out_first(implementation):
    """The kernels read rows of the weight as they lie; XLA must hand it a transposed one in order."""
    x, w = arrays(16, 48, 32)
    got = jax.jit(lambda x, w: dense_matmul(x, w.T, implementation=implementation))(x, np.ascontiguousarray(w.T))
    np.testing.assert_allclose(np.asarray(got), x @ w.T, rtol=0, atol=1e-4)


def test_auto_takes_numba_where_it_is_faster():
    chosen = [choose_dense("auto", CPU, rows, FLOATS) for rows in (1, 4, 64, 128, 512)]
    assert chosen == ["xla", "numba", "numba", "numba", "xla"]
    assert choose_dense("auto", GPU, 64, FLOATS) == "xla"
    assert choose_dense("auto", CPU, 64, (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))) == "xla"
    assert choose_dense("numba", CPU, 1, FLOATS) == "numba"


@pytest.mark.parametrize(
    ("system", "flags", "refusal", "why"),
    [
        ("darwin", "amx_tile amx_bf16 amx_int8 avx512bw", 0, "it wants Linux"),
        ("linux", "avx2 avx512bw", 0, "this processor lacks amx_tile, amx_bf16, amx_int8"),
        ("linux", "amx_tile amx_bf16 amx_int8 avx512bw", -1, "the system does not let this process"),
    ],
)
def test_why_there_is_no_tile_unit(monkeypatch, system, flags, refusal, why):
    monkeypatch.setattr(tile_unit.sys, "platform", system)
    monkeypatch.setattr(tile_unit.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tile_unit, "_processor_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(tile_unit.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=lambda *numbers: refusal))
    assert why in (tile_unit_is_missing.__wrapped__() or "")


def test_what_ours_cannot_serve_is_refused(monkeypatch):
    monkeypatch.setattr(api, "amx_obstacle", lambda target, dtypes: "this processor lacks amx_tile")
    with pytest.raises(ValueError, match="amx: this processor lacks amx_tile"):
        choose_dense("amx", CPU, 64, FLOATS)
    with pytest.raises(ValueError, match=r"numba: it computes in float32, got an input in bfloat16"):
        dense_matmul(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((3, 8)), implementation="numba")
    with pytest.raises(ValueError, match="numba: it runs on CPUs"):
        choose_dense("numba", GPU, 64, FLOATS)
    with pytest.raises(ValueError, match=r"wanted auto or one of .*xla.*, got 'mkl'"):
        dense_matmul(jnp.zeros((4, 8)), jnp.zeros((3, 8)), implementation="mkl")
    assert set(dense_implementations()) == {"xla", "amx", "numba", "reference"}
