"""Incomplete and contradictory checkpoints: served as the reference serves them, or refused at start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxpaged
from tests.support.checkpoints import write_checkpoint
from tests.support.driving import answers, greedy
from tests.support.engines import small_llm
from tests.support.goldens import TinyGoldens, load_tiny
from tests.support.tiny import tiny_config, tiny_tensors

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
SHARD_2 = "model-00002-of-00002.safetensors"


def tiny(name: str) -> TinyGoldens:
    return next(tiny for tiny in load_tiny() if tiny.name == name)


def write(path: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """A directory of two shards and an index."""
    return write_checkpoint(path, tiny_config(**config), tensors, generation_eos=None, tokenizer=None, shards=2)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """The default tiny checkpoint's, with a head of its own."""
    return tiny_tensors(tiny_config(), seed=0)


@pytest.fixture
def tied_tensors() -> dict[str, np.ndarray]:
    """Those of the tied tiny checkpoint: no head."""
    return tiny_tensors(tiny_config(tie_word_embeddings=True), seed=0)


def load(path: Path) -> jaxpaged.LLM:
    return small_llm(path, skip_tokenizer_init=True)


def assert_answers(path: Path, reference: TinyGoldens) -> None:
    prompts = [golden.prompt_ids for golden in reference.goldens]
    found = answers(load(path), prompts, greedy(max_tokens=40))
    assert [completion.token_ids for completion in found] == [golden.token_ids for golden in reference.goldens]


def test_two_shards(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """The layers of the second file were left as they were initialised."""
    assert_answers(write(tmp_path / "model", tensors), tiny("default"))


def test_tied_without_a_head(tmp_path: Path, tied_tensors: dict[str, np.ndarray]):
    """A tied model kept a random head, because the file has none, and served nonsense."""
    assert_answers(write(tmp_path / "model", tied_tensors, tie_word_embeddings=True), tiny("tied"))


def test_tied_with_the_same_head_again(tmp_path: Path, tied_tensors: dict[str, np.ndarray], caplog):
    """A tied model whose file holds the head, too, was refused."""
    tied_tensors[HEAD] = tied_tensors[EMBEDDING].copy()
    with caplog.at_level(logging.WARNING, logger="jaxpaged"):
        assert_answers(write(tmp_path / "model", tied_tensors, tie_word_embeddings=True), tiny("tied"))
    assert not caplog.records


def test_tied_with_another_head_uses_it(tmp_path: Path, tensors: dict[str, np.ndarray], caplog):
    """Of two contradicting statements one was taken in silence. Hugging Face believes the tensors, and says so."""
    with caplog.at_level(logging.WARNING, logger="jaxpaged"):
        assert_answers(write(tmp_path / "model", tensors, tie_word_embeddings=True), tiny("default"))
    assert "not tied" in caplog.text


def test_untied_without_a_head_is_refused(tmp_path: Path, tied_tensors: dict[str, np.ndarray]):
    """An untied model that lacks its head was tied in silence."""
    with pytest.raises(ValueError, match=r"missing tensors \(1\): lm_head\.weight"):
        load(write(tmp_path / "model", tied_tensors))


def test_a_missing_shard_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """A shard named by the index was not there, and its layers stayed uninitialised."""
    path = write(tmp_path / "model", tensors)
    (path / SHARD_2).unlink()
    with pytest.raises(ValueError, match=f"names shards that are not in .*{SHARD_2}"):
        load(path)


def test_a_missing_tensor_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """One layer without its query projection served nonsense."""
    name = "model.layers.1.self_attn.q_proj.weight"
    del tensors[name]
    with pytest.raises(ValueError, match=name):
        load(write(tmp_path / "model", tensors))


def test_a_tensor_the_shard_lost_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """The index promised a tensor that its file no longer holds."""
    path = write(tmp_path / "model", tensors)
    held = load_file(path / SHARD_2)
    del held["model.norm.weight"]
    save_file(held, path / SHARD_2)
    with pytest.raises(ValueError, match=r"model\.norm\.weight \(in model-00002"):
        load(path)


def test_a_transposed_tensor_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """A matrix stored [in, out] was broadcast or reshaped into place."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(ValueError, match=rf"{name}: wanted \[64, 128\], got \[128, 64\]"):
        load(write(tmp_path / "model", tensors))


def test_extra_tensors_are_named(tmp_path: Path, tensors: dict[str, np.ndarray], caplog):
    """A tensor nobody uses often means that the config is of another model: it must not pass unnoticed."""
    tensors["foo.bar"] = np.ones(3, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # old files have it: no news
    with caplog.at_level(logging.WARNING, logger="jaxpaged"):
        assert_answers(write(tmp_path / "model", tensors), tiny("default"))
    assert "does not use 1 tensors of the checkpoint: foo.bar" in caplog.text


@pytest.mark.parametrize("kept", [4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray], kept: float):
    """Half a download was read as far as it went."""
    path = write(tmp_path / "model", tensors)
    content = (path / SHARD_2).read_bytes()
    size = int(len(content) * kept) if isinstance(kept, float) else kept
    (path / SHARD_2).write_bytes(content[:size])
    with pytest.raises(ValueError, match=rf"{SHARD_2} is truncated"):
        load(path)


@pytest.mark.parametrize("where", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors"])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray], where: str):
    """A downloaded index could make the engine read any file of the machine."""
    path = write(tmp_path / "model", tensors)
    (path / SHARD_2).rename(tmp_path / "outside.safetensors")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {name: where if file == SHARD_2 else file for name, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="points outside its directory"):
        load(path)
