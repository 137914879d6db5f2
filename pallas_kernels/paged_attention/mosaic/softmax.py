"""The online softmax of one warpgroup's 64 rows, in registers laid out as wgmma leaves its results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas_kernels.paged_attention.batch import AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import ROWS

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite: the difference of two is 0, never NaN
NOTHING = -1e20  # a maximum below this is of masked scores alone


class Running(NamedTuple):
    """What is known after some keys. Maxima are in units of log2: weights are powers of 2."""

    acc: jax.Array  # [64, H] float32: weighted sum of values
    top: jax.Array  # [64] largest score
    total: jax.Array  # [64] sum of weights


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a warpgroup's rows may see. Arrays [64] int32 and float32 in the layout of a reduced wgmma result."""

    position: jax.Array  # of the row's query
    limit: jax.Array  # keys from here on are not seen: after the query, or beyond the item
    slope: jax.Array | None  # ALiBi, times log2(e)


def over_columns(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per row, repeated along the columns."""
    return lax.broadcast_in_dim(rows, shape, [0])


def first_state(head_dim: int, sinks: jax.Array | None, holds: jax.Array) -> Running:
    """The state before the first key.

    sinks: [64] a further score per row, in units of log2, to a value of zeros; counted where `holds`, a scalar, is
    true, so that of a split block's items one counts them.
    """
    row = plgpu.Layout.WGMMA.reduce(1)
    acc = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
    if sinks is None:
        nothing = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), row)
        return Running(acc=acc, top=nothing, total=plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row))
    weight = jnp.where(holds, 1.0, 0.0)
    total = plgpu.layout_cast(jnp.full((ROWS,), weight, jnp.float32), row)
    return Running(acc=acc, top=sinks * weight + MASKED * (1.0 - weight), total=total)


def row_queries(groups: int) -> jax.Array:
    """[64] int32: which of the warpgroup's queries a row belongs to; row t·G + g is head g of query t."""
    rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    return lax.div(rows, jnp.int32(groups))


def weigh(
    products: jax.Array, before: Running, rows: Rows, first_key: jax.Array, spec: AttentionSpec, *, masked: bool
) -> tuple[jax.Array, Running]:
    """The weights [64, kv] of a tile of keys, and the state with acc rescaled and top and total brought up to date.

    products: q·k [64, kv], float32. masked: whether some row may not see some key; where not, no mask is computed.
    """
    scores, factor = _scores(products, rows, first_key, spec)
    if masked:
        keys = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA) + first_key
        seen = keys < over_columns(rows.limit, products.shape)
        if spec.window is not None:
            seen &= keys > over_columns(rows.position - spec.window, products.shape)
        scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(before.top, scores.max(axis=1) * factor)
    # A row that has seen nothing has top far below any score: against 0 its weights are 0, not 2^(MASKED - MASKED).
    against = jnp.where(top < NOTHING, 0.0, top) if masked else top
    weights = jnp.exp2(scores * factor - over_columns(against, scores.shape))
    keep = jnp.exp2(before.top - top)
    return weights, Running(
        acc=before.acc * over_columns(keep, before.acc.shape),
        top=top,
        total=before.total * keep + weights.sum(axis=1),
    )


def _scores(products: jax.Array, rows: Rows, first_key: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, float]:
    """Scores and what is still to be multiplied to have them in units of log2: left to one fused multiply-add."""
    scores, factor = products, spec.scale * LOG2E
    if spec.soft_cap is not None:
        # c·tanh(x / c) = c - 2c / (exp(2x / c) + 1); the error is absolute, some 1e-7 c.
        scores = 1.0 - 2.0 / (jnp.exp2(scores * (2 * factor / spec.soft_cap)) + 1.0)
        factor = spec.soft_cap * LOG2E
    if rows.slope is not None:
        keys = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA) + first_key
        distance = (keys - over_columns(rows.position, products.shape)).astype(jnp.float32)
        scores = scores * factor + over_columns(rows.slope, products.shape) * distance
        factor = 1.0
    return scores, factor


def mean(state: Running) -> jax.Array:
    """[64, H] float32: the weighted mean of the values; 0 where nothing was seen."""
    inverse = 1.0 / jnp.maximum(state.total, 1e-30)
    return state.acc * over_columns(inverse, state.acc.shape)
