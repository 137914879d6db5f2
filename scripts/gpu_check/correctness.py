"""Every kernel against the plain reference, in small poisoned batches: what was never written shows as NaN."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels import (
    LAYOUTS,
    QuantizedKV,
    dequantize,
    paged_attention,
    quantize,
    quantized_matmul,
    write_kv,
    write_kv_quantized,
)
from scripts.gpu_check.attention import KERNELS, work_config
from scripts.gpu_check.context import Context, waves
from tests.support.attention import Shape, gpu_tile, make_case

TOLERANCE = {"float32": 5e-3, "bfloat16": 2e-2, "float16": 5e-3}  # float32 products use the GPU's 19-bit format

BASE: dict[str, Any] = dict(counts=[1, 1, 5, 40, 1, 7], lens=[1, 130, 5, 70, 17, 57], num_sms=16, dtype="bfloat16")
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "split": dict(counts=[1, 1, 1], lens=[3000, 5, 1200], prefill=None, num_sms=64),
    "window": dict(window=20),
    "soft cap, sinks": dict(soft_cap=20.0, sinks=True),
    "ALiBi": dict(alibi=True),
    "float16": dict(dtype="float16"),
    "int8 cache": dict(cache_dtype="int8"),
    "fp8 cache": dict(cache_dtype="float8_e4m3fn"),
    "blocks of 64": dict(block_size=64),
    "blocks of 32": dict(block_size=32),
    "blocks of 128": dict(block_size=128),
    "heads of 128": dict(head_dim=128),
    "heads of 80": dict(head_dim=80),
    "heads of 96": dict(head_dim=96),
    "heads of 256": dict(head_dim=256),
    "7 to 1": dict(groups=7),
    "3 to 1": dict(groups=3),
    "multi-query": dict(kv_heads=1, groups=8),
    "verification": dict(counts=[5, 1, 4], lens=[205, 90, 4], decode=gpu_tile(query_rows=32)),
    "float32": dict(dtype="float32"),
}
DRY_VARIANTS = ("bfloat16",)


def run(context: Context) -> None:
    variants = DRY_VARIANTS if context.sizes.dry else tuple(VARIANTS)
    for variant in variants:
        for name in KERNELS:
            check = partial(_attention, name, variant, context.sizes.dry)
            context.case({"op": "paged_attention", "kernel": name, "variant": variant}, check, seconds=4.0)
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        context.case({"op": "write_kv", "variant": dtype}, partial(_write, dtype), seconds=3.0)
    for layout in LAYOUTS:
        for tokens in context.sizes.tokens[:1] if context.sizes.dry else (1, 16, 64, 200):
            check = partial(_product, layout, tokens, context.sizes.dry)
            context.case({"op": "quantized_matmul", "variant": f"{layout}, {tokens} tokens"}, check, seconds=3.0)


def _verdict(got: jax.Array, want: jax.Array, tolerance: float) -> dict[str, Any]:
    """Largest difference as a share of the largest value; NaN is wrong."""
    left, right = np.asarray(got, np.float32), np.asarray(want, np.float32)
    error = float(np.abs(left - right).max() / np.abs(right).max())
    return {"difference": error, "right": bool(error <= tolerance)}


def _shape(name: str, variant: str) -> Shape:
    """The variant's batch with the kernel's own tiles, but for what the variant itself asks for."""
    options = BASE | VARIANTS[variant]
    plain = Shape(**options)
    work = work_config(
        name,
        heads=(plain.kv_heads, plain.groups, plain.head_dim),
        block_size=plain.block_size,
        cache_dtype=plain.cache_dtype or plain.dtype,
    )
    tiles = {"decode": work.decode, "prefill": work.prefill}
    return Shape(**(tiles | options))


def _attention(name: str, variant: str, dry: bool) -> dict[str, Any]:
    shape = _shape(name, variant)
    case = make_case(shape)
    arguments = (case.q, case.k, case.v, case.batch)
    call = partial(paged_attention, spec=case.spec, interpret=dry)
    got = jax.jit(partial(call, implementation=name))(*arguments, extras=case.extras)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(partial(call, implementation="reference"))(*arguments, extras=case.extras)
    return _verdict(got[: case.num_live], want[: case.num_live], TOLERANCE[shape.dtype])


def _write(dtype: str) -> dict[str, Any]:
    blocks, heads, block_size, width, tokens = 8, 2, 16, 64, 20
    k, v = waves((tokens, heads, width), jnp.bfloat16), waves((tokens, heads, width), jnp.bfloat16) * 3
    slots = jnp.asarray(np.random.default_rng(0).permutation(blocks * block_size)[:tokens].astype(np.int32))
    cache = jnp.zeros((blocks, heads, block_size, width), dtype)
    if dtype == "bfloat16":
        written, _ = jax.jit(write_kv, donate_argnums=(0, 1))(cache, cache + 0, k, v, slots)
        meant, tolerance = written, 0.0
    else:
        scale = jnp.zeros((blocks, heads, block_size), jnp.float32)
        caches = QuantizedKV(k=cache, v=cache + 0, k_scale=scale, v_scale=scale + 0)
        out = jax.jit(write_kv_quantized, donate_argnums=(0,))(caches, k, v, slots)
        meant, tolerance = out.k.astype(jnp.float32) * out.k_scale[..., None], 0.07
    return _verdict(meant[slots // block_size, :, slots % block_size], k, tolerance)


def _product(layout: str, tokens: int, dry: bool) -> dict[str, Any]:
    grouped = LAYOUTS[layout].grouped
    inputs, outputs = 256, 96
    weight = quantize(waves((outputs, inputs), jnp.float32), LAYOUTS[layout], 128 if grouped else inputs,
                      zero_points=grouped)  # fmt: skip
    x = waves((tokens, inputs), jnp.bfloat16)
    name = "triton" if grouped else "auto"
    call = partial(quantized_matmul, implementation=name, int8_activations=False, interpret=dry)
    with jax.default_matmul_precision("highest"):
        want = x.astype(jnp.float32) @ dequantize(weight, jnp.dtype("float32")).T
    return _verdict(jax.jit(call)(x, weight), want, TOLERANCE["bfloat16"])
