"""The product as a call from XLA:CPU to the tile unit, and when it can be made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.cpu.foreign import make_known, numba_is_missing
from jaxpaged.pallas_kernels.cpu.tile_unit import tile_unit_is_missing
from jaxpaged.pallas_kernels.platform import DeviceTarget
from jaxpaged.pallas_kernels.quantized_matmul.weight import Layout, QuantizedWeight

_TARGET = "jaxpaged_int8_amx"


def amx_obstacle(layout: Layout, target: DeviceTarget, dtype: jnp.dtype) -> str | None:
    """Why it cannot multiply activations of a dtype by weights of a layout here; None: it can. Arrays must lie on one
    device, which a call cannot tell."""
    if layout.grouped:
        return f"it serves int8 weights with a scale per output, got {layout.name}"
    if target.platform != "cpu":
        return "it runs on CPUs"
    if dtype != jnp.float32:
        return f"it takes float32 activations, got {dtype}"
    return numba_is_missing() or tile_unit_is_missing()


def quantized_matmul_amx(
    x: Float[Array, "T I"], weight: QuantizedWeight, *, int8_activations: bool
) -> Float[Array, "T O"]:
    """x · weightᵀ out of products of integers, exact in int32 up to 131,072 inputs.

    Each row of x is rounded with a scale of its own: to -127 … 127, or, as good as exactly, to -32512 … 32512. A row
    with a NaN or an infinity gives NaN.
    """
    make_known(_TARGET, _handler)
    parts = jnp.zeros(1 if int8_activations else 2, jnp.int8)  # the call reads its size alone
    out = jax.ShapeDtypeStruct((x.shape[0], weight.num_outputs), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, out)(x, weight.values, weight.scales.astype(jnp.float32), parts)


def _handler() -> int:
    """Numba is imported here, and compiles or reads its cache."""
    from jaxpaged.pallas_kernels.quantized_matmul.amx.entry import compiled

    assert tile_unit_is_missing() is None  # which asks the system for it, in each process
    return compiled()[0].address
