"""paged_attention compiled for GPUs that are not there: the variants, and what a report must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.graphs import CompileReport, Kernel, Target
from jaxpaged.pallas_kernels import (
    AttentionExtras,
    AttentionSpec,
    TileConfig,
    WorkConfig,
    current_target,
    gpu_work_config,
    paged_attention,
    plan_attention,
)
from jaxpaged.pallas_kernels.paged_attention.mosaic import hopper_work_config

# Matrix instructions and copies that skip registers, by generation; decode tiles are too small for wgmma and tcgen05.
EXPECTED = MappingProxyType({"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"})
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "cp.async.cg", "cp.async.bulk.tensor", "ldmatrix")
WORK_CONFIGS = MappingProxyType({"triton": gpu_work_config, "mosaic": hopper_work_config})
UNUSED = TileConfig(decode_lanes=1, decode_kv=16, prefill_queries=16, prefill_kv=16)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One call: 64 rows, of one query each or of 32."""

    phase: str
    kv_heads: int = 8
    groups: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    spec: AttentionSpec = field(default_factory=lambda: AttentionSpec(scale=0.1, window=None, soft_cap=None))
    sinks: bool = False
    alibi: bool = False


def _variants() -> Mapping[str, Variant]:
    capped = AttentionSpec(scale=0.1, window=1024, soft_cap=50.0)
    each = {
        "bf16": {},
        "f16": dict(dtype="float16"),
        "width 64": dict(head_dim=64),
        "width 80": dict(head_dim=80),
        "width 96": dict(head_dim=96),
        "width 256": dict(head_dim=256),
        "blocks of 32": dict(block_size=32),
        "blocks of 64": dict(block_size=64),
        "blocks of 128": dict(block_size=128),
        "G 1": dict(groups=1, kv_heads=32),
        "G 3": dict(groups=3, kv_heads=3, head_dim=64),
        "G 7": dict(groups=7, kv_heads=4),
        "one KV head, G 32": dict(groups=32, kv_heads=1),
        "window, soft cap": dict(spec=capped),
        "sinks, ALiBi": dict(sinks=True, alibi=True),
        "int8": dict(cache_dtype="int8"),
        "fp8": dict(cache_dtype="float8_e4m3fn"),
        "int8, all options": dict(cache_dtype="int8", spec=capped, sinks=True, alibi=True, block_size=64),
    }
    phases = ("decode", "prefill")
    return MappingProxyType({f"{p}: {name}": Variant(phase=p, **kw) for p in phases for name, kw in each.items()})


VARIANTS = _variants()


def variant_work(target: Target, variant: Variant, implementation: str) -> WorkConfig:
    """What its work lists are made for: a decode variant has the one list of single queries."""
    with jax.sharding.use_abstract_mesh(target.mesh):
        work = WORK_CONFIGS[implementation](
            current_target(),
            groups=variant.groups,
            num_kv_heads=variant.kv_heads,
            head_dim=variant.head_dim,
            block_size=variant.block_size,
            cache_dtype=jnp.dtype(variant.cache_dtype or variant.dtype),
        )
    return replace(work, prefill=None) if variant.phase == "decode" else work


def compile_variant(target: Target, variant: Variant, implementation: str = "triton") -> CompileReport:
    """The op alone, with the tile of the implementation's table."""
    rows, queries = 64, 1 if variant.phase == "decode" else 32
    work = variant_work(target, variant, implementation)
    batch = plan_attention(
        block_tables=np.zeros((rows, 4096 // variant.block_size), np.int32),
        kv_lens=np.full(rows, 4096, np.int32),
        query_starts=np.arange(rows + 1, dtype=np.int32) * queries,
        num_rows=rows,
        num_tokens=rows * queries,
        tiles=UNUSED,
        work=work,
    )
    heads = (variant.kv_heads, variant.groups)
    cache = (32768 // variant.block_size, variant.kv_heads, variant.block_size, variant.head_dim)
    scale = target.abstract(cache[:3], jnp.float32) if variant.cache_dtype else None
    per_head = target.abstract(heads, jnp.float32)
    extras = AttentionExtras(
        sinks=per_head if variant.sinks else None,
        alibi_slopes=per_head if variant.alibi else None,
        k_scale=scale,
        v_scale=scale,
    )
    stored = target.abstract(cache, variant.cache_dtype or variant.dtype)
    q = target.abstract((rows * queries, *heads, variant.head_dim), variant.dtype)
    call = partial(_call, spec=variant.spec, implementation=implementation)
    abstract = jax.tree.map(lambda x: target.abstract(np.shape(x), jnp.int32), batch)
    return target.compile(call, q, stored, stored, abstract, extras)


def _call(q, k, v, batch, extras, *, spec, implementation):
    return paged_attention(q, k, v, batch, spec, implementation=implementation, extras=extras)


def attention_kernels(report: CompileReport) -> dict[str, tuple[Kernel, int]]:
    """Each attention kernel, the last phase's of equal names, with the dynamic shared memory it is launched with."""
    return {
        kernel.name: (kernel, max((e.dynamic_shared for e in report.launches_of(kernel)), default=0))
        for kernel in report.kernels_named("paged_attention")
    }


def instructions(report: CompileReport) -> dict[str, int]:
    """How often each of INSTRUCTIONS stands in the attention kernels' PTX."""
    source = "".join(module for module in report.ptx if "paged_attention" in module)
    return {name: source.count(name) for name in INSTRUCTIONS if name in source}
