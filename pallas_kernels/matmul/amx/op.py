"""The product as a call from XLA:CPU to the tile unit, and when it can be made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.cpu.foreign import make_known
from jaxpaged.pallas_kernels.cpu.tile_unit import tile_unit_is_missing
from jaxpaged.pallas_kernels.matmul.cpu.op import numba_obstacle
from jaxpaged.pallas_kernels.platform import DeviceTarget

_TARGET = "jaxpaged_matmul_amx"


def amx_obstacle(target: DeviceTarget, dtypes: tuple[jnp.dtype, jnp.dtype]) -> str | None:
    """Why it cannot multiply arrays of these dtypes here; None: it can. Arrays must lie on one device, which a call
    cannot tell."""
    return numba_obstacle(target, dtypes) or tile_unit_is_missing()


def matmul_amx(x: Float[Array, "T I"], w: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """x · wᵀ in float32; an infinite entry gives NaN where others give an infinity."""
    make_known(_TARGET, _handler)
    return jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))(x, w)


def _handler() -> int:
    """Numba is imported here, and compiles or reads its cache."""
    from jaxpaged.pallas_kernels.matmul.amx.entry import compiled

    assert tile_unit_is_missing() is None  # which asks the system for it, in each process
    return compiled()[0].address
