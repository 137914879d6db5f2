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
    _, *parts = _ENTRY.split(text)  # name, what is told of it, name, …; nothing for a module of constants
    return [_kernel(name, told) for name, told in zip(parts[::2], parts[1::2], strict=True)]


def _kernel(name: str, told: str) -> Kernel:
    spills, registers, shared = _SPILLS.search(told), _REGISTERS.search(told), _SHARED.search(told)
    if spills is None or registers is None:
        raise ValueError(f"ptxas -v: wanted registers and spills of {name!r}, got {told!r}")
    return Kernel(
        name=name,
        registers=int(registers[1]),
        spill_stores=int(spills[2]),
        spill_loads=int(spills[3]),
        stack=int(spills[1]),
        static_shared=int(shared[1]) if shared else 0,
    )
