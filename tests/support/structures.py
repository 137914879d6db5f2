"""Structures for tests: each with what checks an output's text, and walks through their constraints."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import numpy as np

from jaxpaged.structured_outputs import GrammarConstraint, StructuredOutputs
from jaxpaged.structured_params import StructuredOutputsParams
from jaxpaged.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["hell", "hello", "é한😀"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SHORT = {"whitespace_pattern": " ?"}  # random models like whitespace without end


def follows(schema: Any, text: str) -> bool:
    """Whether text is JSON that the schema allows."""
    jsonschema.validate(json.loads(text), schema)
    return True


def matches(regex: str) -> Callable[[str], bool]:
    """Whether all of a text matches."""
    return lambda text: re.fullmatch(regex, text) is not None


# A structure for each kind, small enough for random models to end soon, and what its outputs are checked with.
STRUCTURES: dict[str, tuple[Mapping[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": PERSON, **SHORT}, lambda text: follows(PERSON, text)),
    "json text": ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, lambda text: follows(PERSON, text)),
    "regex": ({"regex": r"[0-9]{3}-(é|한|😀){2}"}, matches("[0-9]{3}-(é|한|😀){2}")),
    "leading space": ({"regex": r" {0,2}the end!"}, matches(" {0,2}the end!")),
    "choice": ({"choice": ["hello", "hell", "</s>", 'a "b"\\\n', "é한😀"]}, lambda text: text in _CHOICE),
    "lark": ({"grammar": 'start: item ("," item){2}\nitem: "the" | /[a-c]{1,3}/'}, matches("(,?(the|[a-c]{1,3})){3}")),
    "ebnf": ({"grammar": 'root ::= sum "="\nsum ::= [0-9] ("+" [0-9])?'}, matches(r"[0-9](\+[0-9])?=")),
}
_CHOICE = ("hello", "hell", "</s>", 'a "b"\\\n', "é한😀")


def allowed(constraint: GrammarConstraint, vocab_size: int) -> list[int]:
    """The ids that may come next."""
    row = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    constraint.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def wander(
    constraint: GrammarConstraint, vocab_size: int, ending: frozenset[int], rng: random.Random, *, most: int = 400
) -> list[int]:
    """Token ids chosen at random from what is allowed, the end excluded, until nothing else is or by chance."""
    ids: list[int] = []
    while not constraint.finished:
        choices = allowed(constraint, vocab_size)
        assert choices, f"a dead end after {ids}: {constraint.failure}"
        if ending.intersection(choices) and rng.random() < 0.3:
            break
        ids.append(rng.choice([token for token in choices if token not in ending]))
        constraint.accept(ids[-1])
        assert len(ids) < most, "no end comes"
    return ids


def constraint_of(
    tokenizer: Tokenizer, vocab_size: int, ending: frozenset[int] = frozenset(), **structure: Any
) -> GrammarConstraint:
    """A fresh constraint, from an engine's worth of nothing."""
    return StructuredOutputs(tokenizer, vocab_size).constraint(StructuredOutputsParams(**structure), ending)
