"""The documentation: its programs run, its commands, tables, links and names are those of the code."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import BeamSearchParams, EngineConfig, SamplingParams, build, cli
from jaxpaged.models.registry import FAMILIES
from jaxpaged.models.weights.dequantise import KINDS
from jaxpaged.programs import Programs
from tests.support.absent_gpu import require_compiler
from tests.support.documents import (
    DOCUMENTS,
    ROOT,
    blocks_of,
    code_in,
    commands_of,
    links_of,
    name_of,
    prose_of,
    section_of,
    table_rows,
)
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import BYTE_EOS, BYTE_SIZE, byte_tokenizer

LANGUAGES = {"python", "bash", "text"}
WITH_PROGRAMS = [path for path in DOCUMENTS if any(block.language == "python" for block in blocks_of(path))]
WITH_COMMANDS = [path for path in DOCUMENTS if any(block.language == "bash" for block in blocks_of(path))]
CONFIGURATION = ROOT / "docs" / "configuration.md"
GRAPHS = ROOT / "docs" / "graphs.md"
REINFORCEMENT = ROOT / "docs" / "reinforcement-learning.md"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as small as can be that does what the demo model does: text, chat, the same length limit."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("docs") / "model",
        vocab_size=BYTE_SIZE,
        num_hidden_layers=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        eos_token_id=BYTE_EOS,
        tokenizer=byte_tokenizer(adds_bos=False),
        tokenizer_options={"chat_template": TEMPLATE},
    )


@pytest.fixture
def small_demo(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model is the small model, and only the programs that are used are compiled."""
    monkeypatch.setattr(build, "resolve_model", lambda name: str(model) if name == "demo" else name)
    monkeypatch.setattr(Programs, "start", lambda self, *_, **__: None)


def run_programs(path: Path) -> dict[str, Any]:
    """Run the document's python blocks as one program; its variables."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(path):
        if block.language == "python":
            source = "\n" * (block.line - 1) + block.text  # so that an error names the document's line
            exec(compile(source, str(path), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=name_of)
def test_programs_run(path: Path, small_demo: None) -> None:
    if path == GRAPHS:
        require_compiler()
    namespace = run_programs(path)
    if path == REINFORCEMENT:
        rewards = namespace["rewards"]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    if path == CONFIGURATION:
        documented = [row[0] for row in table_rows(section_of(path, "Statistics"))]
        assert sorted(documented) == sorted(namespace["llm"].stats())


def test_there_are_programs_and_commands() -> None:
    """Were the blocks not found, nothing below would be checked."""
    pages = {"docs/async.md", "docs/generate.md", "docs/sampling.md", "docs/configuration.md", "docs/models.md"}
    assert {"README.md", *pages} <= {name_of(path) for path in WITH_PROGRAMS}
    assert {"README.md", "docs/cli.md", "docs/benchmarks.md"} <= {name_of(path) for path in WITH_COMMANDS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_blocks_name_their_language(path: Path) -> None:
    """A block without one would be neither run nor checked, unseen."""
    assert [(block.line, block.language) for block in blocks_of(path) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    local = [link for link in links_of(path) if "://" not in link and not link.startswith("#")]
    assert [link for link in local if not (path.parent / link.split("#")[0]).exists()] == []


# --- commands


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name_of)
def test_commands_exist(path: Path) -> None:
    for block in blocks_of(path):
        if block.language == "bash":
            for words in commands_of(block):
                check_command(words, f"{name_of(path)}, line {block.line}: {' '.join(words)}")


def test_make_runs_scripts_as_modules() -> None:
    """`make bench` ran scripts/bench.py as a file, which then could not import its neighbours."""
    recipes = (ROOT / "Makefile").read_text("utf-8")
    named = re.findall(r"-m (scripts\.\w+)", recipes)
    assert named
    assert all(script_file(module).is_file() for module in named)
    assert "python scripts/" not in recipes


def check_command(words: list[str], where: str) -> None:
    program, arguments = Path(words[0]).name, words[1:]
    if program == "jaxpaged":
        check_jaxpaged(arguments, where)
    elif program == "make":
        targets = {word for word in arguments if "=" not in word}
        assert targets <= make_targets(), where
    elif program.startswith("python"):
        check_python(arguments, where)
    else:
        assert program in {"pip", "git", "cd"}, f"{where}: a command that this test does not know"


def check_jaxpaged(arguments: list[str], where: str) -> None:
    """Parse with the command's own parser, and check the values as the command does."""
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            cli.main(arguments)
        return
    try:
        parsed = vars(cli._parser().parse_args(arguments))
    except SystemExit:
        pytest.fail(f"{where}: refused by the command line")
    options = {name: value for name, value in parsed.items() if name in cli.engine_fields()}
    EngineConfig.create(parsed["model"], **options)
    if "prompts" in parsed:
        cli._sampling_params(argparse.Namespace(**parsed))


def check_python(arguments: list[str], where: str) -> None:
    """A module or file of scripts/, with options that it has."""
    if arguments[:2] == ["-m", "venv"]:
        return
    file = script_file(arguments.pop(1)) if arguments[0] == "-m" else ROOT / arguments[0]
    assert file.is_file() and file.is_relative_to(ROOT / "scripts"), where
    known = script_options(file)
    assert {word for word in arguments[1:] if word.startswith("--")} <= known, f"{where}: options are {known}"


def script_file(module: str) -> Path:
    """Of a module, or of a package that is run."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def script_options(file: Path) -> set[str]:
    """The options that a script adds to its parser."""
    calls = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    names = [argument.value for call in added for argument in call.args if isinstance(argument, ast.Constant)]
    return {name for name in names if name.startswith("--")}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


# --- tables and names


def documented_defaults(path: Path, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, str]:
    names = {field.name for field in fields}
    return {row[0]: row[1].strip("`") for row in table_rows(path.read_text("utf-8")) if row[0] in names}


@pytest.mark.parametrize(
    ("kind", "page"),
    [(EngineConfig, "configuration.md"), (SamplingParams, "sampling.md"), (BeamSearchParams, "beam-search.md")],
)
def test_every_field_is_documented_with_its_default(kind: type, page: str) -> None:
    fields = dataclasses.fields(kind)
    wanted = {
        field.name: "required" if field.default is dataclasses.MISSING else str_of(field.default) for field in fields
    }
    assert documented_defaults(ROOT / "docs" / page, fields) == wanted


def str_of(value: object) -> str:
    """As one writes it: an enum's member by its name."""
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def test_what_can_be_loaded_is_documented() -> None:
    text = prose_of(ROOT / "docs" / "models.md")
    assert [kind for kind in KINDS.values() if not re.search(rf"\b{kind}\b", text)] == []
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []


def test_the_path_of_a_request_names_what_exists() -> None:
    names, known = code_in(section_of(ROOT / "ARCHITECTURE.md", "A request's path")), qualified_names()
    assert len([name for name in names if "." in name]) >= 9
    assert [name for name in names if name not in known] == []


def qualified_names() -> set[str]:
    """Functions, classes, Class.method and module.function of the package."""
    names: set[str] = set()
    for path in package_files():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names |= {node.name, f"{path.stem}.{node.name}"}
            if isinstance(node, ast.ClassDef):
                inner = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                names |= {f"{node.name}.{name}" for name in inner}
    return names


def package_files() -> list[Path]:
    return [
        path
        for folder in ("jaxpaged", "models", "sharding", "pallas_kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_the_readme_tree_is_the_tree() -> None:
    """Each line is a path below the last folder of less indentation; every module of the package has its line."""
    (tree,) = [block.text for block in blocks_of(ROOT / "README.md") if block.text.startswith("jaxpaged/")]
    listed: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in filter(str.strip, tree.splitlines()):
        name, indent = line.split()[0], len(line) - len(line.lstrip())
        folders = [folder for folder in folders if folder[0] < indent]
        path = (folders[-1][1] if folders else "") + name
        listed.add(path)
        if name.endswith("/"):
            folders.append((indent, path))
        else:
            assert len(line.split()) > 1, f"{path} has no phrase"
    assert [path for path in listed if not (ROOT / path).exists()] == []
    modules = {path.relative_to(ROOT).as_posix() for path in package_files() if path.name != "__init__.py"}
    assert sorted(modules - listed) == []
