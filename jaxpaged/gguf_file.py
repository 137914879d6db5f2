"""GGUF container: header, metadata and the places of the tensors' bytes, read without touching the tensors.

The parser is written here rather than taken from the `gguf` package because that one makes an array view per
string, which costs seconds for a vocabulary of 50 thousand entries; this one takes a tenth of a second.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Value = int | float | bool | str | list[Any]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_DEPTH = 4  # of arrays in arrays
_DEFAULT_ALIGNMENT = 32
_BIG_ENDIAN_VERSIONS = {version << 24 for version in (1, 2, 3)}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the file.

    shape: row-major, so a matrix is [out, in] (the file lists the dimensions the other way round).
    kind: GGML's number of the storage type. offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A parsed header. `metadata` maps keys to Python values, `data` is the read-only map of the whole file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]
    data: np.ndarray


class _Cursor:
    """Reads little-endian values from a buffer, one after the other; running out of bytes is struct.error."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def count(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.buffer, self.position)
        start = self.position + 8
        self.position = start + length
        if self.position > len(self.buffer):
            raise struct.error("a string runs past the end of the file")
        return self.buffer[start : self.position].decode("utf-8")

    def array(self, depth: int) -> list[Value]:
        kind, length = self.count("I"), self.count("Q")
        if length > len(self.buffer):
            raise struct.error("an array is longer than the file")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        if kind in _SCALARS:
            layout = struct.Struct(f"<{length}{_SCALARS[kind]}")
            values = layout.unpack_from(self.buffer, self.position)
            self.position += layout.size
            return list(values)
        if kind == _ARRAY and depth < _MAX_DEPTH:
            return [self.array(depth + 1) for _ in range(length)]
        raise ValueError(f"an array of elements of type {kind}, nested {depth} deep")

    def value(self) -> Value:
        kind = self.count("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(1)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise ValueError(f"a value of type {kind}")

    def tensor(self) -> TensorEntry:
        name, rank = self.string(), self.count("I")
        if not 1 <= rank <= _MAX_DIMS:
            raise ValueError(f"tensor {name!r} with {rank} dimensions")
        dims = tuple(self.count("Q") for _ in range(rank))
        return TensorEntry(name=name, shape=dims[::-1], kind=self.count("I"), offset=self.count("Q"))


def _parse(path: Path, buffer: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(buffer)
    magic = buffer[:4]
    if magic != b"GGUF":
        raise ValueError(f"the first four bytes are {magic!r}, not b'GGUF'")
    cursor.position = 4
    version = cursor.count("I")
    if version in _BIG_ENDIAN_VERSIONS:
        raise ValueError("a big-endian file; convert it with `gguf-convert-endian` first")
    if version not in (2, 3):
        raise ValueError(f"version {version} (2 and 3 are supported)")
    num_tensors, num_pairs = cursor.count("Q"), cursor.count("Q")
    metadata = {cursor.string(): cursor.value() for _ in range(num_pairs)}
    entries = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"alignment {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors = {
        entry.name: TensorEntry(name=entry.name, shape=entry.shape, kind=entry.kind, offset=base + entry.offset)
        for entry in entries
    }
    if len(tensors) != len(entries):
        raise ValueError("two tensors of the same name")
    return GGUFFile(path=path, metadata=metadata, tensors=tensors, data=np.frombuffer(buffer, np.uint8))


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Parse a GGUF file's header. The tensors' bytes are mapped, not read.

    Raises FileNotFoundError for a missing file and ValueError for one that is not GGUF, is of an unsupported
    version, or breaks off inside the header.
    """
    path = Path(path)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError(f"{path} is empty, not a GGUF file: fetch it again")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(path, buffer)
    except struct.error as error:
        raise ValueError(f"{path} breaks off inside its GGUF header ({error}): fetch it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds a name or string that is not UTF-8 ({error}): fetch it again") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a GGUF file that can be read: found {error}") from error
