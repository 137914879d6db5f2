"""What can go wrong when a program is compiled for an absent GPU."""

from __future__ import annotations


class CompilerMissing(ValueError):
    """The compiler's wheels are not installed."""


class CompileError(ValueError):
    """The program does not compile for this GPU: XLA's words, or the last lines of a compiler that crashed."""
