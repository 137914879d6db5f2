"""Structured-output parameters: exactly one form, checked and stored as hashable values."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from jaxpaged.structured_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


def test_stored_forms() -> None:
    by_mapping = StructuredOutputsParams(json=SCHEMA)
    assert isinstance(by_mapping.json, str)
    assert json.loads(by_mapping.json) == SCHEMA
    assert StructuredOutputsParams(json=by_mapping.json) == by_mapping == pickle.loads(pickle.dumps(by_mapping))
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert hash(dataclasses.replace(by_mapping, disable_any_whitespace=True)) != hash(by_mapping)
    assert StructuredOutputsParams(json_object=False, regex="a+").json_object is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, r"exactly one .*\['regex', 'choice'\]"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"grammar": 3}, "grammar must be a non-empty string"),
        ({"choice": []}, "at least one"),
        ({"choice": "ab"}, "choice must be a sequence"),
        ({"json": "{"}, "no JSON text"),
        ({"json": 3}, "mapping or as JSON text"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace goes with json"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern goes with json"),
        ({"json": "{}", "disable_any_whitespace": True, "whitespace_pattern": " "}, "give one of them"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs: .*{said}"):
        StructuredOutputsParams(**options)


def test_unknown_form_is_named() -> None:
    with pytest.raises(TypeError, match="unknown keyword 'regexp'; did you mean 'regex'"):
        StructuredOutputsParams(regexp="a")  # pyright: ignore[reportCallIssue]
