"""write_kv and copy_blocks against plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels import copy_blocks, write_kv


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
