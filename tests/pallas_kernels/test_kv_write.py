"""write_kv, its quantising sister and copy_blocks against plain loops; what they become on GPUs that are absent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.pallas_kernels import QuantizedKV, copy_blocks, write_kv, write_kv_quantized
from tests.support.compiled import absent_gpu


def caches(rng):
    shape = (6, 2, 4, 8)  # N K B H
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)


def test_each_token_lands_in_its_slot_and_nothing_else_changes():
    rng = np.random.default_rng(0)
    k_cache, v_cache = caches(rng)
    k, v = rng.standard_normal((5, 2, 8)).astype(np.float32), rng.standard_normal((5, 2, 8)).astype(np.float32)
    slots = np.array([21, 4, 11, 0, 0], np.int32)  # the last two are padding
    got_k, got_v = jax.jit(write_kv)(*map(jnp.asarray, (k_cache, v_cache, k, v, slots)))
    for token, slot in enumerate(slots[:3]):
        k_cache[slot // 4, :, slot % 4], v_cache[slot // 4, :, slot % 4] = k[token], v[token]
    np.testing.assert_array_equal(got_k[1:], k_cache[1:])
    np.testing.assert_array_equal(got_v[1:], v_cache[1:])


def test_a_broken_value_is_kept_out_of_the_cache_and_marks_its_key():
    """A poisoned sequence's values once outlived it in a recycled block: 0 · NaN spoiled the next owner."""
    rng = np.random.default_rng(1)
    k_cache, v_cache = caches(rng)
    k, v = np.ones((2, 2, 8), np.float32), np.ones((2, 2, 8), np.float32)
    v[0, 1, 3] = np.inf
    got_k, got_v = write_kv(*map(jnp.asarray, (k_cache, v_cache, k, v, np.array([9, 10], np.int32))))
    assert np.isfinite(got_v).all() and (np.asarray(got_v[2, 1, 1]) == 0).all()
    assert np.isnan(got_k[2, 1, 1]).all() and np.isfinite(got_k[2, 0, 1]).all() and np.isfinite(got_k[2, :, 2]).all()


def test_blocks_are_copied_whole_and_padding_pairs_do_nothing():
    rng = np.random.default_rng(2)
    cache, _ = caches(rng)
    got = copy_blocks(jnp.asarray(cache), jnp.asarray([[3, 5], [1, 2], [0, 0]], jnp.int32))
    cache[5], cache[2] = cache[3], cache[1]
    np.testing.assert_array_equal(got, cache)


def zero_quantized(dtype: str) -> QuantizedKV:
    k, scale = jnp.zeros((6, 2, 4, 8), dtype), jnp.zeros((6, 2, 4))
    return QuantizedKV(k=k, v=k, k_scale=scale, v_scale=scale)


@pytest.mark.parametrize(("dtype", "relative"), [("int8", 0.5 / 127), ("float8_e4m3fn", 2**-4)])
def test_quantised_writes_are_within_half_a_step(dtype, relative):
    """Each head of each token has its own scale: a head of large numbers leaves its neighbour's small ones alone."""
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((3, 2, 8)).astype(np.float32) for _ in range(2))
    k[:, 1] *= 1000
    k[1, 0] = 0
    slots = np.array([21, 4, 11], np.int32)
    got = jax.jit(write_kv_quantized)(zero_quantized(dtype), k, v, slots)
    for want, stored, scale in ((k, got.k, got.k_scale), (v, got.v, got.v_scale)):
        meant = np.asarray(stored, np.float32) * np.asarray(scale)[..., None]
        for token, slot in enumerate(slots):
            largest = np.abs(want[token]).max(-1, keepdims=True)
            assert (np.abs(meant[slot // 4, :, slot % 4] - want[token]) <= 1.001 * relative * largest).all()
    written = np.zeros((6, 4), np.bool_)
    written[slots // 4, slots % 4] = True
    assert (np.asarray(got.k_scale).any(1) == written).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("broken", ["k", "v"])
def test_a_broken_number_marks_the_scale_of_its_key(dtype, broken):
    """Integers cannot hold NaN: a poisoned key was stored as a plain number, and its request answered nonsense."""
    k, v = np.ones((2, 2, 8), np.float32), np.ones((2, 2, 8), np.float32)
    (k if broken == "k" else v)[0, 1, 3] = np.nan
    got = write_kv_quantized(zero_quantized(dtype), jnp.asarray(k), jnp.asarray(v), jnp.asarray([9, 10], jnp.int32))
    assert np.isnan(got.k_scale[2, 1, 1]) and np.isnan(np.asarray(got.k_scale)).sum() == 1
    for array in (got.k, got.v, got.v_scale):
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert not np.asarray(got.v[2, 1, 1], np.float32).any()


BLOCKS, HEADS, BLOCK_SIZE, WIDTH, TOKENS = 4096, 8, 16, 128, 64


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow), "float8_e4m3fn"])
def test_donated_cache_is_written_in_place(dtype):
    """A scatter that copied the cache would cost its whole size in every layer of every step."""
    gpu = absent_gpu("h200")
    cache = gpu.abstract((BLOCKS, HEADS, BLOCK_SIZE, WIDTH), dtype)
    new = gpu.abstract((TOKENS, HEADS, WIDTH), jnp.bfloat16)
    slots = gpu.abstract((TOKENS,), jnp.int32)
    if dtype == "bfloat16":
        report = gpu.compile(write_kv, cache, cache, new, new, slots, donate_argnums=(0, 1))
    else:
        scale = gpu.abstract((BLOCKS, HEADS, BLOCK_SIZE), jnp.float32)
        caches = QuantizedKV(k=cache, v=cache, k_scale=scale, v_scale=scale)
        report = gpu.compile(write_kv_quantized, caches, new, new, slots, donate_argnums=(0,))
    size = BLOCKS * HEADS * BLOCK_SIZE * WIDTH * jnp.dtype(dtype).itemsize
    assert report.memory.aliased >= 2 * size
    assert report.memory.temporaries <= 4 * new.size  # of the order of the tokens, not of the cache
    assert not [launch for launch in report.launches if "opy" in launch.kind]
