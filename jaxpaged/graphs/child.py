"""Compiles one exported program for an absent GPU: run as a process of its own, which a bad kernel may abort.

usage: child.py FOLDER, which holds job.json and program.bin; leaves there result.json, optimized_hlo.txt, XLA's dumps.
Imports nothing of jaxpaged, so that any environment with jax and its CUDA plugin can run it.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

STACK_BYTES = 64 << 20  # XLA's passes recurse deeply on unrolled models


def compile_program(folder: Path) -> None:
    """The whole job; an exception is left in result.json as its text."""
    job = json.loads((folder / "job.json").read_text("utf-8"))
    try:
        result = _compile(folder, job)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.json").write_text(json.dumps(result), "utf-8")


def _compile(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    packed = (folder / "program.bin").read_bytes()
    if b"mosaic_gpu" in packed:
        importlib.import_module("jax.experimental.mosaic.gpu")  # tells the compiler where Mosaic's runtime library is
    devices = job["devices"]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=job["target"], topology=f"1x1x{devices}"
    )
    mesh = topologies.make_mesh(topology, (devices,), (job["axis"],))
    program = jax.export.deserialize(bytearray(packed))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or whole)
        for aval, sharding in zip(program.in_avals, program.in_shardings_jax(mesh), strict=True)
    ]
    kept = program.module_kept_var_idx  # the others are used by nothing, so they are not to be arguments

    def call(*used):
        filled = {i: jnp.zeros(argument.shape, argument.dtype) for i, argument in enumerate(arguments) if i not in kept}
        filled |= dict(zip(kept, used, strict=True))
        return program.call(*(filled[i] for i in range(len(arguments))))

    donated = tuple(position for position, i in enumerate(kept) if i in job["donated"])
    lowered = jax.jit(call, donate_argnums=donated).lower(*(arguments[i] for i in kept))
    begun = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begun
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "a compiled program has both"
    (folder / "optimized_hlo.txt").write_text(text, "utf-8")
    return {
        "seconds": seconds,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        },
    }


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=compile_program, args=(Path(sys.argv[1]),))
    worker.start()
    worker.join()
