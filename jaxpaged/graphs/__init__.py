"""Compiling for GPUs that are not there: HLO, PTX, registers, spills, shared memory, CUDA graphs, memory."""

from jaxpaged.graphs.errors import CompileError, CompilerMissing
from jaxpaged.graphs.report import CompileReport, Costs, Kernel, Launch, Memory
from jaxpaged.graphs.serving import ServingPrograms, serving_programs
from jaxpaged.graphs.specs import GPUS, GpuSpec
from jaxpaged.graphs.target import Target, target

__all__ = [
    "GPUS",
    "CompileError",
    "CompileReport",
    "CompilerMissing",
    "Costs",
    "GpuSpec",
    "Kernel",
    "Launch",
    "Memory",
    "ServingPrograms",
    "Target",
    "serving_programs",
    "target",
]
