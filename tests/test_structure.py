"""The project's own rules: layout, imports, file sizes, docstrings, and that importing does nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("models", "sharding", "pallas_kernels")
SHIPPED = ("jaxpaged", *LINKED)
FOLDERS = (*SHIPPED, "tests", "scripts")
MAX_LINES = 300


def python_files(*folders: str) -> list[Path]:
    """The .py files under the folders; links such as jaxpaged/models are not followed."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def imports_of(folders: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files(*folders)
        for line, name in imported_modules(ast.parse(path.read_text("utf-8")))
        if name.split(".")[0] in forbidden
    ]


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=cwd, capture_output=True, text=True)


def test_there_are_files_to_check() -> None:
    for folder in FOLDERS:
        assert python_files(folder), f"no Python files under {folder}: the checks of this file would pass unseen"


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_intact(name: str) -> None:
    """A checkout that turns the links into files or copies imports stale or no code."""
    link = ROOT / "jaxpaged" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (link / "__init__.py").is_file()


def test_imports_of_linked_folders_name_jaxpaged() -> None:
    """`import models` would load a second copy of the code, under names that clash with other distributions."""
    assert imports_of(FOLDERS, LINKED) == []


def test_package_does_not_import_torch() -> None:
    assert imports_of(SHIPPED, ("torch",)) == []


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text("utf-8").splitlines()) for path in python_files(*FOLDERS)}
    assert {str(path): length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_modules_say_what_they_are() -> None:
    silent = [path for path in python_files(*FOLDERS) if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_import_contract_holds() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_types_are_checked_in_linked_folders() -> None:
    """pyright follows no links: models/ went unchecked, down to undefined names, as only jaxpaged/ was in its list."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    included = {(ROOT / name).resolve() for name in settings["include"]}
    folders = {path.resolve() for path in (ROOT / "jaxpaged").iterdir() if path.is_symlink()}
    assert len(folders) == len(LINKED)
    assert {path.name for path in {ROOT / "jaxpaged", *folders} - included} == set()


def test_wheel_holds_the_package_alone_and_whole(tmp_path: Path) -> None:
    """A link that the build does not follow makes a wheel without models; a folder too many clashes with others."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    packed = {name.as_posix() for name in names if not name.parts[0].endswith(".dist-info")}
    own = {path.relative_to(ROOT).as_posix() for path in python_files("jaxpaged")}
    linked = {f"jaxpaged/{path.relative_to(ROOT).as_posix()}" for path in python_files(*LINKED)}
    tables = {f"jaxpaged/pallas_kernels/paged_attention/{folder}tiles.json" for folder in ("", "mosaic/")}
    assert packed == own | linked | tables | {"jaxpaged/py.typed"}


IMPORT_EVERYTHING = """
import importlib.util, logging, os, pkgutil, signal, threading
import flax.nnx, jax, jax.experimental.pallas.mosaic_gpu, numba  # they set environment variables of their own
if importlib.util.find_spec("lm_eval"):
    import lm_eval.api.model  # so does this extra
before = dict(os.environ), logging.root.handlers[:], signal.getsignal(signal.SIGINT)
import jaxpaged
names = [module.name for module in pkgutil.walk_packages(jaxpaged.__path__, "jaxpaged.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":  # an extra
            raise
assert len(names) > 5, names
assert (dict(os.environ), logging.root.handlers[:], signal.getsignal(signal.SIGINT)) == before
assert threading.active_count() == 1, threading.enumerate()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_importing_has_no_effects(tmp_path: Path) -> None:
    """A backend brought up by an import takes the device's memory and fixes its options before anyone can set them."""
    result = run_python(IMPORT_EVERYTHING, tmp_path)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_is_quick(tmp_path: Path) -> None:
    """The command's --help and its errors come at once: neither jax nor transformers is loaded for them."""
    code = "import jaxpaged.cli, sys; print([name for name in ('jax', 'flax', 'transformers') if name in sys.modules])"
    result = run_python(code, tmp_path)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
