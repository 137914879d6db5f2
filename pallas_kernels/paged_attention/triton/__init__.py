"""Paged attention as a Pallas kernel with the Triton lowering: one kernel for NVIDIA GPUs from sm_80 on."""

from jaxpaged.pallas_kernels.paged_attention.triton.glue import paged_attention_triton
from jaxpaged.pallas_kernels.paged_attention.triton.limits import obstacle

__all__ = ["obstacle", "paged_attention_triton"]
