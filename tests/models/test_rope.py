"""Rotary frequencies equal transformers', for every scaling and every spelling of it in a config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models.rope import dynamic_inverse_frequencies, inverse_frequencies
from jaxpaged.models.rope_config import RopeConfig

GOLDENS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "goldens" / "rope.json").read_text())


def read(config: dict[str, Any]) -> RopeConfig:
    return RopeConfig.from_hf(config, head_dim=config["head_dim"], max_position=config["max_position_embeddings"])


def rope_config(**section: Any) -> RopeConfig:
    return RopeConfig.from_hf({"rope_scaling": section}, head_dim=16, max_position=32)


@pytest.mark.parametrize("name", GOLDENS["static"])
def test_frequencies_equal_transformers(name: str) -> None:
    """One spelling of the rope type was not understood, or theta was dropped: short prompts hid it."""
    golden = GOLDENS["static"][name]
    frequencies, scale = inverse_frequencies(read(golden["config"]), golden["config"]["head_dim"])
    assert frequencies.dtype == np.float32
    # one or two units in the last place: at position 100,000 that is an angle of 0.02
    np.testing.assert_allclose(frequencies, np.float32(golden["inv_freq"]), rtol=2.5e-7, atol=0)
    assert scale == pytest.approx(golden["scale"], rel=1e-7)


@pytest.mark.parametrize("name", GOLDENS["dynamic"])
def test_dynamic_frequencies_equal_transformers(name: str) -> None:
    """Each length gets its own frequencies, in one call over tokens of different sequences."""
    golden = GOLDENS["dynamic"][name]
    lengths = jnp.asarray(golden["lengths"], jnp.int32)
    frequencies = dynamic_inverse_frequencies(read(golden["config"]), golden["config"]["head_dim"], lengths)
    assert frequencies.dtype == jnp.float32
    np.testing.assert_allclose(frequencies, np.float32(golden["inv_freq"]), rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", GOLDENS["dynamic"])
def test_dynamic_frequencies_of_generated_tokens(name: str) -> None:
    """On a cache transformers rotates each new token with the length reached so far: position + 1."""
    golden = GOLDENS["dynamic"][name]
    rope_len = jnp.arange(31, 41, dtype=jnp.int32)  # the prompt has 30 tokens, so position + 1 is the larger
    frequencies = dynamic_inverse_frequencies(read(golden["config"]), golden["config"]["head_dim"], rope_len)
    np.testing.assert_allclose(frequencies, np.float32(golden["on_a_cache"]), rtol=2e-6, atol=0)


def test_dynamic_equals_unscaled_up_to_the_original_length() -> None:
    dynamic = dynamic_inverse_frequencies(rope_config(type="dynamic", factor=3.3), 16, jnp.asarray([1, 32], jnp.int32))
    unscaled, _ = inverse_frequencies(rope_config(), 16)
    np.testing.assert_array_equal(dynamic, np.stack([unscaled, unscaled]))


def test_the_wrong_function_for_the_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="dynamic_inverse_frequencies"):
        inverse_frequencies(rope_config(type="dynamic", factor=2.0), 16)
    with pytest.raises(ValueError, match="wanted rope type 'dynamic', got 'default'"):
        dynamic_inverse_frequencies(rope_config(), 16, jnp.asarray([1], jnp.int32))


def test_llama3_without_a_medium_band() -> None:
    """Equal low and high factors divided by zero in the interpolation between the bands."""
    rope = rope_config(
        rope_type="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=2.0, original_max_position_embeddings=32
    )
    frequencies, _ = inverse_frequencies(rope, 16)
    unscaled, _ = inverse_frequencies(rope_config(), 16)
    expected = np.where(2 * math.pi / unscaled > 16, unscaled / 8, unscaled)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["bogus", "longrope", "su", "Linear"])
def test_unknown_type_is_an_error(spelling: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown rope type {name!r}; supported: default, linear"):
        rope_config(**{spelling: name, "factor": 2.0})


def test_rope_type_wins_over_type_and_rope_scaling_over_rope_parameters() -> None:
    assert rope_config(type="linear", rope_type="dynamic", factor=2.0).kind == "dynamic"
    both = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0},
        "rope_theta": 500.0,
    }
    rope = RopeConfig.from_hf(both, head_dim=16, max_position=32)
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 500.0)


def test_settings_nested_by_layer_type() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    same = {"rope_parameters": {"full_attention": linear, "sliding_attention": dict(linear)}}
    assert RopeConfig.from_hf(same, head_dim=16, max_position=32).theta == 500.0
    different = {"rope_parameters": {"full_attention": linear, "sliding_attention": {"rope_type": "default"}}}
    with pytest.raises(ValueError, match="differ by layer type"):
        RopeConfig.from_hf(different, head_dim=16, max_position=32)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "linear"}, "'linear' needs factor"),
        ({"type": "linear", "factor": "4"}, "factor must be a number"),
        ({"type": "linear", "factor": True}, "factor must be a number"),
        ({"type": "linear", "factor": float("nan")}, "factor must be a number"),
        ({"type": "linear", "factor": -2.0}, "factor must be a number"),
        ({"type": "dynamic", "factor": 0.0}, "factor must be above 0"),
        ({"type": "yarn"}, "'yarn' needs factor"),
        ({"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "'llama3' needs low_freq_factor"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
    ],
)
def test_impossible_settings_are_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_config(**section)


def test_impossible_dimensions() -> None:
    with pytest.raises(ValueError, match="even head_dim, got 15"):
        RopeConfig.from_hf({}, head_dim=15, max_position=32)
    with pytest.raises(ValueError, match="head_dim above 2"):
        RopeConfig.from_hf({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, head_dim=2, max_position=32)
    with pytest.raises(ValueError, match="must be an object"):
        RopeConfig.from_hf({"rope_scaling": "linear"}, head_dim=16, max_position=32)


def test_settings_of_another_type_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rope_config(type="linear", factor=2.0, beta_fast=8)
    assert "beta_fast" in caplog.text


@pytest.mark.parametrize(
    ("section", "length"),
    [
        ({}, 32),
        ({"type": "linear", "factor": 4.0}, 128),
        ({"type": "dynamic", "factor": 2.5}, 80),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "factor": 4.0}, 128),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 32),
    ],
)
def test_context_length(section: dict[str, Any], length: int) -> None:
    """The position table was sized for the unscaled length, so long prompts ran past its end."""
    assert rope_config(**section).context_length(32) == length
