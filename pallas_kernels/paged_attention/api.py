"""paged_attention: the op, and which implementation serves which platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.reference import paged_attention_reference
from jaxpaged.pallas_kernels.paged_attention.tiled import paged_attention_tiled

Implementation = Callable[..., jax.Array]

_IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType(
    {"tiled": paged_attention_tiled, "reference": paged_attention_reference}
)


def implementations() -> tuple[str, ...]:
    """Names that `implementation` takes, besides "auto"."""
    return tuple(_IMPLEMENTATIONS)


def paged_attention(
    q: Float[Array, "T K G H"],
    k_cache: Float[Array, "N K B H"],
    v_cache: Float[Array, "N K B H"],
    batch: AttentionBatch,
    spec: AttentionSpec,
    *,
    implementation: str,
) -> Float[Array, "T K G H"]:
    """Causal attention of ragged queries over block tables.

    Args:
        q: queries, grouped by KV head: query head k·G + g is [k, g].
        k_cache, v_cache: N blocks of B tokens; the keys of this step's own tokens are already written.
        batch: rows, tables and work list, the same for every layer.
        spec: scale, window and soft cap of this layer.
        implementation: one of implementations(), or "auto": the best for the platform ("tiled" everywhere so far).

    Returns: [T, K, G, H] in q's dtype; padding tokens' rows are finite and meaningless.
    Raises: ValueError for an unknown implementation.
    """
    name = "tiled" if implementation == "auto" else implementation
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"paged_attention implementation: wanted auto or one of {implementations()}, got {name!r}")
    return _IMPLEMENTATIONS[name](q, k_cache, v_cache, batch, spec)
