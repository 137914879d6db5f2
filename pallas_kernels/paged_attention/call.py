"""One call of paged_attention as its implementations see it when they say whether they can serve it."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What an implementation may refuse: shapes, dtypes and options."""

    q: jax.ShapeDtypeStruct  # [T, K, G, H]
    cache: jax.ShapeDtypeStruct  # [N, K, B, H]
    batch: AttentionBatch
    spec: AttentionSpec
    extras: AttentionExtras
    interpret: bool
