"""Products with float32 weights on this machine's CPU, by implementation, in turns.

    python -m scripts.bench_matmul --rows 16 64 512 --implementations xla numba amx

Each call goes through several weights one after the other, as the layers of a model do, so that none stays in a cache.
Prints the median and the best time of a product in ms, and the best one's rate in GFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jaxpaged.pallas_kernels import dense_matmul
from scripts.machine import describe_machine

_WEIGHTS = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # [out, in] of SmolLM2-135M's layers


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 512])
    parser.add_argument("--implementations", nargs="+", default=["xla", "numba", "amx"])
    parser.add_argument("--layers", type=int, default=12, help="weights of each shape")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(json.dumps(describe_machine(len(jax.devices()))))
    print("| rows | weight | " + " | ".join(options.implementations) + " |")
    print("|---|---|" + "---|" * len(options.implementations))
    for rows in options.rows:
        for shape in _WEIGHTS:
            times = measure(options, rows, shape)
            cells = [cell(times[name], 2 * rows * shape[0] * shape[1]) for name in options.implementations]
            print(f"| {rows} | {shape[0]} × {shape[1]} | " + " | ".join(cells) + " |", flush=True)


def measure(options: argparse.Namespace, rows: int, shape: tuple[int, int]) -> dict[str, list[float]]:
    """Seconds of a product in each repeat, by implementation."""
    rng = np.random.default_rng(0)
    weights = [jax.device_put(rng.standard_normal(shape, np.float32)) for _ in range(options.layers)]
    x = jax.device_put(rng.standard_normal((rows, shape[1]), np.float32))
    calls = {name: compiled(name, x, weights) for name in options.implementations}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began) / options.layers)
    return times


def compiled(name: str, x: jax.Array, weights: list[jax.Array]) -> Callable[[], object]:
    """A call that computes all the products and waits for them; it has run once."""
    product = partial(dense_matmul, implementation=name)
    program = jax.jit(lambda x, weights: [product(x, w) for w in weights]).lower(x, weights).compile()

    def call() -> object:
        return jax.block_until_ready(program(x, weights))

    call()
    return call


def cell(times: list[float], flops: int) -> str:
    """Median and best in ms, and the best one's rate."""
    return f"{1e3 * statistics.median(times):.2f}, {1e3 * min(times):.2f} ({flops / min(times) / 1e9:.0f})"


if __name__ == "__main__":
    main()
