"""A GPU that is not there, and compiling for it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src.mesh import AbstractDevice  # the one way to tell Pallas which GPU it lowers for
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpaged.graphs import child
from jaxpaged.graphs.assembler import assemble
from jaxpaged.graphs.costs import count_costs
from jaxpaged.graphs.errors import CompileError
from jaxpaged.graphs.report import CompileReport, Costs, Memory
from jaxpaged.graphs.specs import GPUS, GpuSpec
from jaxpaged.graphs.thunks import parse_thunks
from jaxpaged.graphs.toolchain import Toolchain, find_toolchain
from jaxpaged.sharding.mesh import MODEL_AXIS

LAST_LINES = 20  # of a child that crashed
STACK_TRACE = re.compile(r"\n[^\n]*\*\*\* (?:Begin|Check failure) stack trace")
TRITON_WARNING = "The Pallas Triton backend is deprecated"
# Custom calls that jax.export does not vouch for between versions; both sides are the same version here.
KERNEL_CALLS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "mosaic_gpu")


def target(name: str, *, devices: int = 1) -> Target:
    """The GPU of this name, or `devices` of them along one mesh axis. Raises: ValueError for an unknown name."""
    if name not in GPUS:
        raise ValueError(f"GPU: wanted one of {sorted(GPUS)}, got {name!r}")
    if devices < 1:
        raise ValueError(f"devices: wanted 1 or more, got {devices}")
    return Target(name=name, devices=devices)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU or several equal ones; made by `target`."""

    name: str
    devices: int

    @property
    def spec(self) -> GpuSpec:
        """Its data sheet."""
        return GPUS[self.name]

    @property
    def mesh(self) -> AbstractMesh:
        """The devices along the axis "model", as shapes alone: for shardings and shard_map."""
        gpu = AbstractDevice(device_kind=self.spec.device_kind, num_cores=self.spec.num_cores, platform="gpu")
        return AbstractMesh((self.devices,), (MODEL_AXIS,), (AxisType.Auto,), abstract_device=gpu)

    def abstract(self, shape: Sequence[int], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        """An argument of this shape, its dimensions split along these mesh axes: none, on every device whole."""
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, PartitionSpec(*axes)))

    def compile(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        donate_argnums: tuple[int, ...] = (),
        static_argnums: tuple[int, ...] = (),
        out_shardings: Any = None,
        xla_flags: tuple[str, ...] = (),
        timeout: float = 600.0,
        dump: Path | None = None,
    ) -> CompileReport:
        """Compile function(*arguments) for this GPU, in a process of its own; arguments are abstract or real arrays.

        The function is lowered here, closures and all, so it may be any that jax.jit takes; what the child gets is
        the exported module. Arguments without a sharding are whole on every device. With `dump` the child's folder
        is kept there: the program, XLA's dumps, PTX.

        Raises: CompilerMissing without the wheels; CompileError when XLA refuses the program, the compiler crashes,
        or it takes more than `timeout` seconds.
        """
        tools = find_toolchain()
        keywords = {} if out_shardings is None else {"out_shardings": out_shardings}
        jitted = jax.jit(function, donate_argnums=donate_argnums, static_argnums=static_argnums, **keywords)
        with jax.sharding.use_abstract_mesh(self.mesh), warnings.catch_warnings():
            warnings.filterwarnings("ignore", TRITON_WARNING, DeprecationWarning)  # it comes when a kernel is lowered
            program = _flat(jax.export.export(jitted, platforms=["cuda"], disabled_checks=_unchecked())(*arguments))
            costs = count_costs(jitted.trace(*arguments).jaxpr, program.module_kept_var_idx)
        donated = _donated(arguments, donate_argnums, static_argnums)
        if dump is not None:
            return self._compile(tools, program, donated, costs, xla_flags, timeout, dump)
        with tempfile.TemporaryDirectory(prefix="jaxpaged-graphs-") as folder:
            return self._compile(tools, program, donated, costs, xla_flags, timeout, Path(folder))

    def _compile(
        self,
        tools: Toolchain,
        program: jax.export.Exported,
        donated: list[int],
        costs: Costs,
        xla_flags: tuple[str, ...],
        timeout: float,
        folder: Path,
    ) -> CompileReport:
        dumps = folder / "xla"
        dumps.mkdir(parents=True, exist_ok=True)
        job = {"target": self.spec.text_proto(), "devices": self.devices, "axis": MODEL_AXIS, "donated": donated}
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        (folder / "program.bin").write_bytes(program.serialize())
        result = self._run(tools, folder, dumps, xla_flags, timeout)
        modules = sorted(dumps.glob("*.ptx"))
        return CompileReport(
            target=self.name,
            devices=self.devices,
            hlo=(folder / "optimized_hlo.txt").read_text("utf-8"),
            ptx=tuple(path.read_text("utf-8") for path in modules),
            kernels=assemble(tools.ptxas, modules, self.spec.architecture),
            launches=parse_thunks(_schedule(dumps)),
            memory=Memory(**result["memory"]),
            costs=costs,
            seconds=result["seconds"],
        )

    def _run(
        self, tools: Toolchain, folder: Path, dumps: Path, xla_flags: tuple[str, ...], timeout: float
    ) -> dict[str, Any]:
        """Run the child and return what it left. Raises: CompileError."""
        log = folder / "log.txt"
        command = [sys.executable, "-P", child.__file__, str(folder)]
        with log.open("wb") as out:
            try:
                done = subprocess.run(
                    command,
                    env=tools.environment(dumps, xla_flags),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise CompileError(
                    f"compiling for {self.name} took more than {timeout} s; give a longer timeout"
                ) from error
        result_file = folder / "result.json"
        if done.returncode or not result_file.exists():
            raise CompileError(
                f"the compiler for {self.name} crashed (exit code {done.returncode}); its last lines:\n"
                + _last_words(log.read_text("utf-8", errors="replace"))
            )
        result = json.loads(result_file.read_text("utf-8"))
        if "error" in result:
            raise CompileError(f"does not compile for {self.name}: {result['error']}")
        return result


def _last_words(log: str) -> str:
    """The last lines before the list of the compiler's own functions."""
    return "\n".join(list(filter(str.strip, STACK_TRACE.split(log)[0].splitlines()))[-LAST_LINES:])


def _unchecked() -> list[jax.export.DisabledSafetyCheck]:
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]


def _flat(program: jax.export.Exported) -> jax.export.Exported:
    """The same program from leaves to a tuple of leaves: the child need not know what trees they come from."""
    return dataclasses.replace(
        program,
        in_tree=jax.tree.structure(((0,) * len(program.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(program.out_avals)),
    )


def _donated(arguments: Sequence[Any], donated: Sequence[int], static: Sequence[int]) -> list[int]:
    """Flat positions, among the leaves of the arguments that are not static, of what the donated arguments hold."""
    flat: list[int] = []
    start = 0
    for position, argument in enumerate(arguments):
        if position in static:
            continue
        end = start + len(jax.tree.leaves(argument))
        flat += range(start, end) if position in donated else ()
        start = end
    return flat


def _schedule(dumps: Path) -> str:
    """The program's schedule, after XLA has put it into command buffers where it did."""
    for pattern in ("*.thunk_sequence_after_thunk_passes.txt", "*.thunk_sequence.txt"):
        for path in sorted(dumps.glob(pattern)):
            return path.read_text("utf-8")
    return ""
