"""dense_matmul: the product of activations and a weight, and which implementation serves which call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.matmul.amx.op import amx_obstacle, matmul_amx
from jaxpaged.pallas_kernels.matmul.cpu.op import matmul_numba, numba_obstacle
from jaxpaged.pallas_kernels.matmul.reference import matmul_reference
from jaxpaged.pallas_kernels.platform import Candidate, DeviceTarget, current_target, first_fitting

_NAMES = ("xla", "amx", "numba", "reference")
# Rows from which and up to which "numba" is the faster one. With a few rows both wait for the memory that holds the
# weight, with hundreds both compute nearly as fast as the cores can.
_NUMBA_FROM, _NUMBA_TO = 4, 128


def dense_implementations() -> tuple[str, ...]:
    """Names that `implementation` takes, besides "auto"."""
    return _NAMES


def choose_dense(name: str, target: DeviceTarget, rows: int, dtypes: tuple[jnp.dtype, jnp.dtype]) -> str:
    """The implementation that multiplies that many rows of an input by a weight of these dtypes on the target.

    Raises: ValueError for an unknown name, and for "numba" where it cannot serve, with the reason.
    """
    if name != "auto" and name not in _NAMES:
        raise ValueError(f"dense_matmul implementation: wanted auto or one of {_NAMES}, got {name!r}")
    obstacle = numba_obstacle(target, dtypes)
    if name == "auto":
        return "numba" if obstacle is None and _NUMBA_FROM <= rows <= _NUMBA_TO else "xla"
    obstacles = {"numba": obstacle, "amx": amx_obstacle(target, dtypes)}
    candidate = Candidate(name=name, obstacle=obstacles.get(name))
    return first_fitting("dense_matmul", target, [candidate])


def dense_matmul(x: Float[Array, "T I"], w: Float[Array, "O I"], *, implementation: str) -> Float[Array, "T O"]:
    """x · wᵀ.

    Args:
        x: activations.
        w: a weight in the checkpoint's order, contiguous.
        implementation: one of dense_implementations(), or "auto": "numba" on a CPU for float32 and 4 to 128 rows, if
            Numba is installed, else "xla". "amx" and "numba" want every array on one device.

    Returns: [T, O] in x's dtype.
    Raises: ValueError for an unknown implementation, or one that cannot serve this call on this device.
    """
    name = choose_dense(implementation, current_target(), x.shape[0], (x.dtype, w.dtype))
    if name == "amx":
        return matmul_amx(x, w)
    if name == "numba":
        return matmul_numba(x, w)
    if name == "reference":
        return matmul_reference(x, w)
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
