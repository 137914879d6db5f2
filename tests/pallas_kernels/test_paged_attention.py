"""Every implementation of paged_attention against the plain reference, over random ragged batches."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.pallas_kernels import AttentionSpec, TileConfig, implementations, paged_attention, plan_attention


def make_case(rng, *, rows, num_tokens, block_size, kv_heads, groups, head_dim, width, counts, lens):
    """A random batch whose unused keys are NaN and values huge (write_kv keeps them finite): use shows."""
    blocks_needed = [-(-n // block_size) for n in lens]
    ids = rng.permutation(np.arange(1, sum(blocks_needed) + 9))
    tables = np.zeros((rows, width), np.int32)
    k = np.full((len(ids) + 1, kv_heads, block_size, head_dim), np.nan, np.float32)
    v = np.full_like(k, 1e30)
    k[0], v[0] = 0, 0
    used = 0
    for row, (need, length) in enumerate(zip(blocks_needed, lens, strict=True)):
        mine = ids[used : used + need]
        used += need
        tables[row, :need] = mine
        for i in range(length):
            k[mine[i // block_size], :, i % block_size] = rng.standard_normal((kv_heads, head_dim))
            v[mine[i // block_size], :, i % block_size] = rng.standard_normal((kv_heads, head_dim))
    kv_lens = np.zeros(rows, np.int32)
    kv_lens[: len(lens)] = lens
    starts = np.full(rows + 1, sum(counts), np.int32)
    starts[: len(counts) + 1] = np.concatenate([[0], np.cumsum(counts)])
    q = rng.standard_normal((num_tokens, kv_heads, groups, head_dim)).astype(np.float32)
    return (
        q,
        k,
        v,
        dict(block_tables=tables, kv_lens=kv_lens, query_starts=starts, num_tokens=num_tokens, num_rows=len(counts)),
    )


def random_case(rng):
    block_size = int(rng.choice([4, 16, 32]))
    num_tokens = int(rng.choice([1, 8, 32, 64]))
    rows = min(num_tokens, int(rng.choice([4, 16])))
    counts: list[int] = []
    room = num_tokens
    for _ in range(int(rng.integers(1, rows + 1))):
        count = 1 if rng.random() < 0.5 else int(rng.integers(1, 40))
        if count <= room:
            counts.append(count)
            room -= count
    if not counts:
        counts = [1]
    counts.sort(key=lambda c: c != 1)
    limit = 24 * block_size
    lens = [min(limit, c + int(rng.choice([0, 1, 3, 15, 16, 50, 200]))) for c in counts]
    lens = [max(n, c) for n, c in zip(lens, counts, strict=True)]
    kv_heads, groups = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 4, 7]))
    head_dim = int(rng.choice([16, 20, 64]))
    return make_case(
        rng,
        rows=rows,
        num_tokens=num_tokens,
        block_size=block_size,
        kv_heads=kv_heads,
        groups=groups,
        head_dim=head_dim,
        width=24,
        counts=counts,
        lens=lens,
    ), sum(counts)


@pytest.mark.parametrize("name", [n for n in implementations() if n != "reference"])
@pytest.mark.parametrize("seed", range(16))
def test_equals_reference(name, seed):
    """Decode, prefill and mixed batches, any GQA ratio, block size, window and cap; NaN beyond a row's length."""
    rng = np.random.default_rng(seed)
    (q, k, v, meta), live = random_case(rng)
    tiles = TileConfig(
        decode_lanes=int(rng.choice([1, 4, 16])),
        decode_kv=int(rng.choice([16, 64])),
        prefill_queries=int(rng.choice([4, 16, 64])),
        prefill_kv=int(rng.choice([32, 128])),
    )
    batch = plan_attention(**meta, tiles=tiles)
    spec = AttentionSpec(
        scale=q.shape[-1] ** -0.5, window=[None, 1, 5, 70][seed % 4], soft_cap=None if seed % 3 else 5.0
    )
    got = jax.jit(partial(paged_attention, spec=spec, implementation=name))(q, k, v, batch)
    want = paged_attention(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        jax.tree.map(jnp.asarray, batch),
        spec,
        implementation="reference",
    )
    np.testing.assert_allclose(got[:live], want[:live], atol=2e-5, rtol=2e-5)


def test_unknown_implementation_is_named():
    (q, k, v, meta), _ = random_case(np.random.default_rng(0))
    tiles = TileConfig(decode_lanes=4, decode_kv=16, prefill_queries=16, prefill_kv=32)
    spec = AttentionSpec(scale=1.0, window=None, soft_cap=None)
    arrays = (jnp.asarray(x) for x in (q, k, v))
    with pytest.raises(ValueError, match="nope"):
        paged_attention(*arrays, plan_attention(**meta, tiles=tiles), spec, implementation="nope")
