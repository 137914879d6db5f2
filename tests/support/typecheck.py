"""The run-time type checker that tests/conftest.py puts on every function of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception


def check_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, except that a method annotated with typing.Self goes unchecked: its class is not known here."""
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
