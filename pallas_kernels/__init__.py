"""The ops' public API: paged attention, KV writes, products with weights; references and implementations."""

from jaxpaged.pallas_kernels.kv_write import QuantizedKV, copy_blocks, write_kv, write_kv_quantized
from jaxpaged.pallas_kernels.matmul.api import dense_implementations, dense_matmul
from jaxpaged.pallas_kernels.paged_attention.api import implementations, paged_attention
from jaxpaged.pallas_kernels.paged_attention.batch import (
    NO_EXTRAS,
    AttentionBatch,
    AttentionExtras,
    AttentionSpec,
    TileConfig,
    plan_attention,
)
from jaxpaged.pallas_kernels.paged_attention.mosaic import hopper_work_config
from jaxpaged.pallas_kernels.paged_attention.tiles import gpu_work_config
from jaxpaged.pallas_kernels.paged_attention.worklist import AttentionWork, GpuTile, WorkConfig, plan_work
from jaxpaged.pallas_kernels.platform import DeviceTarget, current_target, target_of
from jaxpaged.pallas_kernels.quantized_matmul.api import matmul_implementations, quantized_matmul
from jaxpaged.pallas_kernels.quantized_matmul.packing import dequantize, quantize
from jaxpaged.pallas_kernels.quantized_matmul.tiles import MatmulTiles
from jaxpaged.pallas_kernels.quantized_matmul.weight import LAYOUTS, Layout, QuantizedWeight

__all__ = [
    "LAYOUTS",
    "NO_EXTRAS",
    "AttentionBatch",
    "AttentionExtras",
    "AttentionSpec",
    "AttentionWork",
    "DeviceTarget",
    "GpuTile",
    "Layout",
    "MatmulTiles",
    "QuantizedKV",
    "QuantizedWeight",
    "TileConfig",
    "WorkConfig",
    "copy_blocks",
    "current_target",
    "dense_implementations",
    "dense_matmul",
    "dequantize",
    "gpu_work_config",
    "hopper_work_config",
    "implementations",
    "matmul_implementations",
    "paged_attention",
    "plan_attention",
    "plan_work",
    "quantize",
    "quantized_matmul",
    "target_of",
    "write_kv",
    "write_kv_quantized",
]
