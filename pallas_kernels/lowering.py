"""The one place that knows that Pallas kernels become GPU code through Triton."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

load = pallas_triton.load
store = pallas_triton.store


def launch(
    kernel: Callable[..., None],
    *args: Any,
    name: str,
    grid: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> list[jax.Array]:
    """Run kernel(*refs of args, *refs of outputs) for each point of the grid, its first axis the fastest.

    args may hold None, which reach the kernel as None. aliases: index among the args that are not None → output that
    starts out as that argument.
    """
    # JAX warns when it lowers, which is after this function has returned; so the filter stays.
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(outputs),
        input_output_aliases=dict(aliases),
        compiler_params=pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )
    return list(call(*args))
