"""Settings of the rotary position embedding, read from a Hugging Face config."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

logger = logging.getLogger(__name__)

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DEFAULT_THETA = 10_000.0  # what transformers assumes when a config names no rope_theta

_COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """What determines the rotary frequencies. Fields that a kind does not use are None.

    original_max_position is the context length before scaling: for "dynamic" it is the config's
    max_position_embeddings, as in transformers. attention_factor, mscale and mscale_all_dim are as written
    in the config; jaxpaged.models.rope turns them into the scale of cos and sin.
    """

    kind: RopeKind
    theta: float
    factor: float | None
    original_max_position: int | None
    low_freq_factor: float | None
    high_freq_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, head_dim: int, max_position: int) -> RopeConfig:
        """Read rope_scaling or rope_parameters (both spellings of the type, flat or nested by layer type).

        Raises ValueError for an unknown type, a missing or impossible value, or rotation of a part of the head.
        """
        section = _section(config)
        kind = _kind(section)
        _refuse_partial_rotation(config, section)
        unused = sorted(set(section) - _COMMON_KEYS - _KEYS[kind])
        if unused:
            logger.warning("rope type %r does not use these settings, ignored: %s", kind, ", ".join(unused))
        reader = _Reader(kind, section)
        theta = reader.optional("rope_theta") or _top_level_theta(config)
        _check_dimension(kind, theta, head_dim)
        original = _original_max_position(kind, config, reader, max_position)
        return cls(
            kind=kind,
            theta=theta,
            factor=_factor(kind, reader, original, max_position),
            original_max_position=original,
            low_freq_factor=reader.required("low_freq_factor") if kind == "llama3" else None,
            high_freq_factor=reader.required("high_freq_factor") if kind == "llama3" else None,
            # `or`: transformers takes 0 and null alike as "not given" here
            beta_fast=(reader.optional("beta_fast") or 32.0) if kind == "yarn" else None,
            beta_slow=(reader.optional("beta_slow") or 1.0) if kind == "yarn" else None,
            attention_factor=reader.optional("attention_factor") if kind == "yarn" else None,
            mscale=reader.optional("mscale") if kind == "yarn" else None,
            mscale_all_dim=reader.optional("mscale_all_dim") if kind == "yarn" else None,
            truncate=bool(section.get("truncate", True)) if kind == "yarn" else None,
        )

    def context_length(self, max_position: int) -> int:
        """Longest sequence the scaled embedding is meant for, in tokens, given max_position_embeddings.

        linear and dynamic stretch max_position_embeddings by the factor, yarn the original length;
        a llama3 config already states the stretched length.
        """
        if self.kind in ("default", "llama3"):
            return max_position
        assert self.factor is not None
        base = self.original_max_position if self.kind == "yarn" else max_position
        assert base is not None
        return int(base * self.factor)


@dataclass(frozen=True)
class _Reader:
    """Numbers of one rope section; null and absent are the same."""

    kind: str
    section: Mapping[str, Any]

    def optional(self, key: str) -> float | None:
        value = self.section.get(key)
        return None if value is None else positive_number(f"rope {self.kind!r}: {key}", value)

    def required(self, key: str) -> float:
        value = self.optional(key)
        if value is None:
            raise ValueError(f"rope type {self.kind!r} needs {key}, got {sorted(self.section)}; add it to the config")
        return value


def positive_number(what: str, value: object) -> float:
    """The value as a float; ValueError naming it unless it is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{what} must be a number that is not negative, got {value!r}")
    return float(value)


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope settings as one flat mapping; rope_scaling wins over rope_parameters, as in transformers."""
    section = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"rope_scaling / rope_parameters must be an object, got {section!r}")
    per_layer = {key: value for key, value in section.items() if isinstance(value, Mapping)}
    if not per_layer:
        return section
    first = next(iter(per_layer.values()))
    if any(value != first for value in per_layer.values()):
        raise ValueError(
            f"rope settings that differ by layer type ({', '.join(per_layer)}) are not supported; "
            "use a checkpoint with one setting for all layers"
        )
    return first


def _kind(section: Mapping[str, Any]) -> RopeKind:
    """The rope type: newer configs spell it rope_type, older ones type."""
    name = section.get("rope_type") or section.get("type") or "default"
    for kind in get_args(RopeKind):
        if name == kind:
            return kind
    raise ValueError(f"unknown rope type {name!r}; supported: {', '.join(get_args(RopeKind))}")


def _top_level_theta(config: Mapping[str, Any]) -> float:
    theta = config.get("rope_theta")
    return DEFAULT_THETA if theta is None else positive_number("rope_theta", theta)


def _refuse_partial_rotation(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    for where in (section, config):
        part = where.get("partial_rotary_factor")
        if part is not None and part != 1.0:
            raise ValueError(f"partial_rotary_factor must be 1 (the whole head rotates), got {part!r}: not supported")


def _check_dimension(kind: RopeKind, theta: float, head_dim: int) -> None:
    if theta <= 1.0:
        raise ValueError(f"rope_theta must be above 1, got {theta}")
    if head_dim % 2 or head_dim < 2:
        raise ValueError(f"rotary embeddings need an even head_dim, got {head_dim}")
    if kind == "dynamic" and head_dim == 2:
        raise ValueError("rope type 'dynamic' needs head_dim above 2: its exponent is head_dim / (head_dim - 2)")


def _original_max_position(kind: RopeKind, config: Mapping[str, Any], reader: _Reader, max_position: int) -> int | None:
    """Context length before scaling. llama3 and yarn: a value outside the rope section wins over one inside."""
    if kind in ("default", "linear"):
        return None
    if kind == "dynamic":
        return max_position
    outside = config.get("original_max_position_embeddings")
    if outside is not None:
        return int(positive_number("original_max_position_embeddings", outside)) or max_position
    return int(reader.optional("original_max_position_embeddings") or max_position)


def _factor(kind: RopeKind, reader: _Reader, original: int | None, max_position: int) -> float | None:
    """The scaling factor. yarn with a null factor: the ratio of the two lengths, as in transformers."""
    if kind == "default":
        return None
    if kind == "yarn" and "factor" in reader.section and reader.section["factor"] is None:
        assert original is not None
        return max_position / original
    factor = reader.required("factor")
    if factor == 0.0:
        raise ValueError(f"rope type {kind!r}: factor must be above 0, got {factor}")
    return factor
