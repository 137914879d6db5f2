"""paged_attention as a call from XLA:CPU into Numba's code, and when it can be made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.cpu.foreign import make_known, numba_is_missing
from jaxpaged.pallas_kernels.paged_attention.batch import AttentionBatch, AttentionExtras, AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.platform import DeviceTarget

_TARGET = "jaxpaged_paged_attention"


def numba_obstacle(target: DeviceTarget, call: AttentionCall) -> str | None:
    """Why the call cannot be served here; None: it can. Arrays must lie on one device, which a call cannot tell."""
    if target.platform != "cpu":
        return "it runs on CPUs"
    if call.q.dtype != jnp.float32 or call.cache.dtype != jnp.float32:
        return f"it computes in float32, got queries in {call.q.dtype} and a cache in {call.cache.dtype}"
    if call.q.shape[-1] % 16:
        return f"it wants a head_dim that is a multiple of 16, got {call.q.shape[-1]}"
    return numba_is_missing()


def paged_attention_numba(
    q: Float[Array, "T K G H"],
    k_cache: Float[Array, "N K B H"],
    v_cache: Float[Array, "N K B H"],
    batch: AttentionBatch,
    spec: AttentionSpec,
    extras: AttentionExtras,
    *,
    interpret: bool,
) -> Float[Array, "T K G H"]:
    """Attention of every query over its row's cached keys. Padding tokens' rows are zeros.

    The batch's work lists are not used: threads take tiles of query rows as they become free. A key or a value that
    no query of the tile sees is not read.
    """
    del interpret  # there is no other way to run it
    make_known(_TARGET, _handler)
    none = np.zeros(0, np.float32)
    scalars = np.array([spec.scale, spec.soft_cap or 0.0], np.float32)
    window = np.array([spec.window or 0], np.int32)
    sinks, slopes = (
        none if x is None else jnp.asarray(x, jnp.float32).reshape(-1) for x in (extras.sinks, extras.alibi_slopes)
    )
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q, k_cache, v_cache, batch.block_tables, batch.kv_lens, batch.query_starts, scalars, window, sinks, slopes
    )


def _handler() -> int:
    """Numba is imported here, and compiles or reads its cache."""
    from jaxpaged.pallas_kernels.paged_attention.cpu.entry import compiled

    return compiled()[0].address
