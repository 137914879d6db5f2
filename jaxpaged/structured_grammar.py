"""What a StructuredOutputsParams asks for, as a grammar in llguidance's own format."""

from __future__ import annotations

import json
from typing import Any

from jaxpaged.structured_params import StructuredOutputsParams

# Where a JSON schema holds schemas: one, a list of them, or a mapping whose values they are.
_ONE = ("items", "contains", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar as JSON text. Equal requests give equal texts. ValueError for EBNF that cannot be read."""
    return json.dumps({"grammars": [_grammar(params)]}, ensure_ascii=False)


def preceded(grammar: str, text: str, *, optional: bool) -> str:
    """The language of `grammar` with `text` in front of each word, or perhaps in front."""
    start = f"start: {json.dumps(text)}{'?' if optional else ''} @structure"
    (whole,) = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": start}, whole | {"name": "structure"}]}, ensure_ascii=False)


def _grammar(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.regex is not None:
        return _only(_llguidance().grammar_from_regex(params.regex))
    if params.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)}
    if params.grammar is not None:
        return {"lark_grammar": _lark(params.grammar)}
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    if params.disable_additional_properties:
        schema = closed(schema)
    return _only(_llguidance().grammar_from_json_schema(json.dumps(schema), overrides=_options(params)))


def _options(params: StructuredOutputsParams) -> dict[str, Any] | None:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    return None


def closed(schema: Any) -> Any:
    """The schema with additionalProperties: false in every object schema that names properties and does not say.

    Only schemas are looked into, so that a property called "properties", or a constant that looks like a schema,
    stays as it is. Members of allOf are closed, too: then each allows its own properties only.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in (key for key in _ONE if isinstance(schema.get(key), dict)):
        result[key] = closed(schema[key])
    for key in (key for key in _LISTS if isinstance(schema.get(key), list)):
        result[key] = [closed(member) for member in schema[key]]
    for key in (key for key in _MAPPINGS if isinstance(schema.get(key), dict)):
        result[key] = {name: closed(member) for name, member in schema[key].items()}
    if isinstance(result.get("additionalProperties"), dict):
        result["additionalProperties"] = closed(result["additionalProperties"])
    elif "properties" in schema or "patternProperties" in schema:
        result.setdefault("additionalProperties", False)
    return result


def _lark(text: str) -> str:
    """A Lark grammar as it is, one in EBNF (root ::= …) as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # of its own kinds, and IndexError and the like for text that ends too early
        raise ValueError(f"the EBNF grammar could not be read: {error}") from None


def _only(grammar: str) -> dict[str, Any]:
    (whole,) = json.loads(grammar)["grammars"]
    return whole


def _llguidance() -> Any:
    from llguidance import LLMatcher

    return LLMatcher
