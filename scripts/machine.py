"""What machine this is and what it can do: processor, memory, float32 GEMM rate, memory bandwidth.

python -m scripts.machine
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_GEMM_SIZE = 2048  # 3 x 16 MiB: more than the caches of a core, arithmetic enough to hide it
_READ_BYTES = 1 << 30  # more than the last-level cache of large servers
_SECONDS = 2.0  # of each probe; the best repetition counts


def describe_machine(threads: int) -> dict[str, Any]:
    """Processor, cores used, memory in GiB, operating system, Python."""
    cpu = _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    flags = (_first_value(Path("/proc/cpuinfo"), "flags") or "").split()
    memory = _first_value(Path("/proc/meminfo"), "MemTotal") or "0 kB"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads_used": threads,
        "vector_units": [
            flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile") if flag in flags
        ],
        "memory_gib": round(int(memory.split()[0]) / (1 << 20), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _first_value(path: Path, key: str) -> str | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def probe(threads: int) -> dict[str, float]:
    """Best float32 GEMM rate in GFLOP/s and best rate of reading memory in GB/s that numpy reaches.

    Measured in a process of its own, since numpy's BLAS sizes its pool when it is loaded.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment |= {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    return {name: printed[name] for name in ("gemm_gflops", "read_gbps")}


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def _gemm_gflops() -> float:
    rng = np.random.default_rng(0)
    left, right = (rng.random((_GEMM_SIZE, _GEMM_SIZE), dtype=np.float32) for _ in range(2))
    out = np.empty_like(left)
    return 2 * _GEMM_SIZE**3 / _best_seconds(lambda: np.matmul(left, right, out=out)) / 1e9


def _read_gbps(threads: int) -> float:
    data = np.ones(_READ_BYTES // 4, np.float32)
    parts = np.array_split(data, threads)

    def read() -> None:
        # max() is vectorised and releases the interpreter's lock, so the parts are read at the same time.
        workers = [threading.Thread(target=part.max) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return data.nbytes / _best_seconds(read) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    measured = {"gemm_gflops": _gemm_gflops(), "read_gbps": _read_gbps(threads)}
    print(json.dumps({**describe_machine(threads), **measured}, indent=1))


if __name__ == "__main__":
    main()
