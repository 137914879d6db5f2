"""Whether this process may use the tile unit of the processor (Intel AMX)."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

_NEEDED = ("amx_tile", "amx_bf16", "amx_int8", "avx512bw")
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)


@cache
def tile_unit_is_missing() -> str | None:
    """Why not; None: it may. Linux wants a process to ask before any of its threads touches a tile."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it wants Linux on x86-64"
    lacking = [name for name in _NEEDED if name not in _processor_flags()]
    if lacking:
        return f"this processor lacks {', '.join(lacking)}"
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA):
        return "the system does not let this process use the processor's tiles"
    return None


def _processor_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
