"""Loading: everything is checked before anything is read, and one slot's arrays are in memory at a time."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.models.weights import Checkpoint, open_checkpoint
from jaxpaged.models.weights.load import Slot, SlotPath, ignorable_tensors, load_weights
from tests.support.tiny import tiny_checkpoint

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class CountingSource:
    """A TensorSource over arrays that knows how many bytes of what it handed out are still alive."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.reads: list[str] = []
        self.alive = 0
        self.peak = 0

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        array = self.tensors[name].copy()
        self.reads.append(name)
        self._count(array.nbytes)
        weakref.finalize(array, self._count, -array.nbytes)
        return array

    def close(self) -> None:
        pass

    def _count(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)


def one(name: str, shape: tuple[int, ...]) -> Slot:
    return Slot(path=(name,), names=(name,), expected=(shape,), build=lambda parts: parts[0])


def place(slot: Slot, array: np.ndarray) -> dict[SlotPath, jax.Array]:
    return {slot.path: jax.numpy.array(array, copy=True)}


def load(slots: Sequence[Slot], tensors: Mapping[str, np.ndarray], ignore: Sequence[str] = ()) -> dict[Any, jax.Array]:
    return load_weights(slots, CountingSource(tensors), place, ignore)


def test_slots_are_built_from_their_tensors_in_order() -> None:
    q, k = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 2), np.float32)
    slot = Slot(path=("layers", 0, "qk"), names=(Q, K), expected=((3, 2), (1, 2)), build=np.concatenate)
    placed = load([slot, one("norm", (2,))], {"norm": np.full(2, 7.0, np.float32), K: k, Q: q})
    assert list(placed) == [("layers", 0, "qk"), ("norm",)]
    np.testing.assert_array_equal(placed["layers", 0, "qk"], np.concatenate([q, k]))
    np.testing.assert_array_equal(placed["norm",], [7.0, 7.0])


def test_at_most_one_slot_is_in_host_memory() -> None:
    """Tensors of several layers piled up on the host, and loading needed twice the model's size."""
    source = CountingSource({f"t{i}": np.zeros((64, 64), np.float32) for i in range(12)})
    pairs = [(f"t{i}", f"t{i + 1}") for i in range(0, 12, 2)]
    slots = [Slot(path=(i,), names=p, expected=((64, 64),) * 2, build=np.stack) for i, p in enumerate(pairs)]
    load_weights(slots, source, place, ())
    assert source.peak == 2 * 64 * 64 * 4
    assert source.alive == 0


def test_every_fault_is_listed_before_anything_is_read() -> None:
    """The first fault alone was reported, after minutes of reading; or the layer stayed random."""
    source = CountingSource({"good": np.zeros(2), "flat": np.zeros((2, 3)), "flatter": np.zeros((4,))})
    slots = [one("good", (2,)), one("gone", (2,)), one("flat", (3, 2)), one("lost", (2,)), one("flatter", (1, 4))]
    with pytest.raises(ValueError, match="does not fit its config") as error:
        load_weights(slots, source, place, ())
    assert source.reads == []
    assert "missing tensors (2): gone, lost" in str(error.value)
    assert "flat: wanted [3, 2], got [2, 3]; flatter: wanted [1, 4], got [4]" in str(error.value)
    assert "good" not in str(error.value)


def test_extra_tensors_are_listed_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {name: np.zeros(1) for name in ("norm", "foo.bar", "baz", "model.layers.0.self_attn.rotary_emb.inv_freq")}
    load([one("norm", (1,))], tensors, ["*.rotary_emb.inv_freq"])
    assert [record.getMessage() for record in caplog.records] == [
        "the model does not use 2 tensors of the checkpoint: foo.bar, baz"
    ]


def test_progress_counts_slots() -> None:
    calls: list[tuple[int, int]] = []
    slots = [one("a", (1,)), one("b", (1,))]
    source = CountingSource({"a": np.zeros(1), "b": np.zeros(1)})
    load_weights(slots, source, place, (), lambda done, total: calls.append((done, total)))
    assert calls == [(0, 2), (1, 2), (2, 2)]


def opened(directory: Path) -> Checkpoint:
    return open_checkpoint(str(directory), revision=None, token=None, download_dir=None)


def add_tensors(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | dict(tensors), path)


def head_slots(checkpoint: Checkpoint) -> list[Slot]:
    """The embedding and, for a model that is not tied, the head: as a model asks for them."""
    shape = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
    return [one(name, shape) for name in ((EMBEDDING,) if checkpoint.config.tie_word_embeddings else (EMBEDDING, HEAD))]


def test_tied_without_a_head_shares_the_embedding(tmp_path: Path) -> None:
    """A tied model without lm_head kept a random head and was served."""
    checkpoint = opened(tiny_checkpoint(tmp_path, tie_word_embeddings=True))
    assert checkpoint.config.tie_word_embeddings
    assert list(load_weights(head_slots(checkpoint), checkpoint.source, place, ["*"])) == [(EMBEDDING,)]


def test_tied_with_the_same_head_stays_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A redundant lm_head made a good checkpoint fail to load."""
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    add_tensors(directory, {HEAD: load_file(directory / "model.safetensors")[EMBEDDING]})
    checkpoint = opened(directory)
    assert checkpoint.config.tie_word_embeddings
    ignore = (*ignorable_tensors(checkpoint.config), "model.layers.*", "model.norm.weight")
    load_weights(head_slots(checkpoint), checkpoint.source, place, ignore)
    assert caplog.records == []


def test_tied_with_another_head_uses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The config says tied, the file holds a head of its own: transformers uses that head and warns, so do we."""
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    head = np.random.default_rng(5).standard_normal((1024, 64)).astype(np.float32)
    add_tensors(directory, {HEAD: head})
    checkpoint = opened(directory)
    assert not checkpoint.config.tie_word_embeddings
    assert "both with different values, so they are not tied" in caplog.text
    placed = load_weights(head_slots(checkpoint), checkpoint.source, place, ["*"])
    np.testing.assert_array_equal(placed[HEAD,], head)


def test_tied_with_a_head_of_another_shape_stays_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    add_tensors(directory, {HEAD: np.zeros((3, 64), np.float32)})
    assert opened(directory).config.tie_word_embeddings
    assert "has another shape, [3, 64], and is ignored" in caplog.text


def test_untied_without_a_head_is_an_error(tmp_path: Path) -> None:
    """An untied model lacking lm_head was tied silently and talked nonsense."""
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    checkpoint = opened(directory)
    with pytest.raises(ValueError, match=r"missing tensors \(1\): lm_head\.weight\n.*tie_word_embeddings: true"):
        load_weights(head_slots(checkpoint), checkpoint.source, place, ["*"])


def test_untied_with_a_head_equal_to_the_embedding_stays_untied(tmp_path: Path) -> None:
    assert not opened(tiny_checkpoint(tmp_path)).config.tie_word_embeddings


def test_open_directory(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, shards=2, generation_eos=[3, 4], eos_token_id=2)
    checkpoint = opened(directory)
    assert checkpoint.path == directory
    assert checkpoint.config.eos_ids == {2, 3, 4}
    assert checkpoint.generation_config == {"eos_token_id": [3, 4]}
    assert checkpoint.source.shape(HEAD) == (1024, 64)


def test_missing_dtype_is_the_weights_own(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, omit=["torch_dtype"])
    path = directory / "model.safetensors"
    save_file({name: array.astype(np.float16) for name, array in load_file(path).items()}, path)
    assert opened(directory).config.dtype == "float16"


def test_config_faults_are_told_before_weights_are_opened(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, architectures=["GPT2LMHeadModel"])
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="unsupported architecture"):
        opened(directory)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json must hold a JSON object, got list"),
        ("generation_config.json", "nope", r"generation_config\.json is not valid JSON"),
    ],
)
def test_damaged_json(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    directory = tiny_checkpoint(tmp_path)
    (directory / file).unlink(missing_ok=True)
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        opened(directory)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "~/no-such-model", "gone.gguf", "a/b/c", "", "a b/c"])
def test_a_path_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"does not exist as a path and is no hub id|got an empty string"):
        open_checkpoint(name, revision=None, token=None, download_dir=None)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path) / "model.safetensors"
    with pytest.raises(ValueError, match="not a .gguf file; pass the directory"):
        open_checkpoint(str(path), revision=None, token=None, download_dir=None)
