"""What the device can do at best: copying, reading, multiplying. Everything else is given as a share of these."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scripts.gpu_check.context import Context, timed, waves


def run(context: Context) -> None:
    sizes = context.sizes
    data = waves((sizes.copy_bytes // 2,), jnp.bfloat16)
    size = sizes.matmul_size
    left, right = (waves((size, size), jnp.bfloat16) for _ in range(2))

    def read(total: jax.Array, data: jax.Array) -> jax.Array:
        data, total = jax.lax.optimization_barrier((data, total))  # read again in each step
        return total + data.max()

    probes = {
        "copy_bytes_per_second": (2 * data.nbytes, lambda x: x + 1, data, ()),
        "read_bytes_per_second": (data.nbytes, read, jnp.zeros((), jnp.bfloat16), (data,)),
        "matmul_flops_per_second": (2 * size**3, lambda x, w: x @ w, left, (right,)),
    }
    for name, (work, step, state, constants) in probes.items():

        def measure(work=work, step=step, state=state, constants=constants) -> dict[str, float]:
            return {"per_second": work / timed(step, state, *constants, repeats=4, rounds=sizes.rounds)}

        row = context.case({"ceiling": name}, measure, seconds=3.0)
        if row is not None and "per_second" in row:
            context.record.ceilings[name] = row["per_second"]
    context.record.flush()
