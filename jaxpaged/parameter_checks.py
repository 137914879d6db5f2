"""Checks of single parameter values: each returns the value in its stored form, or raises ValueError naming it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real


def integer(name: str, value: object, low: int, high: int | None) -> int:
    """`value` as int if it is an integer (numpy's included, bool not) in [low, high]."""
    limits = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def real(name: str, value: object, low: float, high: float, *, low_excluded: bool = False) -> float:
    """`value` as float if it is a finite real number in [low, high], or in (low, high]."""
    opening = "(" if low_excluded else "["
    limits = f"a number in {opening}{low:g}, {high:g}]"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    number = float(value)
    inside = low < number <= high if low_excluded else low <= number <= high
    if not math.isfinite(number) or not inside:
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def flag(name: str, value: object) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def optional[Stored](
    check: Callable[..., Stored], name: str, value: object, *limits: object, **options: object
) -> Stored | None:
    """None as it is, anything else as the check stores it."""
    return None if value is None else check(name, value, *limits, **options)


def count_of_logprobs(name: str, value: object) -> int | None:
    """How many log-probabilities: None for none, -1 for the whole vocabulary; True is 1, False None."""
    if isinstance(value, bool):
        return 1 if value else None
    return None if value is None else integer(name, value, -1, None)


def strings(name: str, value: object, *, single: bool) -> tuple[str, ...]:
    """Non-empty strings as a tuple; None is none of them. single: one may be given bare."""
    given = (value,) if single and isinstance(value, str) else value if value is not None else ()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        wanted = "a string or a sequence of strings" if single else "a sequence of strings"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    for string in given:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} must hold non-empty strings, got {string!r}; leave it out for none")
    return tuple(given)


def token_ids(name: str, value: object, *, most: int | None = None, empty: bool = True) -> tuple[int, ...]:
    """Token ids as a tuple. most: how many there may be; empty: whether there may be none."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{name} must be a sequence of token ids, got {value!r}")
    if not empty and not value:
        raise ValueError(f"{name} must hold at least one token id, got {value!r}; leave it out for no limit")
    if most is not None and len(value) > most:
        raise ValueError(f"{name} must hold at most {most} token ids, got {len(value)}")
    return tuple(integer(name, token_id, 0, None) for token_id in value)


def biases(name: str, value: object, *, largest: float, most: int) -> tuple[tuple[int, float], ...]:
    """{token id: bias}, or its stored form, as pairs; a bias beyond +-largest is stored as +-largest."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes) or not isinstance(value, Mapping | Sequence):
        raise ValueError(f"{name} must be a mapping from token ids to numbers, got {value!r}")
    if len(value) > most:
        raise ValueError(f"{name} must name at most {most} token ids, got {len(value)}")
    stored: dict[int, float] = {}
    for pair in pairs:  # type: ignore[union-attr]
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"{name} must be a mapping from token ids to numbers, got {value!r}")
        bias = pair[1]
        if not isinstance(bias, Real) or isinstance(bias, bool) or math.isnan(float(bias)):
            raise ValueError(f"{name} must map token ids to numbers, got {bias!r}")
        stored[integer(name, pair[0], 0, None)] = min(max(float(bias), -largest), largest)
    return tuple(stored.items())
