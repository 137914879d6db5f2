"""Reading the project's Markdown: code blocks, tables, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
)

_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language as written, its first line's number in the file (from 1), its text."""

    language: str
    line: int
    text: str


def name_of(path: Path) -> str:
    """The document's path from the project's root."""
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    found: list[Block] = []
    language: str | None = None
    start, lines = 0, path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if language is None:
            language, start = fence[1], number + 1
        else:
            found.append(Block(language=language, line=start, text="\n".join(lines[start - 1 : number - 1])))
            language = None
    assert language is None, f"{name_of(path)}: the block that starts at line {start} has no end"
    return found


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a bash block; lines that end with a backslash go on, comments are left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def prose_of(path: Path) -> str:
    """The document without its fenced blocks."""
    lines, inside = [], False
    for line in path.read_text("utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links_of(path: Path) -> list[str]:
    """Targets of the document's links."""
    return _LINK.findall(prose_of(path))


def section_of(path: Path, title: str) -> str:
    """The text under a heading of any level, up to the next heading of the same or a higher one."""
    lines = path.read_text("utf-8").splitlines()
    level, start = next(
        (len(line) - len(line.lstrip("#")), number)
        for number, line in enumerate(lines)
        if line.startswith("#") and line.lstrip("#").strip() == title
    )
    end = next(
        (
            number
            for number, line in enumerate(lines[start + 1 :], start + 1)
            if line.startswith("#") and len(line) - len(line.lstrip("#")) <= level
        ),
        len(lines),
    )
    return "\n".join(lines[start + 1 : end])


def table_rows(text: str) -> list[list[str]]:
    """The cells of all table rows in the text whose first cell is one word of code, that word without its marks."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    coded = [(re.fullmatch(r"`(\w+)`", cells[0]), cells) for cells in rows]
    return [[match[1], *cells[1:]] for match, cells in coded if match is not None]


def code_in(text: str) -> list[str]:
    """What stands between single backquotes."""
    return _CODE.findall(text)
