"""What tests look for in programs compiled for GPUs that are absent."""

from __future__ import annotations

import re

from jaxpaged.graphs import CompileReport, Target, target
from tests.support.absent_gpu import require_compiler

MAX_SHARED = {"a100": 163 << 10, "h200": 227 << 10, "b200": 227 << 10}  # bytes that one kernel may use


def absent_gpu(name: str) -> Target:
    """The GPU, or a skipped test that names what to install."""
    require_compiler()
    return target(name)


def results_of_entry(report: CompileReport) -> list[tuple[str, int, str]]:
    """(dtype, elements, operation) of what the program's top level makes: what lies in memory, not in registers.

    Bitcasts are left out: they are other names for the same memory.
    """
    entry = report.hlo[report.hlo.index("\nENTRY ") :]
    found = []
    for dtype, shape, operation in re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* ([\w-]+)\(", entry):
        elements = 1
        for size in filter(None, shape.split(",")):
            elements *= int(size)
        if operation != "bitcast":
            found.append((dtype, elements, operation))
    return found


def count_instructions(report: CompileReport, *names: str) -> int:
    """How often the PTX has any of these."""
    return sum(module.count(name) for module in report.ptx for name in names)
