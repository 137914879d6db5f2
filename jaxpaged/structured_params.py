"""What form a request's output must have, under vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, no_type_check

from jaxpaged.keywords import reject_unknown_keywords
from jaxpaged.parameter_checks import flag, strings

FORMS = ("json", "regex", "choice", "grammar", "json_object")
JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@no_type_check  # at run time: the annotations are of what is stored; what is given is checked and converted here
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Frozen, checked on construction: exactly one of json, regex, choice, grammar, json_object is given."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema; stored as JSON text
    regex: str | None = None  # the whole output matches it
    choice: tuple[str, ...] | Sequence[str] | None = None  # the output is one of these
    grammar: str | None = None  # EBNF or Lark
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # JSON without whitespace between its tokens
    disable_additional_properties: bool = False  # JSON objects have no properties that the schema does not name
    whitespace_pattern: str | None = None  # a regular expression for the whitespace between JSON tokens

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        reject_unknown_keywords(cls.__name__, keywords, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            object.__setattr__(self, name, value)
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs: exactly one of {', '.join(FORMS)} must be given, got {given or None}"
            )

        self._check_json_options(json=given[0].startswith("json"))

    def _check_json_options(self, *, json: bool) -> None:
        asked = [name for name in JSON_OPTIONS if getattr(self, name)]
        if asked and not json:
            raise ValueError(f"structured_outputs: {asked[0]} goes with json and json_object only")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                "structured_outputs: whitespace_pattern says which whitespace is allowed and disable_any_whitespace "
                "allows none: give one of them"
            )

    def _normalised(self) -> dict[str, Any]:
        """Every field that needs conversion, checked alone."""
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs: {name} must be a non-empty string, got {value!r}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            flag(f"structured_outputs: {name}", getattr(self, name))
        if self.json_object is not None:
            flag("structured_outputs: json_object", self.json_object)
        choice = None if self.choice is None else strings("structured_outputs: choice", self.choice, single=False)
        if choice == ():
            raise ValueError("structured_outputs: choice must hold at least one string, got none")
        return {"json": _schema(self.json), "choice": choice, "json_object": self.json_object or None}


def _schema(given: object) -> str | None:
    """The schema as JSON text."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return json.dumps(dict(given), ensure_ascii=False)
    if not isinstance(given, str):
        raise ValueError(f"structured_outputs: json must be a schema as a mapping or as JSON text, got {given!r}")
    try:
        json.loads(given)
    except ValueError as error:
        raise ValueError(f"structured_outputs: json is no JSON text: {error}") from None
    return given
