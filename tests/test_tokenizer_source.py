"""Where the tokenizer comes from: the model, a directory, or a hub id of its own."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from jaxpaged import LLM
from tests.support.driving import greedy
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import SP_SIZE, byte_tokenizer, save_tokenizer, sentencepiece_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("source") / "model"
    return tiny_checkpoint(path, vocab_size=SP_SIZE, num_hidden_layers=1, tokenizer=byte_tokenizer(adds_bos=False))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache, offline, with a repository that holds a sentencepiece tokenizer and nothing else."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--someone--words"
    save_tokenizer(repo / "snapshots" / COMMIT, sentencepiece_tokenizer(adds_bos=False))
    (repo / "refs").mkdir()
    for name in ("main", "v2"):
        (repo / "refs" / name).write_text(COMMIT)
    return tmp_path


def encoded(llm: LLM) -> list[int]:
    (output,) = llm.generate("Hello", greedy(max_tokens=1), use_tqdm=False)
    return output.prompt_token_ids


@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_hub_id(model: Path, hub_cache: Path, revision: str | None) -> None:
    """It was looked for as a folder of this name."""
    wanted = sentencepiece_tokenizer(adds_bos=False).encode("Hello").ids
    llm = small_llm(model, tokenizer="someone/words", tokenizer_revision=revision, download_dir=str(hub_cache))
    assert encoded(llm) == wanted != encoded(small_llm(model))


def test_a_hub_id_that_is_not_there(model: Path, hub_cache: Path) -> None:
    for name, revision in (("someone/else", None), ("someone/words", "v3")):
        with pytest.raises(ValueError, match=f"tokenizer '{name}'.* is not complete in the hub cache"):
            small_llm(model, tokenizer=name, tokenizer_revision=revision, download_dir=str(hub_cache))


def test_no_weights_are_downloaded_for_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    folder = save_tokenizer(tmp_path / "words", sentencepiece_tokenizer(adds_bos=False))

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    small_llm(model, tokenizer="someone/words")
    assert "tokenizer*" in asked and not any("safetensors" in pattern for pattern in asked)


def test_a_directory_goes_before_a_hub_id(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer(tmp_path / "someone" / "words", sentencepiece_tokenizer(adds_bos=False))
    monkeypatch.chdir(tmp_path)
    assert encoded(small_llm(model, tokenizer="someone/words")) != encoded(small_llm(model))
