"""The processor's tiles (Intel AMX) for Numba code: setting them up, and LLVM's calls on them.

A tile is 16 lines of 64 bytes, 1 KiB. There are eight, and their numbers are part of the instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jaxpaged.pallas_kernels.cpu.code import LANES, WORD, Code, word

TILE = 1024  # bytes
LINE = TILE // LANES
PALETTE_BYTES = 64
_BYTE = ir.IntType(8)
_BYTES = _BYTE.as_pointer()


@no_type_check
@numba.njit
def write_palette(palette):
    """What configure() reads, into PALETTE_BYTES bytes: palette 1; from byte 16 on the bytes of each tile's lines, as
    half words; from byte 48 on their number."""
    palette[:] = 0
    palette[0] = 1
    for tile in range(8):
        palette[16 + 2 * tile], palette[48 + tile] = LINE, LANES


@no_type_check
@intrinsic
def configure(_context, _palette):
    """Sets the thread's tiles up as the palette at an address says, until release()."""

    def make(context, builder, _signature, arguments):
        _call(builder, "llvm.x86.ldtilecfg", [builder.inttoptr(arguments[0], _BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64), make


@no_type_check
@intrinsic
def release(_context):
    """Gives the thread's tiles back, so that the system need not save them."""

    def make(context, builder, _signature, _arguments):
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), make


def load_tile(code: Code, tile: int, address: Any, stride: int) -> None:
    """Lines `stride` bytes apart into a tile."""
    _move(code, "tileloadd64", tile, address, stride)


def store_tile(code: Code, tile: int, address: Any, stride: int) -> None:
    """A tile to lines `stride` bytes apart."""
    _move(code, "tilestored64", tile, address, stride)


def clear_tile(code: Code, tile: int) -> None:
    """Zeros."""
    _call(code.builder, "llvm.x86.tilezero", [ir.Constant(_BYTE, tile)])


def multiply_tiles(code: Code, instruction: str, total: int, left: int, right: int) -> None:
    """total += left · right. Example: "tdpbf16ps"."""
    _call(code.builder, f"llvm.x86.{instruction}", [ir.Constant(_BYTE, tile) for tile in (total, left, right)])


def beyond(code: Code, address: Any, distance: int) -> Any:
    """The address `distance` bytes further on."""
    return code.builder.add(address, ir.Constant(WORD, distance))


def _move(code: Code, instruction: str, tile: int, address: Any, stride: int) -> None:
    builder = code.builder
    place = builder.inttoptr(address, _BYTES)
    _call(builder, f"llvm.x86.{instruction}", [ir.Constant(_BYTE, tile), place, word(stride)])


def _call(builder: Any, name: str, arguments: Sequence[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
