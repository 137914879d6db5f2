"""Finds what compiling for an absent GPU needs: JAX's CUDA plugin and ptxas, here or in a folder beside."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxpaged.graphs.errors import CompilerMissing

FOLDER = "gpu-aot"  # in sys.prefix: where wheels may be that this environment itself should not import
NEEDED = ("jax_plugins/xla_cuda13/xla_cuda_plugin.so", "nvidia/cu13/nvvm/libdevice/libdevice.10.bc")
PTXAS = "nvidia/cu13/bin/ptxas"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Where the wheels are."""

    ptxas: Path
    extra_path: Path | None  # to be put on the child's module path; None: the wheels are in this environment

    def environment(self, dump: Path, xla_flags: tuple[str, ...]) -> dict[str, str]:
        """The child's. JAX's and XLA's settings of this process are for this process, and stay out."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "MOSAIC_"))}
        if self.extra_path is not None:
            kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.extra_path), kept.get("PYTHONPATH"))))
        flags = (f"--xla_dump_to={dump}", "--xla_dump_emitter_re=^ptx$", *xla_flags)
        return kept | {
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no driver, no cuDNN
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program read from there dumps nothing
            "XLA_FLAGS": " ".join(flags),
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_TO": str(dump),
        }


def find_toolchain() -> Toolchain:
    """This environment's wheels, or those of its folder gpu-aot. Raises: CompilerMissing."""
    beside = Path(sys.prefix) / FOLDER
    if _complete([beside]):
        return Toolchain(ptxas=beside / PTXAS, extra_path=beside)
    places = [Path(place) for place in _places()]
    if _complete(places):
        return Toolchain(ptxas=_find(PTXAS, places), extra_path=None)
    raise CompilerMissing(
        "compiling for an absent GPU needs JAX's CUDA compiler: pip install 'jaxpaged[gpu-aot]' "
        f"(or those wheels in {beside}, where they do not disturb JAX on a machine without a GPU)"
    )


def _places() -> list[str]:
    """Folders in which this environment has any of the wheels."""
    specs = [find_spec(name) for name in ("jax_plugins", "nvidia")]
    return [str(Path(place).parent) for spec in specs if spec for place in spec.submodule_search_locations or ()]


def _complete(places: list[Path]) -> bool:
    return all(any((place / name).exists() for place in places) for name in (*NEEDED, PTXAS))


def _find(name: str, places: list[Path]) -> Path:
    return next(place / name for place in places if (place / name).exists())
