"""The semantics of quantized_matmul in plain jnp: the whole weight in float32, one product at full precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.quantized_matmul.packing import dequantize
from jaxpaged.pallas_kernels.quantized_matmul.weight import QuantizedWeight


def quantize_rows(x: Float[Array, "T I"]) -> tuple[Float[Array, "T I"], Float[Array, "T 1"]]:
    """Integers -127 … 127 (still floats) and each row's scale, with which their product is x up to rounding."""
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(-1, keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(wide / scale), scale


def quantized_matmul_reference(
    x: Float[Array, "T I"], weight: QuantizedWeight, *, int8_activations: bool
) -> Float[Array, "T O"]:
    """x · weightᵀ in float32, rounded once to x's dtype; int8_activations first round x to 255 steps a row."""
    wide = x.astype(jnp.float32)
    if int8_activations:
        integers, scale = quantize_rows(x)
        wide = integers * scale
    full = dequantize(weight, jnp.dtype(jnp.float32))
    product = jax.lax.dot_general(wide, full, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return product.astype(x.dtype)
