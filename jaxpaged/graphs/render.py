"""Compile reports as Markdown tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence

from jaxpaged.graphs.report import CompileReport, Kernel

_PROGRAM = (
    "program", "arguments", "aliased", "temporaries", "launches", "CUDA graphs", "outside them", "spills", "dot GFLOP",
)  # fmt: skip
_KERNEL = ("program", "kernel", "launches", "grid", "threads", "registers", "spills", "shared")


def program_table(reports: Mapping[str, CompileReport]) -> str:
    """A row per program: memory on each device, how the schedule runs, matrix products."""
    return _table(_PROGRAM, (_program_row(name, report) for name, report in reports.items()))


def kernel_table(reports: Mapping[str, CompileReport], part: str = "") -> str:
    """A row per kernel with `part` in its name; shared memory is static plus dynamic, spills in bytes."""
    rows = (
        _kernel_row(name, report, kernel)
        for name, report in reports.items()
        for kernel in report.kernels
        if part in kernel.name
    )
    return _table(_KERNEL, rows)


def markdown(title: str, reports: Mapping[str, CompileReport]) -> str:
    """A whole page."""
    return (
        f"# {title}\n\nCompiled without the GPU: nothing here was run or timed, and no product was tuned.\n\n"
        f"## Programs\n\n{program_table(reports)}\n\n## Kernels\n\n{kernel_table(reports)}\n"
    )


def to_json(report: CompileReport) -> str:
    """All but the texts of HLO and PTX."""
    fields = dataclasses.asdict(report)
    return json.dumps({name: value for name, value in fields.items() if name not in ("hlo", "ptx")}, indent=1)


def readable(size: int) -> str:
    """Bytes with three digits: 512 B, 32.6 MB, 19.1 GB (powers of 1000)."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.{0 if unit == 'B' or value >= 100 else 1}f} {unit}"


def _program_row(name: str, report: CompileReport) -> Sequence[str]:
    memory = report.memory
    return (
        name,
        readable(memory.arguments),
        readable(memory.aliased),
        readable(memory.temporaries),
        str(sum(bool(launch.grid) for launch in report.launches)),
        str(report.command_buffers),
        str(len(report.outside_command_buffers)),
        readable(sum(kernel.spills for kernel in report.kernels)),
        f"{report.costs.dot_flops / 1e9:.1f}",
    )


def _kernel_row(program: str, report: CompileReport, kernel: Kernel) -> Sequence[str]:
    launches = report.launches_of(kernel)
    first = launches[0] if launches else None  # none: a custom call, whose grid the schedule does not tell
    return (
        program,
        kernel.name,
        str(len(launches)) if first else "custom call",
        " × ".join(map(str, first.grid)) if first else "",
        str(first.threads[0]) if first else "",
        str(kernel.registers),
        str(kernel.spills),
        readable(kernel.static_shared + (first.dynamic_shared if first else 0)),
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
