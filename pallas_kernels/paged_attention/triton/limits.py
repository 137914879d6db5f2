"""What the Triton implementation cannot do, in words."""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.platform import DeviceTarget

SMALLEST_PIECE = 16  # a matrix product's smallest side on tensor cores
OLDEST = (8, 0)
OLDEST_FP8 = (8, 9)


def obstacle(target: DeviceTarget, call: AttentionCall) -> str | None:
    """Why the call cannot be served on the target; None if it can."""
    return (None if call.interpret else _of_target(target, call)) or _of_call(call)


def _of_target(target: DeviceTarget, call: AttentionCall) -> str | None:
    if target.platform != "gpu":
        return "needs an NVIDIA GPU; interpret=True runs it elsewhere, slowly, for tests"
    if target.capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, got {target.kind}"
    if target.capability < OLDEST:
        return f"needs compute capability {OLDEST[0]}.{OLDEST[1]} or more"
    if call.cache.dtype == jnp.float8_e4m3fn and target.capability < OLDEST_FP8:
        return "an fp8 cache needs compute capability 8.9 or more; use an int8 cache"
    return None


def _of_call(call: AttentionCall) -> str | None:
    if call.batch.work is None:
        return "the batch has no work list; give plan_attention a WorkConfig"
    groups, head_dim = call.q.shape[2:]
    tiles = [work.tile for work in (call.batch.work.decode, call.batch.work.prefill) if work is not None]
    if any(tile.query_rows < max(groups, SMALLEST_PIECE) for tile in tiles):
        return f"tiles need query_rows of at least {max(groups, SMALLEST_PIECE)}, got {tiles}"
    if head_dim % SMALLEST_PIECE:
        return f"head_dim must be a multiple of {SMALLEST_PIECE}, got {head_dim}"
    # The lowering counts elements in 32 bits, signed, for arrays of up to 4 GiB.
    elements = math.prod(call.cache.shape)
    if elements >= 2**31 and elements * call.cache.dtype.itemsize <= 2**32:
        return f"a one-byte cache must not have 2³¹ to 2³² elements per layer, got {elements}; change num_blocks"
    return None
