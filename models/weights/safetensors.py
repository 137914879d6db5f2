"""Tensors of safetensors files, memory-mapped: a single file or the shards of an index."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, final

import ml_dtypes
import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor: which file, where in it, and what."""

    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype


@final
class SafetensorsSource:
    """A TensorSource over a directory with model.safetensors or model.safetensors.index.json.

    Opening reads and checks the headers only. Each read() maps just that tensor's bytes and the mapping ends
    with the array, so pages of tensors already dealt with do not stay in the process.
    """

    def __init__(self, directory: str | Path) -> None:
        """Raises ValueError for missing, truncated or malformed files, naming them."""
        self._entries: dict[str, _Entry] | None = _open_directory(Path(directory))

    def names(self) -> tuple[str, ...]:
        return tuple(self._opened())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file, without a copy."""
        entry = self._entry(name)
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, entry.dtype)
        data = np.memmap(entry.path, np.uint8, "r", entry.offset, (count * entry.dtype.itemsize,))
        return np.asarray(data).view(entry.dtype).reshape(entry.shape)

    def close(self) -> None:
        self._entries = None

    def main_dtype(self) -> str:
        """Name of the floating-point type most elements have, e.g. "bfloat16"."""
        counts: Counter[str] = Counter()
        for entry in self._opened().values():
            if entry.dtype.name in ("float64", "float32", "float16", "bfloat16"):
                counts[entry.dtype.name] += math.prod(entry.shape)
        return counts.most_common(1)[0][0] if counts else "float32"

    def _opened(self) -> Mapping[str, _Entry]:
        if self._entries is None:
            raise ValueError("the checkpoint is closed; open it again to read from it")
        return self._entries

    def _entry(self, name: str) -> _Entry:
        entry = self._opened().get(name)
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        return entry


def _open_directory(directory: Path) -> dict[str, _Entry]:
    """The single file wins over an index beside it, as in transformers."""
    if (directory / SINGLE_FILE).is_file():
        return _read_header(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        return _open_shards(directory)
    suffixes = (".safetensors", ".bin", ".gguf", ".pth")
    found = sorted(path.name for path in directory.iterdir() if path.suffix in suffixes)
    raise ValueError(
        f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE} (weight files found: {', '.join(found) or 'none'}); "
        "convert the checkpoint to safetensors, or pass a .gguf file's own path"
    )


def _open_shards(directory: Path) -> dict[str, _Entry]:
    weight_map = _weight_map(directory / INDEX_FILE)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ValueError(
            f"{INDEX_FILE} names shards that are not in {directory}: {', '.join(missing)}; download them again"
        )
    headers = {file: _read_header(directory / file) for file in files}
    absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in headers[file]]
    if absent:
        raise ValueError(f"{INDEX_FILE} names tensors that their shards do not hold: {', '.join(absent)}")
    entries = {name: headers[file][name] for name, file in weight_map.items()}
    for header in headers.values():
        entries = header | entries  # tensors the index forgot
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: shard} of the index; every shard is a plain path inside the directory."""
    content = _json_object(index.read_bytes(), str(index))
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map object, got {weight_map!r}")
    # The path as written is judged, not where a link leads: a hub cache's files are links out of the snapshot.
    outside = sorted({repr(file) for file in weight_map.values() if not _stays_inside(file)})
    if outside:
        raise ValueError(f"{index} points outside its directory: {', '.join(outside)}; the index is refused")
    return weight_map


def _stays_inside(file: object) -> bool:
    if not isinstance(file, str) or not file:
        return False
    path = PurePosixPath(file.replace("\\", "/"))
    return not path.is_absolute() and ".." not in path.parts


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, checked against its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_HEADER_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _HEADER_LENGTH_BYTES or (length <= _MAX_HEADER_BYTES and size < _HEADER_LENGTH_BYTES + length):
            raise ValueError(f"{path} is truncated: {size} bytes do not hold its header; download it again")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header would take {length} bytes")
        header = _json_object(file.read(length), f"the header of {path}")
    start = _HEADER_LENGTH_BYTES + length
    entries = {name: _parse_entry(path, start, name, e) for name, e in header.items() if name != "__metadata__"}
    end = max((e.offset + math.prod(e.shape) * e.dtype.itemsize for e in entries.values()), default=start)
    if end > size:
        raise ValueError(
            f"{path} is truncated: its header describes {end} bytes, the file has {size}; download it again"
        )
    return entries


def _parse_entry(path: Path, start: int, name: str, entry: object) -> _Entry:
    """One header entry, e.g. {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if _are_sizes(shape):
            if dtype not in _DTYPES:
                raise ValueError(
                    f"{path}: tensor {name!r} has unsupported dtype {dtype!r}; supported: {', '.join(_DTYPES)}"
                )
            wanted = math.prod(shape) * _DTYPES[dtype].itemsize
            if begin < 0 or end - begin != wanted:
                raise ValueError(f"{path}: {name!r} {dtype}{shape} takes {wanted} bytes, its offsets are {begin}:{end}")
            return _Entry(path=path, offset=start + begin, shape=tuple(shape), dtype=_DTYPES[dtype])
        case _:
            raise ValueError(f"{path}: malformed header entry for tensor {name!r}: {entry!r}")


def _are_sizes(shape: list[Any]) -> bool:
    return all(isinstance(size, int) and size >= 0 for size in shape)


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(content).__name__}")
    return content
