"""Tile sizes of the grouped kernels: data, per phase and packing axis, with exceptions per GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxpaged.pallas_kernels.quantized_matmul.weight import Layout

MIN_DOT = 16  # least extent of any axis of a product on tensor cores, as the compiler takes it
DECODE_TOKENS = 64  # most tokens for which all of them fit one tile, so that each weight is read once


@dataclass(frozen=True, kw_only=True)
class MatmulTiles:
    """What one program instance handles; all sizes are powers of two. A size never changes the result's meaning."""

    tokens: int  # rows of x at most; fewer where x has fewer
    outputs: int  # output features
    inputs: int  # input features per inner iteration
    warps: int
    stages: int  # inner iterations whose loads are in flight
    instances_per_core: int  # inputs are split until every multiprocessor has this many instances


# Chosen by arithmetic and by what compiles without spills; nothing here was timed. Keys: (phase, packing axis).
_ANY_GPU: Mapping[tuple[str, str], MatmulTiles] = MappingProxyType(
    {
        ("decode", "in"): MatmulTiles(tokens=64, outputs=64, inputs=128, warps=4, stages=4, instances_per_core=2),
        ("decode", "out"): MatmulTiles(tokens=64, outputs=128, inputs=64, warps=4, stages=4, instances_per_core=2),
        ("prefill", "in"): MatmulTiles(tokens=128, outputs=128, inputs=128, warps=8, stages=3, instances_per_core=1),
        ("prefill", "out"): MatmulTiles(tokens=128, outputs=128, inputs=64, warps=8, stages=3, instances_per_core=1),
    }
)

# (device kind's beginning, phase, packing axis) → tiles, where measurement says so.
_EXCEPTIONS: Mapping[tuple[str, str, str], MatmulTiles] = MappingProxyType({})


def choose_tiles(device_kind: str, layout: Layout, num_tokens: int) -> MatmulTiles:
    """The table's entry for this GPU, or the one for any GPU."""
    phase = "decode" if num_tokens <= DECODE_TOKENS else "prefill"
    for (kind, *key), tiles in _EXCEPTIONS.items():
        if device_kind.startswith(kind) and key == [phase, layout.axis]:
            return tiles
    return _ANY_GPU[phase, layout.axis]
