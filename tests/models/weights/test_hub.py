"""Hub ids are served from the hub's cache without a network, and errors say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.errors
import huggingface_hub.utils
import pytest

from jaxpaged.models.weights import open_checkpoint
from jaxpaged.models.weights.hub import fetch_snapshot, is_hub_id
from tests.support.tiny import tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny-llama"


def write_cache(cache: Path) -> Path:
    """A hub cache with one model in it; returns its snapshot: links into blobs/, as the hub's client leaves them."""
    repo = cache / "models--someone--tiny-llama"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(tiny_checkpoint(repo / "blobs", shards=2).iterdir())):
        blob = file.rename(file.with_name(f"{number:040x}"))
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE=1, for a library that read its environment when it was imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_offline_from_the_cache(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path)
    checkpoint = open_checkpoint(REPO, revision=None, token=None, download_dir=str(tmp_path))
    assert checkpoint.path.resolve() == snapshot.resolve()
    assert checkpoint.source.read("model.norm.weight").shape == (64,)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_offline_at_a_revision(tmp_path: Path, revision: str) -> None:
    write_cache(tmp_path)
    found = fetch_snapshot(REPO, revision=revision, token=None, download_dir=str(tmp_path), weights=True)
    assert found.name == COMMIT


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("repo", "revision"), [("someone/unknown", None), ("gpt-unknown", None), (REPO, "v2")])
def test_offline_and_not_in_the_cache(tmp_path: Path, repo: str, revision: str | None) -> None:
    write_cache(tmp_path)
    with pytest.raises(ValueError, match=f"model '{repo}'.* is not complete in the hub cache.*unset HF_HUB_OFFLINE"):
        open_checkpoint(repo, revision=revision, token=None, download_dir=str(tmp_path))


def test_a_proxy_that_refuses_counts_as_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client raised its HTTP library's own error and did not look into the cache."""

    def snapshot_download(repo_id: str, *, local_files_only: bool, **_: object) -> str:
        if not local_files_only:
            raise huggingface_hub.errors.HfHubHTTPError.__bases__[0]("403 Forbidden")
        if repo_id != REPO:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch_snapshot(REPO, revision=None, token=None, download_dir=None, weights=True) == tmp_path
    with pytest.raises(ValueError, match="is not complete in the hub cache"):
        fetch_snapshot("someone/unknown", revision=None, token=None, download_dir=None, weights=True)


def test_environment_alone(tmp_path: Path) -> None:
    """HF_HOME and HF_HUB_OFFLINE as a user sets them, in a process of its own."""
    snapshot = write_cache(tmp_path / "hub")
    code = (
        "from jaxpaged.models.weights import open_checkpoint\n"
        "def path(name): return open_checkpoint(name, revision=None, token=None, download_dir=None).path\n"
        f"print(path({REPO!r}).resolve())\n"
        "try: path('someone/unknown')\n"
        "except ValueError as error: print(error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, second = result.stdout.splitlines()[:2]
    assert Path(first) == snapshot.resolve()
    assert "'someone/unknown' is no local path" in second


def test_only_needed_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second copy of the weights in another format doubled the download."""
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch_snapshot(REPO, revision="v1", token="secret", download_dir=None, weights=True) == tmp_path
    assert (asked["repo_id"], asked["revision"], asked["token"]) == (REPO, "v1", "secret")
    files = {
        "config.json": True,
        "generation_config.json": True,
        "model.safetensors": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "tokenizer.json": True,
        "tokenizer.model": True,
        "spiece.model": True,
        "merges.txt": True,
        "chat_template.jinja": True,
        "pytorch_model.bin": False,
        "original/consolidated.00.pth": False,
        "original/tokenizer.model": False,
        "consolidated.safetensors": False,
        "onnx/model.onnx": False,
        "README.md": False,
    }
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert set(kept) == {file for file, wanted in files.items() if wanted}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("owner/name.v1_x", True),
        ("a/b/c", False),
        ("./a", False),
        ("/a/b", False),
        ("~/a", False),
        ("a/", False),
        ("model.gguf", False),
        ("owner/model.gguf", False),
        ("", False),
        ("a b", False),
    ],
)
def test_the_form_of_a_hub_id(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected
