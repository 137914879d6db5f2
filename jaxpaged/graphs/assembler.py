"""ptxas: registers, spills and static shared memory of the kernels of a PTX module."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jaxpaged.graphs.report import Kernel

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def assemble(ptxas: Path, ptx: Sequence[Path], architecture: str) -> tuple[Kernel, ...]:
    """The kernels of these files. Raises: ValueError with ptxas' words when it refuses one."""
    kernels: dict[str, Kernel] = {}
    for path in ptx:
        done = subprocess.run(
            [str(ptxas), "-v", f"-arch={architecture}", str(path), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(f"ptxas refused {path.name} for {architecture}: {done.stderr.strip()}")
        kernels |= {kernel.name: kernel for kernel in parse_verbose(done.stderr)}
    return tuple(kernels[name] for name in sorted(kernels))


def parse_verbose(text: str) -> list[Kernel]:
    """What `ptxas -v` prints, which names an entry function and then tells of it."""
    starts = list(_ENTRY.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [_kernel(match[1], text[match.end() : end]) for match, end in zip(starts, ends, strict=True)]


def _kernel(name: str, told: str) -> Kernel:
    stack, stores, loads = (_SPILLS.search(told) or re.match(r"()()()", "")).groups()
    shared = _SHARED.search(told)
    registers = _REGISTERS.search(told)
    return Kernel(
        name=name,
        registers=int(registers[1]) if registers else 0,
        spill_stores=int(stores or 0),
        spill_loads=int(loads or 0),
        stack=int(stack or 0),
        static_shared=int(shared[1]) if shared else 0,
    )
