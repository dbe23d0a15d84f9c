"""A schema that passes is enforced: llguidance accepts no value that jsonschema refuses.

Each keyword of JSON Schema is tried alone and with others, with valid and invalid values. `keywords` must refuse
schemas that llguidance does not enforce. `oneOf` is enforced as `anyOf`.
"""

import json
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.keywords import OPTIONS, unenforced

Schema = dict[str, Any]
SPACED = OPTIONS | {"whitespace_flexible": True}  # the separators of json.dumps
BYTES = llguidance.LLTokenizer("byte")
TEXTS = ["", "a", "ab", "abc", "abcd", "A", "2024-01-01", "2024-13-45", "a@b.co", "12:00:00Z", "127.0.0.1", "999.1.1.1"]
TEXTS += ["::1", "http://a.b/c", "not a uri", "123e4567-e89b-12d3-a456-426614174000", "P1D", "/a/b", "[a", "a+"]
NUMBERS = [0, 1, 2, 3, 4, 5, 6, 10, -1, -5, 100, 1.5, 2.5, 0.1]
OBJECTS = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"a": 1, "b": "y"}, {"c": 1}, {"a": 1, "b": 2, "c": 3}]
OBJECTS += [{"ab": 1}, {"x_1": 1}, {"x_1": "s"}, {"a": 2, "x_1": 1}]
LISTS = [[], [1], [1, 1], [1, 2], ["a"], ["a", 1], ["a", "a"], [1, "a"], [1, 2, 3], [1, 2, 2], ["a", "b", "c", "d"]]
VALUES = [*TEXTS, *NUMBERS, *OBJECTS, *LISTS, None, True, False]

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"a": INTEGER, "b": INTEGER}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
TYPES = ("string", "integer", "number", "object", "array", ["integer", "null"], ["integer", "string"])
ALONE: list[tuple[str, list[Any]]] = [
    ("type", list(TYPES)),
    ("const", [1, {"a": 1}]),
    ("enum", [["a", 1], [True, 1]]),
    ("anyOf", [[INTEGER, TEXT], [{"minimum": 3}, {"maximum": 0}], [{"required": ["a"]}, {"required": ["b"]}]]),
    ("oneOf", [[INTEGER, TEXT], [INTEGER, {"type": "number"}], [A, B]]),
    ("oneOf", [[{**A, "properties": {"a": {"const": value}}} for value in (1, "x")]]),
    ("allOf", [[A], [A, B], [{"minimum": 3}]]),
    ("not", [{"type": "string"}, {}]),
    ("then", [{"required": ["b"]}]),
    ("properties", [AB, {"a": False}]),
    ("required", [["a"]]),
    ("additionalProperties", [False, TEXT]),
    ("patternProperties", [{"^x_": INTEGER}]),
    ("propertyNames", [{"pattern": "^[ab]$"}, {"enum": ["a", "b"]}, {"maxLength": 1}]),
    ("minProperties", [2]),
    ("maxProperties", [1]),
    ("dependentRequired", [{"a": ["b"]}, {}]),
    ("dependentSchemas", [{"a": {"required": ["b"]}}]),
    ("unevaluatedProperties", [False]),
    ("items", [INTEGER, False]),
    ("prefixItems", [[INTEGER, TEXT]]),
    ("unevaluatedItems", [False]),
    ("contains", [INTEGER]),
    *((name, [2]) for name in ("minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum")),
    ("uniqueItems", [True, False]),
    *((name, [3]) for name in ("minLength", "maxLength")),
    ("pattern", ["^a+b?$", "b"]),
    ("format", ["date", "ipv4", "uuid", "color"]),
    ("multipleOf", [5, 0.5]),
]
PARTS: list[Schema] = [
    *({keyword: value} for keyword, values in ALONE for value in values),
    {"maximum": 4.5},
    {"exclusiveMinimum": 1},
    {"contains": INTEGER, "minContains": 2},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"$ref": "#/$defs/i", "$defs": {"i": {"type": "integer", "minimum": 3}}},
    {"$ref": "#named", "$defs": {"i": {"$anchor": "named", "type": "integer"}}},
    {"title": "T", "default": 7, "examples": [1], "nullable": True, "x-own": 1},
]


FORMATS = (
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex"
).split()


def accepted(schema: Schema) -> list[Any]:
    """The values that llguidance accepts for the schema."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=SPACED)
    return [value for value in VALUES if accepts(grammar, json.dumps(value))]


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def as_read(schema: Any) -> Any:
    """The schema as llguidance reads it, with `anyOf` in place of `oneOf`."""
    if isinstance(schema, list):
        return [as_read(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: as_read(value) for key, value in schema.items() if key != "oneOf"}
    if "oneOf" in schema:
        made["allOf"] = [*made.get("allOf", ()), {"anyOf": as_read(schema["oneOf"])}]
    return made


def check(schema: Schema) -> None:
    if not list(unenforced(schema)):
        formats = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
        known = jsonschema.Draft202012Validator(as_read(schema), format_checker=formats)
        assert not [value for value in accepted(schema) if not known.is_valid(value)]


@pytest.mark.parametrize("part", PARTS, ids=json.dumps)
@pytest.mark.parametrize("kind", [None, "object", "array", "string", "integer", "number"])
def test_each_keyword_is_enforced_or_refused(part: Schema, kind: str | None) -> None:
    check(part if kind is None else {"type": kind, **part})


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(PARTS), min_size=2, max_size=4), st.sampled_from(["", "a", "anyOf", "items"]))
def test_keywords_together_are_enforced_or_refused(parts: list[Schema], below: str) -> None:
    schema: Schema = {}
    for part in parts:
        schema |= part
    if below == "a":
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": schema.get("$defs", {})}
    elif below == "anyOf":
        schema = {"anyOf": [schema, {"type": "null"}], "$defs": schema.get("$defs", {})}
    elif below == "items":
        schema = {"type": "array", "items": schema, "$defs": schema.get("$defs", {})}
    check(schema)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_enforced_or_refused(name: str) -> None:
    schema = {"type": "string", "format": name}
    if not list(unenforced(schema)):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=SPACED)
        assert not accepts(grammar, '" {[<never a form> "')
