"""Every implementation of paged_attention against the plain reference, and the reference against a dense one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import NO_EXTRAS, AttentionSpec, TileConfig, implementations, plan_attention
from tests.support.attention import Case, Shape, error, gpu_tile, make_case, run, suited, work_config

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
# The Hopper kernel has fewer dtypes and block sizes, and tiles of its own: test_mosaic_attention.py.
TESTED = [name for name in implementations() if name not in ("reference", "mosaic")]
MIXED = Shape(counts=[1, 1, 5, 40, 1, 7], lens=[1, 130, 5, 70, 17, 57], num_sms=16)
DECODE = Shape(counts=[1, 1, 1, 1], lens=[1, 700, 131, 16], prefill=None, num_sms=16)
VARIANTS = {
    "decode": DECODE,
    "decode without splits": replace(DECODE, num_sms=1),
    "tiles within a block": replace(DECODE, block_size=64),
    "mixed": MIXED,
    "one list": replace(MIXED, prefill=None),
    "verification": Shape(counts=[5, 1, 4, 5], lens=[205, 90, 4, 33], decode=gpu_tile(query_rows=32), num_sms=16),
    "bfloat16": replace(MIXED, dtype="bfloat16"),
    "float16": replace(MIXED, dtype="float16"),
    "no groups": replace(MIXED, groups=1, kv_heads=3),
    "groups of 3, width 96": replace(MIXED, groups=3, head_dim=96),
    "groups of 7, width 128": replace(MIXED, groups=7, head_dim=128),
    "one KV head, width 80": replace(MIXED, groups=16, kv_heads=1, head_dim=80),
    "many groups": replace(MIXED, groups=20, kv_heads=1, decode=gpu_tile(query_rows=32)),
    "width 256": replace(MIXED, head_dim=256, kv_heads=1),
    "blocks of 32": replace(MIXED, block_size=32),
    "blocks of 64": replace(MIXED, block_size=64),
    "blocks of 128": replace(MIXED, block_size=128),
    "window": replace(MIXED, window=20),
    "window of 1": replace(MIXED, window=1),
    "soft cap": replace(MIXED, soft_cap=5.0),
    "sinks": replace(MIXED, sinks=True),
    "sinks, split decode": replace(DECODE, sinks=True, window=200),
    "alibi": replace(MIXED, alibi=True),
    "int8": replace(MIXED, cache_dtype="int8"),
    "int8, bfloat16": replace(MIXED, cache_dtype="int8", dtype="bfloat16"),
    "fp8": replace(MIXED, cache_dtype="float8_e4m3fn"),
    "everything": replace(
        MIXED, cache_dtype="int8", sinks=True, alibi=True, soft_cap=3.0, window=33, groups=3, head_dim=80
    ),
}
QUICK = ("decode", "everything")


def check(shape: Shape, name: str) -> None:
    case = make_case(suited(shape, name))
    assert error(run(case, name), run(case, "reference")) <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=() if v in QUICK else pytest.mark.slow, id=v) for v in VARIANTS]
)
def test_variant_equals_reference(variant, name):
    """Each option alone; unused blocks, slots, scales, table entries and padding queries hold NaN."""
    check(VARIANTS[variant], name)


@st.composite
def shapes(draw) -> Shape:
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 45)), min_size=1, max_size=5))
    before = st.sampled_from([0, 1, 15, 16, 17, 100, 400])
    groups = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 12]))
    kv = draw(st.sampled_from([16, 32, 64]))
    return Shape(
        counts=counts,
        lens=[count + draw(before) for count in counts],
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        groups=groups,
        head_dim=draw(st.sampled_from([16, 64, 80, 96, 128, 256])),
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        cache_dtype=draw(st.sampled_from([None, None, "int8", "float8_e4m3fn"])),
        padding=draw(st.sampled_from([0, 1, 40])),
        padding_rows=draw(st.integers(0, 3)),
        window=draw(st.sampled_from([None, None, 1, 4, 5, 33])),
        soft_cap=draw(st.sampled_from([None, None, 4.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        decode=gpu_tile(query_rows=draw(st.sampled_from([16, 32])), kv=kv, occupancy=draw(st.integers(1, 2))),
        prefill=draw(st.sampled_from([None, gpu_tile(query_rows=32, kv=kv), gpu_tile(query_rows=64, kv=kv)])),
        num_sms=draw(st.sampled_from([1, 8, 64])),
        tiles=TileConfig(
            decode_lanes=draw(st.sampled_from([1, 4])),
            decode_kv=draw(st.sampled_from([16, 64])),
            prefill_queries=draw(st.sampled_from([4, 16, 64])),
            prefill_kv=draw(st.sampled_from([32, 128])),
        ),
    )


@pytest.mark.parametrize("name", TESTED)
@settings(max_examples=3)
@given(shape=shapes())
def test_random_batches_equal_reference(name, shape):
    """Any lengths, head counts, widths, block sizes, dtypes, options, tiles and numbers of SMs."""
    check(shape, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
@settings(max_examples=60)
@given(shape=shapes())
def test_many_random_batches_equal_reference(name, shape):
    check(shape, name)


@pytest.mark.parametrize("name", TESTED)
def test_physical_places_do_not_matter(name):
    """Blocks in another order, tables following: the same bits."""
    case = make_case(suited(replace(DECODE, cache_dtype="int8", dtype="bfloat16"), name))
    order = np.random.default_rng(1).permutation(case.k.shape[0])  # new block i is old block order[i]
    tables = jnp.asarray(np.argsort(order).astype(np.int32))[case.batch.block_tables]
    k_scale, v_scale = (None if scale is None else scale[order] for scale in (case.extras.k_scale, case.extras.v_scale))
    moved = replace(
        case,
        k=case.k[order],
        v=case.v[order],
        extras=replace(case.extras, k_scale=k_scale, v_scale=v_scale),
        batch=replace(case.batch, block_tables=tables),
    )
    np.testing.assert_array_equal(run(case, name), run(moved, name))


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize(
    ("counts", "lanes"), [pytest.param([1], 4, id="one token"), pytest.param([1] * 9, 8, id="a tile beyond the tokens")]
)
def test_more_rows_than_tokens(counts, lanes, name):
    """Rows without queries may outnumber the tokens: a tile of rows must not reach for tokens that are not there."""
    tiles = TileConfig(decode_lanes=lanes, decode_kv=16, prefill_queries=4, prefill_kv=16)
    lens = [5 * i + 1 for i in range(len(counts))]
    shape = replace(DECODE, counts=counts, lens=lens, padding=0, padding_rows=9, tiles=tiles)
    check(shape, name)


def test_splitting_changes_nothing_but_rounding():
    """The same batch on a GPU of one SM, where nothing is split, and of many."""
    whole, split = (make_case(replace(DECODE, num_sms=n, sinks=True)) for n in (1, 64))
    assert whole.batch.work is not None
    assert split.batch.work is not None
    assert int(whole.batch.work.decode.num_items) == 5  # one of them for padding tokens
    assert int(split.batch.work.decode.num_items) == 11
    assert error(run(split, "triton"), run(whole, "triton")) <= 1e-6


def dense(q, k, v, *, window, soft_cap=None, slopes=None, sinks=None) -> np.ndarray:
    """Attention of queries [T, K, G, H], the last of the keys [C, K, H], one query after the other."""
    out = np.zeros_like(q)
    first = len(k) - len(q)
    for t in range(len(q)):
        keys = [j for j in range(len(k)) if j <= first + t and (window is None or j > first + t - window)]
        for head in np.ndindex(q.shape[1:3]):
            scores = k[keys, head[0]] @ q[(t, *head)] * q.shape[-1] ** -0.5
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores - slopes[head] * (first + t - np.array(keys))
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            out[(t, *head)] = weights @ v[keys, head[0]] / total
    return out


def row_of(case: Case, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row's queries and its keys and values in order, scales applied."""
    length = int(case.batch.kv_lens[row])
    caches = []
    for cache, scale in ((case.k, case.extras.k_scale), (case.v, case.extras.v_scale)):
        real = np.asarray(cache, np.float32) * (1 if scale is None else np.asarray(scale)[..., None])
        blocks = real[np.asarray(case.batch.block_tables[row])]  # [P, K, B, H]
        caches.append(blocks.swapaxes(1, 2).reshape(-1, *blocks.shape[1::2])[:length])
    start, end = case.batch.query_starts[row : row + 2]
    return np.asarray(case.q[start:end]), caches[0], caches[1]


def test_reference_equals_dense_attention():
    shape = replace(MIXED, cache_dtype="int8", sinks=True, alibi=True, soft_cap=3.0, window=12, head_dim=16, groups=3)
    case = make_case(shape)
    assert case.extras.alibi_slopes is not None
    assert case.extras.sinks is not None
    got = run(case, "reference")
    for row, end in enumerate(np.cumsum(shape.counts)):
        want = dense(
            *row_of(case, row),
            window=12,
            soft_cap=3.0,
            slopes=np.asarray(case.extras.alibi_slopes),
            sinks=np.asarray(case.extras.sinks),
        )
        np.testing.assert_allclose(got[end - shape.counts[row] : end], want, atol=2e-5)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("window", [4, 5])
def test_window_counts_the_current_token(name, window):
    """A prompt of 14 in chunks of 3, 4, 5 and at once, all in one batch on the same blocks, equals dense attention."""
    rng = np.random.default_rng(window)
    shape = Shape(counts=[], lens=[], head_dim=16, kv_heads=1, block_size=4, num_sms=16)
    chunks = [(a, min(a + size, 14)) for size in (3, 4, 5, 14) for a in range(0, 14, size)]
    counts = [b - a for a, b in chunks]
    k, v = rng.standard_normal((2, 5, 1, 4, 16)).astype(np.float32)
    tables = np.tile(np.array([3, 1, 4, 2], np.int32), (len(chunks), 1))
    q = rng.standard_normal((14, 1, 4, 16)).astype(np.float32)
    batch = plan_attention(
        block_tables=tables,
        kv_lens=np.array([b for _, b in chunks], np.int32),
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        num_rows=len(chunks),
        num_tokens=sum(counts),
        tiles=TileConfig(decode_lanes=1, decode_kv=4, prefill_queries=4, prefill_kv=4),
        work=work_config(replace(shape, decode=gpu_tile(kv=16), prefill=gpu_tile(kv=16, query_rows=16))),
    )
    case = Case(
        q=jnp.asarray(np.concatenate([q[a:b] for a, b in chunks])),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        batch=jax.tree.map(jnp.asarray, batch),
        spec=AttentionSpec(scale=16**-0.5, window=window, soft_cap=None),
        extras=NO_EXTRAS,
        num_live=sum(counts),
    )
    want = dense(q, *(cache[tables[0]].swapaxes(1, 2).reshape(16, 1, 16)[:14] for cache in (k, v)), window=window)
    got = run(case, name)
    for (a, b), end in zip(chunks, np.cumsum(counts), strict=True):
        np.testing.assert_allclose(got[end - (b - a) : end], want[a:b], atol=1e-5)
