"""Compiling for GPUs that are not there, in tests: skipped where the compiler is not installed."""

from __future__ import annotations

import re

import pytest

from jaxpaged.graphs import CompileReport, CompilerMissing, Target, target
from jaxpaged.graphs.toolchain import find_toolchain

MAX_SHARED = {"a100": 163 << 10, "h200": 227 << 10, "b200": 227 << 10}  # bytes that one kernel may use


def absent_gpu(name: str) -> Target:
    """The GPU, or a skipped test that names what to install."""
    try:
        find_toolchain()
    except CompilerMissing as error:
        pytest.skip(str(error))
    return target(name)


def results_of_entry(report: CompileReport) -> list[tuple[str, int, str]]:
    """(dtype, elements, operation) of what the program's top level makes: what lies in memory, not in registers."""
    entry = report.hlo[report.hlo.index("\nENTRY ") :]
    found = []
    for dtype, shape, operation in re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* ([\w-]+)\(", entry):
        elements = 1
        for size in filter(None, shape.split(",")):
            elements *= int(size)
        found.append((dtype, elements, operation))
    return found


def count_instructions(report: CompileReport, *names: str) -> int:
    """How often the PTX has any of these."""
    return sum(module.count(name) for module in report.ptx for name in names)
