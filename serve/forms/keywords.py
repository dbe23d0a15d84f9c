"""Keywords of JSON schemas that engines do not enforce, with their places. Pure.

llguidance follows schemas of answers, and xgrammar those of tools (grammars.py). Both ignore in silence what they do
not know; tests/property/test_schema_keywords.py tries every keyword on both.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

Schema = dict[str, Any]

OPTIONS: Final = {"whitespace_flexible": False, "lenient": True}
"""llguidance's. Without whitespace, so that no answer pads itself to its limit. `lenient` ignores unknown keywords: the
gateway refuses them where they are promised."""
# Keywords that llguidance ignores, each with a value that restricts nothing (None: every value restricts).
_IGNORED: Final[dict[str, Any]] = {
    **dict.fromkeys(("not", "if", "contains", "propertyNames", "$dynamicRef", "$recursiveRef"), None),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), {}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), True),
    "uniqueItems": False,
}
# Formats that JSON Schema defines and llguidance ignores. A format that it does not define restricts nothing.
_IGNORED_FORMATS: Final = frozenset(
    (
        "idn-email idn-hostname iri iri-reference uri-reference uri-template json-pointer relative-json-pointer regex"
    ).split()
)
# Where a schema of a tool needs a type, and the keywords that xgrammar enforces for each.
_TOOL_KEYS: Final[dict[str, frozenset[str]]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("format",)),
    **dict.fromkeys(("number", "integer"), frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))),
    "boolean": frozenset(),
    "null": frozenset(),
}
# Keywords that xgrammar enforces only without others, but for a type.
_TOOL_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
COSTLY: Final = frozenset(
    "pattern patternProperties propertyNames minLength maxLength minProperties maxProperties".split()
)
"""Keywords that tools' grammars leave out. xgrammar took 2.4 s to compile a `maxLength` of 500 with 49,152 tokens, 15 s
for counted properties, and 25 s and more, within a step of the engine, for one mask of the pattern
`^(\\w{1,20}\\s?){1,50}$`."""
NOT_IN_TOOLS: Final = frozenset(("pattern", "minLength", "maxLength", "multipleOf"))
"""Calls of a tool are not held to these, even with `strict`: they bind single values, and a refusal would keep the
client from its tool."""
_RESTRICTING: Final = COSTLY.union(NOT_IN_TOOLS, _TOOL_ALONE, *_TOOL_KEYS.values(), ("prefixItems", "additionalItems"))
_COMBINERS: Final = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_NEAR: Final = re.compile(r"#(/[^/]+/[^/]+)?\Z")
_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


class Fault(NamedTuple):
    """A keyword that is not enforced, and its place below the root, such as `properties.a.not`."""

    keyword: str
    path: str


def fault(schema: Schema, *, of_tool: bool = False) -> Fault | None:
    """The first keyword that is not enforced, in a schema of an answer or of a tool's arguments."""
    for path, node in _nodes(schema):
        if keyword := _ignored(node) or (_outside_tools(node) if of_tool else ""):
            return Fault(keyword, f"{path}{keyword}")
    return None


def left_out_of_tools(schema: Schema) -> Iterator[str]:
    """The places of the keywords that the calls of a strict tool are not held to, such as `properties.a.pattern`."""
    for path, node in _nodes(schema):
        yield from (f"{path}{keyword}" for keyword in sorted(node.keys() & NOT_IN_TOOLS))


def counted(schema: Any) -> float:
    """The sum of all `minItems` and `maxItems`. llguidance writes out every item: 10,000 take it 0.2 s, and 2**31
    ended its process for want of memory."""
    bounds = (node.get(name) for _, node in _nodes(schema) for name in ("minItems", "maxItems"))
    return sum(bound for bound in bounds if isinstance(bound, int | float) and bound > 0)


def defined(schema: Any) -> int:
    """The number of definitions. llguidance follows references by recursion: a chain of 400 through lists of objects
    passed, and 500 ended its process."""
    found = (node.get(name) for _, node in _nodes(schema) for name in ("$defs", "definitions"))
    return sum(len(named) for named in found if isinstance(named, dict))


def closed(schema: Schema) -> Schema:
    """The schema whose objects have only the properties that it names, unless it says otherwise: as xgrammar reads it,
    and OpenAI's strict mode. Unchanged where schemas are combined, which would exclude each other's properties."""
    for _, node in _nodes(schema):
        parts = node.get("allOf")
        if (isinstance(parts, list) and len(parts) > 1) or ("properties" in node and node.keys() & _COMBINERS):
            return schema
    made = copy.deepcopy(schema)
    for _, node in _nodes(made):
        if "properties" in node or "patternProperties" in node:
            node.setdefault("additionalProperties", False)
    return made


def without(keywords: frozenset[str], schema: Any) -> Any:
    """The schema without these keywords, its names of properties kept."""
    if isinstance(schema, list):
        return [without(keywords, one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: without(keywords, one) for name, one in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else value
        if key in ("enum", "const", "default", "examples")
        else without(keywords, value)
        for key, value in schema.items()
        if key not in keywords
    }


def _ignored(node: Schema) -> str:
    for keyword in node.keys() & _IGNORED.keys():
        if _IGNORED[keyword] is None or node[keyword] != _IGNORED[keyword]:
            return keyword
    form = node.get("format")
    if isinstance(form, str) and form in _IGNORED_FORMATS:
        return "format"
    if _names(node.get("properties")) - _names(node.get("required")):
        return next((bound for bound in ("minProperties", "maxProperties") if bound in node), "")
    return ""


def _names(value: Any) -> set[str]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, dict | list) else set()


def _outside_tools(node: Schema) -> str:
    used = node.keys() & _RESTRICTING
    for alone in _TOOL_ALONE:
        if alone in used:
            value = node[alone]
            far = alone == "$ref" and not (isinstance(value, str) and _NEAR.match(value))
            several = alone == "allOf" and isinstance(value, list) and len(value) > 1
            # Values of another type than the schema's are the schema's own contradiction.
            typed = "type" in node and alone in _COMBINERS
            return alone if far or several else min(used - {alone}, default="type" if typed else "")
    if _names(node.get("required")) - _names(node.get("properties")):
        return "required"
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return min(used.difference(*(_TOOL_KEYS.get(kind, ()) for kind in kinds if isinstance(kind, str))), default="")


def _nodes(schema: Any) -> Iterator[tuple[str, Schema]]:
    """All schemas in a schema, itself first, each with its path, which ends in a dot."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, list):
            stack.extend((f"{path}{place}.", one) for place, one in reversed(list(enumerate(node))))
        elif isinstance(node, dict):
            yield path, node
            for key, value in reversed(node.items()):
                if key in _MAPS and isinstance(value, dict):
                    stack.extend((f"{path}{key}.{name}.", one) for name, one in reversed(value.items()))
                elif key not in ("enum", "const", "default", "examples"):
                    stack.append((f"{path}{key}.", value))
