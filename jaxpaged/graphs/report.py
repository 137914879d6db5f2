"""What a compilation for an absent GPU tells: frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel as ptxas assembled it. Sizes in bytes."""

    name: str
    registers: int  # per thread
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int

    @property
    def spills(self) -> int:
        """Bytes that did not fit into registers, stored and loaded."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One entry of the program's schedule: a kernel, a copy, a library call, a loop driven by the host …"""

    kind: str  # XLA's thunk kind, such as kCustomKernel
    name: str  # the kernel's, where it is one; else XLA's text
    depth: int  # of nesting in loops and command buffers
    grid: tuple[int, ...]  # () where it is no kernel
    threads: tuple[int, ...]
    dynamic_shared: int  # bytes
    command_buffer: int | None  # which CUDA graph it is recorded in; None: launched one by one


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device. Outputs include those that alias an argument."""

    arguments: int
    outputs: int
    aliased: int  # outputs written into donated arguments
    temporaries: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Counted from the traced program, whole mesh, before any optimisation; see jaxpaged.graphs.costs."""

    dot_flops: int  # multiplications and additions of matrix products
    argument_bytes: int
    output_bytes: int
    open_loops: int  # loops whose length is data: their bodies are counted once


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """One program, compiled for a GPU that is not there."""

    target: str
    devices: int
    hlo: str  # optimized and scheduled
    ptx: tuple[str, ...]  # modules
    kernels: tuple[Kernel, ...]  # each once, by name
    launches: tuple[Launch, ...]  # in the schedule's order
    memory: Memory
    costs: Costs
    seconds: float  # of compilation

    @property
    def command_buffers(self) -> int:
        """How many CUDA graphs the program is recorded in."""
        return sum(launch.kind == "kCommandBuffer" for launch in self.launches)

    @property
    def outside_command_buffers(self) -> tuple[Launch, ...]:
        """What is launched one by one. Empty, with command_buffers 1: the whole program is one CUDA graph."""
        return tuple(e for e in self.launches if e.command_buffer is None and e.kind != "kCommandBuffer")

    def kernels_named(self, part: str) -> tuple[Kernel, ...]:
        """Kernels with this in their name. Raises: ValueError when there is none."""
        found = tuple(kernel for kernel in self.kernels if part in kernel.name)
        if not found:
            raise ValueError(f"kernels: wanted one named like {part!r}, got {[kernel.name for kernel in self.kernels]}")
        return found

    def launches_of(self, kernel: Kernel) -> tuple[Launch, ...]:
        """Where the schedule runs it."""
        return tuple(launch for launch in self.launches if launch.grid and launch.name == kernel.name)
