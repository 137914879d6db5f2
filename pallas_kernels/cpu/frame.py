"""Reading the call frame that XLA's foreign function interface passes to a handler, from Numba.

The layout is that of XLA_FFI_CallFrame in jaxlib's xla/ffi/api/c_api.h (version 0.4 and 0.5), in words of 8 bytes.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

_EXTENSION, _API, _ARGS, _RESULTS = 1, 2, 9, 14  # words of the call frame
_DATA, _DIMS = 3, 5  # words of XLA_FFI_Buffer


@no_type_check
@intrinsic
def _pointer(_context, _address):
    """An address as a pointer that numba.carray takes."""

    def make(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], _context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), make


@no_type_check
@numba.njit
def words(address, count):
    """int64 words at an address."""
    return numba.carray(_pointer(address), (count,), np.int64)


@no_type_check
@numba.njit
def ints(address, shape):
    """An int32 array at an address."""
    return numba.carray(_pointer(address), shape, np.int32)


@no_type_check
@numba.njit
def floats(address, shape):
    """A float32 array at an address."""
    return numba.carray(_pointer(address), shape, np.float32)


@no_type_check
@numba.njit
def bytes_at(address, shape):
    """An int8 array at an address."""
    return numba.carray(_pointer(address), shape, np.int8)


@no_type_check
@numba.njit
def argument(frame, i):
    """Address of the data of argument i."""
    return words(words(frame[_ARGS], i + 1)[i], 6)[_DATA]


@no_type_check
@numba.njit
def dimension(frame, i, axis):
    """Size of an axis of argument i."""
    return words(words(words(frame[_ARGS], i + 1)[i], 6)[_DIMS], axis + 1)[axis]


@no_type_check
@numba.njit
def result(frame, i):
    """Address of the data of result i."""
    return words(words(frame[_RESULTS], i + 1)[i], 6)[_DATA]


@no_type_check
@numba.njit
def answer_question(frame):
    """True when the call asks for the handler's metadata, which is then filled in: XLA does so at registration.

    XLA_FFI_Metadata: size, version (size, extension, major and minor), traits, state type. No traits, no state.
    """
    if frame[_EXTENSION] == 0:
        return False
    extension = words(frame[_EXTENSION], 4)
    if extension[1] & 0xFFFFFFFF != 1:  # the kind: XLA_FFI_Extension_Metadata
        return False
    metadata = words(extension[3], 6)
    metadata[3] = 4 << 32  # major 0, minor 4: the oldest version with this layout
    return True
