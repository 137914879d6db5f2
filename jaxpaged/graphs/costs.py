"""Our own FLOP and byte counts of a traced program: XLA has none for a GPU that is absent.

FLOPs are those of matrix products: 2 · batch · M · N · K of each dot_general, times the iterations of the scans and
kernel grids around it. A branch counts as its dearest alternative. A loop whose length is data (attention over the
blocks a sequence holds) counts as one iteration, and is told of in `open_loops`.
Bytes are those of the arguments that are used and of the outputs, each once: what moves where all of them are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]  it is public

from jaxpaged.graphs.report import Costs


def count_costs(closed: ClosedJaxpr, used: Sequence[int]) -> Costs:
    """Of a whole program, all devices together; `used`: positions of the arguments that it reads."""
    flops, loops = _count(closed.jaxpr)
    return Costs(
        dot_flops=flops,
        argument_bytes=_bytes(closed.in_avals[position] for position in used),
        output_bytes=_bytes(closed.out_avals),
        open_loops=loops,
    )


def _bytes(avals: Iterable[Any]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _count(jaxpr: Any) -> tuple[int, int]:
    """FLOPs and open loops of a jaxpr."""
    counts = [_count_equation(equation) for equation in jaxpr.eqns]
    return sum(flops for flops, _ in counts), sum(loops for _, loops in counts)


def _count_equation(equation: Any) -> tuple[int, int]:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation), 0
    inner = [_count(jaxpr) for jaxpr in _jaxprs(params)]
    if not inner:
        return 0, 0
    if name == "cond":
        return max(flops for flops, _ in inner), max(loops for _, loops in inner)
    times = _iterations(name, params)
    return times * sum(flops for flops, _ in inner), sum(loops for _, loops in inner) + (name == "while")


def _iterations(name: str, params: Any) -> int:
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return 1


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _jaxprs(params: Any) -> list[Any]:
    """The jaxprs among an equation's parameters, closed or open, alone or in tuples."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
