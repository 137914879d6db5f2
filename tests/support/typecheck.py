"""The run-time type checker that tests/conftest.py puts on every function of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception

# What callers give arrives here and is checked here, with errors that say more; tests give wrong things on purpose.
ENTRANCES = ("jaxpaged", "jaxpaged.async_llm", "jaxpaged.config", "jaxpaged.intake", "jaxpaged.llm", "jaxpaged.prompts")


def check_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, except at the entrances and on methods annotated with typing.Self, whose class is not known here."""
    if function.__module__ in ENTRANCES:
        return function
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
