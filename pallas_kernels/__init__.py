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
from jaxpaged.pallas_kernels.paged_attention.tiles import gpu_work_config
from jaxpaged.pallas_kernels.paged_attention.worklist import AttentionWork, GpuTile, WorkConfig, plan_work
from jaxpaged.pallas_kernels.platform import DeviceTarget, current_target, target_of

__all__ = [
    "NO_EXTRAS",
    "AttentionBatch",
    "AttentionExtras",
    "AttentionSpec",
    "AttentionWork",
    "DeviceTarget",
    "GpuTile",
    "TileConfig",
    "WorkConfig",
    "copy_blocks",
    "current_target",
    "gpu_work_config",
    "implementations",
    "paged_attention",
    "plan_attention",
    "plan_work",
    "target_of",
    "write_kv",
]
