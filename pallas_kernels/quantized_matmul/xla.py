"""quantized_matmul in plain XLA: the compiler fuses the reading of int8 weights into its own product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.quantized_matmul.packing import dequantize
from jaxpaged.pallas_kernels.quantized_matmul.reference import quantize_rows
from jaxpaged.pallas_kernels.quantized_matmul.weight import QuantizedWeight

_INPUTS = (((1,), (1,)), ((), ()))  # x [T, I] and values [O, I] meet in their inputs


def quantized_matmul_xla(
    x: Float[Array, "T I"], weight: QuantizedWeight, *, int8_activations: bool
) -> Float[Array, "T O"]:
    """Per output channel the scale is applied after the product: before it XLA would write out the whole weight.

    Grouped weights are dequantised in full, in every call: for platforms and shapes that no kernel serves.
    """
    if int8_activations:
        integers, row_scale = quantize_rows(x)
        product = jax.lax.dot_general(
            integers.astype(jnp.int8), weight.values, _INPUTS, preferred_element_type=jnp.int32
        ).astype(jnp.float32)
        return (product * (row_scale * _row(weight.scales))).astype(x.dtype)
    if weight.layout.grouped:
        full = dequantize(weight, x.dtype)
        return jax.lax.dot_general(x, full, _INPUTS, preferred_element_type=jnp.float32).astype(x.dtype)
    values = weight.values.astype(x.dtype)  # exact: bfloat16 has all integers up to 256
    product = jax.lax.dot_general(x, values, _INPUTS, preferred_element_type=jnp.float32)
    return (product * _row(weight.scales)).astype(x.dtype)


def _row(scales: Array | np.ndarray) -> Array:
    return jnp.asarray(scales).astype(jnp.float32)[None, :]
