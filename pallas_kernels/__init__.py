"""The ops' public API: paged attention and KV writes, each with a plain-jnp reference and implementations."""

from jaxpaged.pallas_kernels.kv_write import copy_blocks, write_kv
from jaxpaged.pallas_kernels.paged_attention.api import implementations, paged_attention
from jaxpaged.pallas_kernels.paged_attention.batch import (
    NO_EXTRAS,
    AttentionBatch,
    AttentionExtras,
    AttentionSpec,
    TileConfig,
    plan_attention,
)
from jaxpaged.pallas_kernels.paged_attention.worklist import AttentionWork, GpuTile, WorkConfig, plan_work

__all__ = [
    "NO_EXTRAS",
    "AttentionBatch",
    "AttentionExtras",
    "AttentionSpec",
    "AttentionWork",
    "GpuTile",
    "TileConfig",
    "WorkConfig",
    "copy_blocks",
    "implementations",
    "paged_attention",
    "plan_attention",
    "plan_work",
    "write_kv",
]
