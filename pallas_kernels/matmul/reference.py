"""The product's semantics, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul_reference(x: Float[Array, "T I"], w: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """x · wᵀ, with float32 sums of exact products, in x's dtype."""
    product = jnp.einsum("ti,oi->to", x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)
