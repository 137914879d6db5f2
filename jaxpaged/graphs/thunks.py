"""Reads XLA's dump of a program's schedule: one line per thunk, indented below the loop or command buffer it is in."""

from __future__ import annotations

import re

from jaxpaged.graphs.report import Launch

_LINE = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)\s+\[[^\]]*\] ?(?P<text>.*)$")
_KERNEL = re.compile(
    r"^(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\]\s+"
    r"shared_memory: (?P<shared>\d+) bytes"
)
INDENT = 4  # blanks a level


def parse_thunks(text: str) -> tuple[Launch, ...]:
    """The schedule's entries, those of nested sequences after what they are nested in."""
    launches: list[Launch] = []
    inside: list[tuple[int, int]] = []  # depth and number of the command buffers around this line
    buffers = 0
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"]) // INDENT
        inside = [entry for entry in inside if entry[0] < depth]
        launches.append(_launch(match["kind"], match["text"].strip(), depth, inside[0][1] if inside else None))
        if match["kind"] == "kCommandBuffer":
            inside.append((depth, buffers))
            buffers += 1
    return tuple(launches)


def _launch(kind: str, text: str, depth: int, command_buffer: int | None) -> Launch:
    kernel = _KERNEL.match(text)
    return Launch(
        kind=kind,
        name=kernel["name"] if kernel else text,
        depth=depth,
        grid=_sizes(kernel["grid"]) if kernel else (),
        threads=_sizes(kernel["threads"]) if kernel else (),
        dynamic_shared=int(kernel["shared"]) if kernel else 0,
        command_buffer=command_buffer,
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))
