"""A model's matrices, in floats or in int8, and the two things done with them: products and lookups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.models.forward import Backends
from jaxpaged.pallas_kernels import LAYOUTS, QuantizedWeight, dense_matmul, quantized_matmul

SCHEMES = ("int8", "int8_w8a8")  # weights in int8; activations too, where they stand it
_LARGEST = 127


@dataclass(frozen=True, kw_only=True)
class MatrixForm:
    """How a model holds its matrices."""

    dtype: Any  # of activations, and of everything that is not quantised
    quantization: str | None  # one of SCHEMES


class Int8Matrix(nnx.Module):
    """A matrix [*out, *in] as integers -127 … 127 with a scale per output, float32.

    A scale is of the whole row of inputs, before anything is cut over devices: a mesh changes no integer.
    """

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], outputs: int, dtype: Any, *, int8_activations: bool
    ):
        self.values = nnx.Param(jnp.zeros(shape, jnp.int8), axes=axes)
        self.scales = nnx.Param(jnp.ones(shape[:outputs], jnp.float32), axes=axes[:outputs])
        self.dtype = dtype  # of rows()
        self.int8_activations = int8_activations

    def times(self, x: Float[Array, "T I"], backends: Backends) -> Float[Array, "T O"]:
        """x · wᵀ."""
        inputs = x.shape[-1]
        flat = QuantizedWeight(
            values=self.values[...].reshape(-1, inputs),
            scales=self.scales[...].reshape(-1),
            zeros=None,
            layout=LAYOUTS["int8"],
            group_size=inputs,
        )
        implementation = backends.matmul if backends.matmul in ("xla", "amx", "reference") else "auto"
        return quantized_matmul(x, flat, implementation=implementation, int8_activations=self.int8_activations)

    def rows(self, ids: Int[Array | np.ndarray, " T"]) -> Float[Array, "T D"]:
        """Rows in floats."""
        values, scales = (a[...].at[ids].get(mode="promise_in_bounds") for a in (self.values, self.scales))
        return (values.astype(jnp.float32) * scales[:, None]).astype(self.dtype)


Matrix = nnx.Param | Int8Matrix


def matrix(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    outputs: int,
    form: MatrixForm,
    rough_input: bool = False,
) -> Matrix:
    """A matrix [*out, *in] of `outputs` output axes, with its logical axes; random until loaded.

    rough_input: its input stands rounding to int8, which "int8_w8a8" then does.
    """
    if form.quantization is None:
        return weight(rngs, shape, form.dtype, axes)
    int8_activations = rough_input and form.quantization == "int8_w8a8"
    return Int8Matrix(shape, axes, outputs, form.dtype, int8_activations=int8_activations)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter with its logical axes (sharding.rules maps them to mesh axes); random normal until loaded."""
    assert len(shape) == len(axes)
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


def linear(
    x: Float[Array, "T I"], w: Matrix, bias: Float[Array, "..."] | None, backends: Backends, *, outputs: int
) -> Float[Array, "..."]:
    """x · wᵀ + bias: w is [*out, *in] with `outputs` output axes, the result [T, *out]. The one place where
    activations meet weights."""
    if isinstance(w, Int8Matrix):
        y, shape = w.times(x, backends), w.values.shape
    else:
        # With several output axes XLA:CPU would transpose the weight in every call.
        y = dense_matmul(x, w[...].reshape(-1, x.shape[-1]), implementation=backends.matmul)
        shape = w.shape
    y = y.reshape(x.shape[0], *shape[:outputs])
    return y if bias is None else y + bias[None]


def embed(table: Matrix, tokens: Int[Array | np.ndarray, " T"]) -> Float[Array, "T D"]:
    """Rows of the table [V, D]. Ids were checked on the host: an id out of range would read another token's row."""
    if isinstance(table, Int8Matrix):
        return table.rows(tokens)
    return table[...].at[tokens].get(mode="promise_in_bounds")


def quantize_matrix(w: np.ndarray, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """[*out, *in] to the values int8 and scales float32 [*out] of an Int8Matrix; a row of zeros has scale 1.

    Raises: ValueError for a weight that is not finite.
    """
    wide = w.astype(np.float32, copy=False).reshape(*w.shape[:outputs], math.prod(w.shape[outputs:]))
    largest = np.maximum(wide.max(-1), -wide.min(-1))
    if not np.isfinite(largest).all():
        raise ValueError("wanted finite weights, got an infinity or a NaN, which int8 cannot hold")
    scales = np.where(largest > 0, largest / _LARGEST, 1).astype(np.float32)
    values = np.rint(wide / scales[..., None]).clip(-_LARGEST, _LARGEST).astype(np.int8)
    return values.reshape(w.shape), scales
