"""What was measured: rows by section, written to JSON and Markdown after every row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RUNNING = "running"
DONE = "done"


class Record:
    """Owner of the folder's gpu-check.json and gpu-check.md."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self._folder = folder
        self._content = content

    @classmethod
    def create(cls, folder: Path, *, dry: bool) -> Record:
        """An empty record, in the place of what the folder had."""
        folder.mkdir(parents=True, exist_ok=True)
        record = cls(folder, {"dry_run": dry, "machine": {}, "ceilings": {}, "sections": {}})
        record.flush()
        return record

    @classmethod
    def load(cls, folder: Path) -> Record:
        """What another process has written."""
        return cls(folder, json.loads((folder / "gpu-check.json").read_text("utf-8")))

    @property
    def folder(self) -> Path:
        """Where the record is, and room for what sections need on disk."""
        return self._folder

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """{name: {"status", "rows"}} in the order in which they began."""
        return self._content["sections"]

    @property
    def ceilings(self) -> dict[str, float]:
        """What the device was measured to do: "copy_bytes_per_second", "matmul_flops_per_second" …"""
        return self._content["ceilings"]

    @property
    def has_failures(self) -> bool:
        """Whether a section crashed, or a row is wrong or an error. What was skipped or refused is no failure."""
        sections = self.sections.values()
        crashed = any(not section["status"].startswith((DONE, "skipped")) for section in sections)
        return crashed or any(row.get("error") or row.get("right") is False for s in sections for row in s["rows"])

    def describe(self, machine: Row) -> None:
        """Note what the device and the software are."""
        self._content["machine"] |= machine
        self.flush()

    def begin(self, name: str) -> None:
        self.sections[name] = {"status": RUNNING, "rows": []}
        self.flush()

    def add(self, name: str, row: Row) -> None:
        self.sections[name]["rows"].append(row)
        self.flush()

    def end(self, name: str, status: str) -> None:
        self.sections[name]["status"] = status
        self.flush()

    def fail_running(self, reason: str) -> None:
        """Mark the section that was running when its process ended."""
        for section in self.sections.values():
            if section["status"] == RUNNING:
                section["status"] = reason
        self.flush()

    def flush(self) -> None:
        """Write both files; a reader never sees half of one."""
        for name, text in (("gpu-check.json", json.dumps(self._content, indent=1)), ("gpu-check.md", self.markdown())):
            part = self._folder / f"{name}.part"
            part.write_text(text, "utf-8")
            part.replace(self._folder / name)

    def markdown(self) -> str:
        """All sections as tables."""
        lines = ["# GPU check" + (" (dry run on CPU: no figure here means anything)" * self._content["dry_run"]), ""]
        facts = self._content["machine"] | self.ceilings
        lines += [f"- {name}: {_text(value)}" for name, value in facts.items()]
        for name, section in self.sections.items():
            lines += ["", f"## {name}", "", section["status"], *_table(section["rows"])]
        return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = ["| " + " | ".join(_text(row.get(name, "")) for name in names) + " |" for row in rows]
    return ["", "| " + " | ".join(names) + " |", "|" + "---|" * len(names), *body]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")
