"""The ops' public API: paged attention and KV writes, each with a plain-jnp reference and implementations."""

from jaxpaged.pallas_kernels.kv_write import copy_blocks, write_kv
from jaxpaged.pallas_kernels.paged_attention.api import implementations, paged_attention
from jaxpaged.pallas_kernels.paged_attention.batch import (
    AttentionBatch,
    AttentionExtras,
    AttentionSpec,
    TileConfig,
    plan_attention,
)
from jaxpaged.pallas_kernels.paged_attention.worklist import AttentionWork, GpuTile, WorkConfig

__all__ = [
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
    "write_kv",
]
