"""The two matrix products of attention, by wgmma."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import ROWS
from jaxpaged.pallas_kernels.paged_attention.mosaic.ring import Ref

untyped: Any = plgpu  # to pyright some of its classes are private or abstract


def multiply(a: Ref, b: Ref, columns: int) -> jax.Array:
    """[64, columns] float32: the product of two references to shared memory."""

    def product(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(product, untyped.ACC((ROWS, columns), jnp.float32))


def add_product(acc: jax.Array, weights: jax.Array, values: Ref, interpret: bool) -> jax.Array:
    """acc + weights·values, weights from registers.

    Pallas' interpreter has no wgmma of that form: there it is a plain product, whose reads of shared memory, unlike
    wgmma's, have to be made known before a copy may overwrite what was read.
    """
    if interpret:
        product = jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        plgpu.commit_smem()
        return acc + product
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(untyped.ACC.init(acc))
