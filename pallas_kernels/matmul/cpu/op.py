"""The product as a call from XLA:CPU into Numba's code, and when it can be made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.cpu.foreign import make_known, numba_is_missing
from jaxpaged.pallas_kernels.platform import DeviceTarget

_TARGET = "jaxpaged_matmul"


def numba_obstacle(target: DeviceTarget, dtypes: tuple[jnp.dtype, jnp.dtype]) -> str | None:
    """Why it cannot multiply arrays of these dtypes here; None: it can. Arrays must lie on one device, which a call
    cannot tell."""
    if target.platform != "cpu":
        return "it runs on CPUs"
    if dtypes != (jnp.float32, jnp.float32):
        return f"it computes in float32, got an input in {dtypes[0]} and a weight in {dtypes[1]}"
    return numba_is_missing()


def matmul_numba(x: Float[Array, "T I"], w: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """x · wᵀ in float32; sums are made in another order than XLA's."""
    make_known(_TARGET, _handler)
    return jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))(x, w)


def _handler() -> int:
    """Numba is imported here, and compiles or reads its cache."""
    from jaxpaged.pallas_kernels.matmul.cpu.entry import compiled

    return compiled()[0].address
