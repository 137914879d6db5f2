"""Safetensors files are mapped without a copy, and a damaged checkpoint is refused when it is opened."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.models.weights.safetensors import SafetensorsSource

FIRST = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
SECOND = {"c": np.linspace(-3, 3, 8).astype(ml_dtypes.bfloat16).reshape(4, 2)}


def write_single(directory: Path) -> Path:
    save_file(FIRST | SECOND, directory / "model.safetensors", metadata={"format": "pt"})
    return directory / "model.safetensors"


def write_shards(directory: Path, **changes: str) -> None:
    """Two shards and an index; `changes` replaces entries of the index."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file(FIRST, directory / first)
    save_file(SECOND, directory / second)
    weight_map = {"a": first, "b": first, "c": second} | changes
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def check_content(source: SafetensorsSource) -> None:
    assert sorted(source.names()) == ["a", "b", "c"]
    for name, array in (FIRST | SECOND).items():
        read = source.read(name)
        assert source.shape(name) == array.shape
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def mapped_files(directory: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]


def test_single_file(tmp_path: Path) -> None:
    write_single(tmp_path)
    check_content(SafetensorsSource(tmp_path))


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    check_content(SafetensorsSource(tmp_path))


def test_shards_behind_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_shards(tmp_path / "blobs")
    for blob in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / blob.name).symlink_to(os.path.relpath(blob, tmp_path / "snapshot"))
    check_content(SafetensorsSource(tmp_path / "snapshot"))


def test_tensors_the_index_forgot_are_found(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["b"]
    index.write_text(json.dumps(content))
    check_content(SafetensorsSource(tmp_path))


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    save_file({"none": np.empty((0, 3), np.float32), "one": np.asarray(2, np.float32)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("none").shape == (0, 3)
    assert source.read("one") == 2


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_read_is_a_view_of_the_file_that_ends_with_the_array(tmp_path: Path) -> None:
    """Pages of tensors long dealt with stayed in the process and doubled its memory."""
    write_single(tmp_path)
    source = SafetensorsSource(tmp_path)
    assert mapped_files(tmp_path) == []
    array = source.read("a")
    assert not array.flags.owndata
    assert not array.flags.writeable
    assert len(mapped_files(tmp_path)) == 1
    source.close()
    np.testing.assert_array_equal(array, FIRST["a"])
    del array
    assert mapped_files(tmp_path) == []


def test_closed_and_unknown(tmp_path: Path) -> None:
    write_single(tmp_path)
    source = SafetensorsSource(tmp_path)
    with pytest.raises(ValueError, match="no tensor 'zzz'"):
        source.read("zzz")
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read("a")


def test_main_dtype(tmp_path: Path) -> None:
    write_single(tmp_path)
    assert SafetensorsSource(tmp_path).main_dtype() == "bfloat16"


def test_missing_shard(tmp_path: Path) -> None:
    """A shard named by the index was absent, and its layers stayed uninitialised."""
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="names shards that are not in .*model-00002-of-00002.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/passwd", "sub/../../evil.safetensors", "..\\x", ""])
def test_index_that_points_outside(tmp_path: Path, file: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file(SECOND, tmp_path / "evil.safetensors")
    write_shards(inside, c=file)
    with pytest.raises(ValueError, match="points outside its directory"):
        SafetensorsSource(inside)


def test_index_that_names_tensors_no_shard_holds(tmp_path: Path) -> None:
    write_shards(tmp_path, d="model-00001-of-00002.safetensors", c="model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"do not hold: c \(in .*d \(in "):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_malformed_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    """A download that stopped half-way was served."""
    path = write_single(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        SafetensorsSource(tmp_path)


def test_truncated_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is truncated"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "is not valid JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "takes 8 bytes, its offsets are 0:4"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', "its offsets are -4:0"),
        (b'{"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}', "unsupported dtype 'Q9'"),
        (b'{"a": {"shape": [1]}}', "malformed header entry for tensor 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "malformed header entry"),
    ],
)
def test_malformed_header(tmp_path: Path, header: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(tmp_path)


def test_a_web_page_instead_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("<!DOCTYPE html><html>login</html>")
    with pytest.raises(ValueError, match="not a safetensors file"):
        SafetensorsSource(tmp_path)


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"weight files found: pytorch_model\.bin"):
        SafetensorsSource(tmp_path)
