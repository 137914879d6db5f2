"""paged_attention for Hopper (sm_90a) in Pallas Mosaic GPU: TMA page copies into a ring, wgmma on it."""

from __future__ import annotations

import jax

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import mosaic_obstacle
from jaxpaged.pallas_kernels.paged_attention.mosaic.tiles import hopper_work_config

__all__ = ["hopper_work_config", "mosaic_obstacle", "paged_attention_mosaic"]


def paged_attention_mosaic(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
    *,
    interpret: bool,
) -> jax.Array:
    """The op by the Hopper kernel, see backend; imported when it is first called, as Mosaic GPU takes a second."""
    from jaxpaged.pallas_kernels.paged_attention.mosaic import backend

    return backend.paged_attention_mosaic(q, k_cache, v_cache, batch, spec, extras, interpret=interpret)
