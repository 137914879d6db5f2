"""Inverse frequencies of the rotary position embedding, as transformers computes them."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxpaged.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float32[np.ndarray, " h"], float]:
    """Frequencies float32[h = head_dim / 2] in radians per position, and the factor that multiplies cos and sin.

    "dynamic" depends on the sequence's length and is refused (ValueError): use dynamic_inverse_frequencies.
    """
    match rope.kind:
        case "default":
            return _unscaled(rope, head_dim), 1.0
        case "linear":
            return _unscaled(rope, head_dim) / np.float32(_known(rope.factor)), 1.0
        case "llama3":
            return _llama3(rope, head_dim), 1.0
        case "yarn":
            return _yarn(rope, head_dim), _yarn_attention_scale(rope)
        case "dynamic":
            raise ValueError("rope type 'dynamic' has no fixed frequencies; call dynamic_inverse_frequencies")


def dynamic_inverse_frequencies(
    rope: RopeConfig, head_dim: int, rope_len: Int32[Array | np.ndarray, " T"]
) -> Float32[Array, "T h"]:
    """Frequencies float32[T, head_dim / 2] of "dynamic" NTK scaling; cos and sin are not scaled.

    rope_len int32[T] is, for each token, max(prompt length, position + 1) of its sequence. That is what
    transformers uses both when a prompt is run in one go (all its tokens share the prompt's length) and
    when tokens are generated one by one on a cache (each new key keeps the length it was written with).

    With s = factor * rope_len / original - (factor - 1), at least 1, the base becomes
    theta * s ** (H / (H - 2)), so frequency i is its unscaled value times s ** (-2 i / (H - 2)):
    up to the original length s is 1 and the result equals the unscaled frequencies exactly.
    """
    if rope.kind != "dynamic":
        raise ValueError(f"wanted rope type 'dynamic', got {rope.kind!r}; call inverse_frequencies")
    factor, original = _known(rope.factor), _known(rope.original_max_position)
    length = jnp.maximum(rope_len, int(original)).astype(jnp.float32)
    stretch = length * (factor / original) - (factor - 1.0)
    # factor * original / original - (factor - 1) may miss 1 by a rounding error
    stretch = jnp.where(rope_len <= int(original), 1.0, stretch)
    exponent = jnp.asarray(-np.arange(0, head_dim, 2) / (head_dim - 2), jnp.float32)
    return jnp.asarray(_unscaled(rope, head_dim))[None, :] * stretch[:, None] ** exponent[None, :]


def _known(value: float | int | None) -> float:
    """A field that the kind always has: RopeConfig.from_hf fills it."""
    assert value is not None
    return float(value)


def _powers(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """theta ** (2 i / H) as float32[H / 2].

    The exponent is rounded to float32 first, as in transformers, and the power is then taken exactly: at
    positions of 100,000 and more the rounding of a frequency is visible in the angle.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(rope.theta, exponent.astype(np.float64)).astype(np.float32)


def _unscaled(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return np.float32(1.0) / _powers(rope, head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor, original = np.float32(_known(rope.factor)), np.float32(_known(rope.original_max_position))
    low, high = np.float32(_known(rope.low_freq_factor)), np.float32(_known(rope.high_freq_factor))
    frequencies = _unscaled(rope, head_dim)
    wavelength = np.float32(2 * math.pi) / frequencies
    is_long, is_short = wavelength > original / low, wavelength < original / high
    scaled = np.where(is_long, frequencies / factor, frequencies)
    if high == low:  # nothing lies between, and the interpolation would divide by zero
        return scaled
    smooth = (original / wavelength - low) / (high - low)
    between = (np.float32(1.0) - smooth) * scaled / factor + smooth * scaled
    return np.where(is_long | is_short, scaled, between)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Frequencies that turn often in the original length are kept, slow ones divided by the factor, with a ramp."""
    powers = _powers(rope, head_dim)
    low, high = _yarn_ramp_bounds(rope, head_dim)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    kept = np.float32(1.0) - ramp.astype(np.float32)
    interpolated = np.float32(1.0) / (np.float32(_known(rope.factor)) * powers)
    return interpolated * (np.float32(1.0) - kept) + (np.float32(1.0) / powers) * kept


def _yarn_ramp_bounds(rope: RopeConfig, head_dim: int) -> tuple[float | int, float | int]:
    """Indices of the frequencies that make beta_fast and beta_slow turns in the original length."""
    original = _known(rope.original_max_position)

    def index_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(_known(rope.beta_fast)), index_of(_known(rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _yarn_attention_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        factor = _known(rope.factor)
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
