"""Shared layers as Flax NNX modules. Weights keep the checkpoint's [out, in] order, named role_dims.

Letters: T tokens, D model dim, K KV heads, G query heads per KV head, H head dim, F mlp dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.forward import Backends
from jaxpaged.models.matrices import MatrixForm, linear, matrix, weight

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class RMSNorm(nnx.Module):
    """x / rms(x) · scale, computed in float32 (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.scale_d = nnx.Param(jnp.ones((dim,), dtype), axes=("embed",))
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        scale = self.scale_d[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return scale * wide.astype(x.dtype)


class Mlp(nnx.Module):
    """Gated MLP: down(act(gate x) · up x). Gate and up are one matrix, so that one product computes both."""

    def __init__(self, config: ModelConfig, form: MatrixForm, *, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.mlp_dim
        self.gate_up_2fd = matrix(rngs, (2, f, d), (None, "mlp", "embed"), outputs=2, form=form, rough_input=True)
        self.down_df = matrix(rngs, (d, f), ("embed", "mlp"), outputs=1, form=form)
        bias = config.mlp_bias
        self.gate_up_bias_2f = weight(rngs, (2, f), form.dtype, (None, "mlp")) if bias else None
        self.down_bias_d = weight(rngs, (d,), form.dtype, ("embed",)) if bias else None
        self.act = config.hidden_act

    def __call__(self, x: Float[Array, "T D"], backends: Backends) -> Float[Array, "T D"]:
        both = linear(x, self.gate_up_2fd, value(self.gate_up_bias_2f), backends, outputs=2)
        hidden = ACTIVATIONS[self.act](both[:, 0]) * both[:, 1]
        return linear(hidden, self.down_df, value(self.down_bias_d), backends, outputs=1)


def value(param: nnx.Param | None) -> Array | None:
    """The array of an optional parameter."""
    return None if param is None else param[...]


def rotate(x: Float[Array, "T *heads H"], cos: Float[Array, "T h"], sin: Float[Array, "T h"]) -> Float[Array, "..."]:
    """Rotary embedding on the two halves of the head (GPT-NeoX order; Su et al., 2021). h is H / 2."""
    shape = (cos.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
