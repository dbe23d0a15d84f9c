"""Which grammar backend enforces all of a JSON schema, and the keyword that none enforces. Needs llguidance alone.

llguidance refuses a schema with a keyword that it does not enforce. xgrammar passes over such keywords, and over those
beside `anyOf`, `allOf`, `$ref` or `enum`. So xgrammar gets schemas made of the parts that are listed here
(tests/property/test_schema_keywords.py tries each on both), and llguidance all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import llguidance

Schema = dict[str, Any]

ASSERTIONS: Final = frozenset(
    (
        "type enum const anyOf oneOf allOf not if then else $ref $dynamicRef $recursiveRef $dynamicAnchor properties "
        "patternProperties additionalProperties propertyNames minProperties maxProperties required dependentRequired "
        "dependentSchemas dependencies unevaluatedProperties items prefixItems additionalItems contains minContains "
        "maxContains minItems maxItems uniqueItems unevaluatedItems minLength maxLength pattern format minimum maximum "
        "exclusiveMinimum exclusiveMaximum multipleOf"
    ).split()
)
"""Keywords that restrict values, of all drafts. Any other key of a schema is a note."""
FORMATS: Final = frozenset(
    (
        "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri "
        "iri-reference uuid uri-template json-pointer relative-json-pointer regex"
    ).split()
)
"""Formats that JSON Schema defines. Any other is a note, as its specification says."""

_XGRAMMAR_FORMATS: Final = FORMATS - {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"}
_XGRAMMAR_KEYS: Final = {
    "object": frozenset(
        "properties required additionalProperties unevaluatedProperties propertyNames minProperties "
        "maxProperties".split()
    ),
    "array": frozenset("items prefixItems minItems maxItems".split()),
    "string": frozenset("minLength maxLength format".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_NUMBERS: Final = _XGRAMMAR_KEYS["number"] | frozenset(
    "minLength maxLength minItems maxItems minProperties maxProperties".split()
)
_LARGEST_BOUND: Final = 1 << 62
_COMBINERS: Final = ("$ref", "anyOf", "oneOf", "allOf")
_MAPS: Final = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
_LISTS: Final = frozenset("anyOf oneOf allOf prefixItems".split())
_SCHEMAS: Final = frozenset(
    "items additionalProperties additionalItems unevaluatedProperties unevaluatedItems propertyNames contains not if "
    "then else".split()
)
_PYTHON: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_UNIMPLEMENTED: Final = re.compile(r'Unimplemented keys: \["([^"]+)"')
_UNKNOWN_FORMAT: Final = re.compile(r"Unknown format: (.+)")
_LOCAL: Final = re.compile(r"#(/[^/]+/[^/]+)?\Z")


class Fault(NamedTuple):
    """Part of a schema that no backend enforces. keyword: empty if the schema as a whole is at fault; path: of the
    keyword below the schema's root, such as `properties.a.not`; why: a clause."""

    keyword: str
    path: str
    why: str


def fault(schema: Schema) -> Fault | None:
    """What keeps a schema of an answer from being enforced; None if a backend enforces all of it."""
    refusal = _llguidance_refusal(schema)
    if not refusal or (_outside_xgrammar(schema) is None and not _has(schema, "oneOf")):
        return None
    return _named(schema, refusal)


def fault_of_tool(schema: Schema) -> Fault | None:
    """The same for a tool's arguments, which xgrammar alone follows: they are part of a structural tag."""
    outside = _outside_xgrammar(schema, patterns=True)
    if outside is None and _has(schema, "oneOf") and (refusal := _llguidance_refusal(schema)):
        return _named(schema, refusal)
    return outside


def goes_to_llguidance(schema: Schema) -> bool:
    """Whether llguidance enforces this schema, and xgrammar may not, or not in time: a text of `maxLength` 500 takes
    xgrammar 13 s on two busy cores with 49,152 tokens, and llguidance milliseconds. Where the length of a text is
    bounded, xgrammar also admits raw control characters, which JSON does not."""
    bounded = _has(schema, "maxLength") or _has(schema, "minLength")
    return (bounded or _outside_xgrammar(schema) is not None) and not _llguidance_refusal(schema)


def without_notes(schema: Schema) -> Schema:
    """The same schema without what restricts nothing but llguidance refuses. Returns the argument if there is none of
    it. schema: at most a few dozen levels deep."""
    made: Schema = {}
    changed = False
    for key, value in schema.items():
        if _is_note(schema, key, value):
            changed = True
            continue
        inner = value
        if key in _MAPS and isinstance(value, dict):
            inner = {name: without_notes(one) if isinstance(one, dict) else one for name, one in value.items()}
        elif key in _LISTS and isinstance(value, list):
            inner = [without_notes(one) if isinstance(one, dict) else one for one in value]
        elif key in _SCHEMAS and isinstance(value, dict):
            inner = without_notes(value)
        changed = changed or inner != value
        made[key] = inner
    return made if changed else schema


def _is_note(schema: Schema, key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and not _in(value, FORMATS)
    if key in ("then", "else"):
        return "if" not in schema
    if key == "uniqueItems":
        return value is False
    return key in ("dependentRequired", "dependentSchemas", "dependencies") and value == {}


def _llguidance_refusal(schema: Schema) -> str:
    """Its words; empty if it enforces the schema."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_flexible": True}
        )
        refusal = llguidance.LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        return str(error)
    if refusal:
        return refusal
    # It reads `additionalItems` as the older drafts do, in which `prefixItems` means nothing.
    for _, node in _nodes(schema):
        if "additionalItems" in node and "prefixItems" in node:
            return 'Unimplemented keys: ["additionalItems"]'
    return ""


def _named(schema: Schema, refusal: str) -> Fault:
    if found := _UNIMPLEMENTED.search(refusal):
        keyword, value = found[1], None
    elif found := _UNKNOWN_FORMAT.search(refusal):
        keyword, value = "format", found[1]
    elif refusal.startswith("oneOf"):
        keyword, value = "oneOf", None
    elif refusal.startswith("min/maxProperties"):
        keyword, value = next(name for name in ("minProperties", "maxProperties") if _has(schema, name)), None
    else:
        return Fault("", "", refusal.splitlines()[0][:200])
    why = "two of its branches may fit the same value" if keyword == "oneOf" else "no grammar backend enforces it"
    for path, node in _nodes(schema):
        if keyword in node and (value is None or node[keyword] == value):
            if keyword != "oneOf" or _llguidance_refusal({**_definitions(schema), "oneOf": node["oneOf"]}):
                return Fault(keyword, _join(path, keyword), why)
    return Fault(keyword, keyword, why)


def _definitions(schema: Schema) -> Schema:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _outside_xgrammar(schema: Schema, *, patterns: bool = False) -> Fault | None:
    """The first part that xgrammar is not known to enforce. patterns: those of texts count as enforced."""
    for path, node in _nodes(schema):
        keyword = "" if path.endswith("propertyNames") else _outside(node, patterns)  # which its object judges
        if keyword:
            return Fault(keyword, _join(path, keyword), "the engine does not enforce it there")
    return None


def _outside(node: Schema, patterns: bool) -> str:
    """The keyword of this node alone; empty if there is none."""
    used = node.keys() & ASSERTIONS
    for name in _COMBINERS:
        if name in used:
            return _outside_combiner(node, name, used)
    if "enum" in used or "const" in used:
        return _outside_values(node, used)
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds] if "type" in used else []
    allowed = {"type"}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _XGRAMMAR_KEYS:
            return "type"
        allowed |= _XGRAMMAR_KEYS[kind]
        if kind == "string" and patterns:
            allowed |= {"pattern"}
    if used - allowed:
        return min(used - allowed)
    for name in sorted(used & _NUMBERS):
        if not _is_bound(node[name], whole=name not in _XGRAMMAR_KEYS["number"] or "integer" in kinds):
            return name
    return _outside_object(node) or _outside_array(node) or _outside_text(node)


def _is_bound(value: Any, *, whole: bool) -> bool:
    """xgrammar ends at other bounds of counts and integers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not whole or (isinstance(value, int) and abs(value) < _LARGEST_BOUND)


def _outside_combiner(node: Schema, name: str, used: set[str]) -> str:
    others = used - {name}
    if others:
        return min(others)
    value = node[name]
    if name == "$ref":
        return "" if isinstance(value, str) and _LOCAL.match(value) else name
    if not isinstance(value, list) or not value or (name == "allOf" and len(value) > 1):
        return name
    return ""


def _outside_values(node: Schema, used: set[str]) -> str:
    name = "const" if "const" in used else "enum"
    if used - {name, "type"}:
        return min(used - {name, "type"})
    values = [node["const"]] if name == "const" else node["enum"]
    if not isinstance(values, list) or not values:
        return name
    kinds = node.get("type")
    fits: tuple[type, ...] = ()
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        fits += _PYTHON.get(kind, ()) if isinstance(kind, str) else ()
    if kinds is not None and not all(isinstance(value, fits) and _no_disguise(value, fits) for value in values):
        return name
    return ""


def _no_disguise(value: Any, fits: tuple[type, ...]) -> bool:
    """To Python true is a number."""
    return not isinstance(value, bool) or bool in fits


def _outside_object(node: Schema) -> str:
    named = node.get("properties", {})
    if not isinstance(named, dict) or not all(isinstance(one, dict) or one is True for one in named.values()):
        return "properties"
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in named for name in required):
        return "required"
    if "propertyNames" in node and (named or "unevaluatedProperties" in node or not _plain_names(node)):
        return "propertyNames"
    for bound in ("minProperties", "maxProperties"):
        if bound in node and (not named or "propertyNames" in node):
            return bound
    return ""


def _plain_names(node: Schema) -> bool:
    names = node["propertyNames"]
    used = set(names) & ASSERTIONS if isinstance(names, dict) else set()
    return isinstance(names, dict) and len(used - {"type"}) <= 1 and used <= {"type", "pattern", "enum", "const"}


def _outside_array(node: Schema) -> str:
    counted = [name for name in ("minItems", "maxItems") if name in node]
    if "prefixItems" in node:
        if counted:
            return counted[0]
        return "items" if node.get("items", False) is not False else ""
    if "items" not in node:
        return counted[0] if counted else ""
    return "" if isinstance(node["items"], dict) else "items"


def _outside_text(node: Schema) -> str:
    bounds = any(name in node for name in ("minLength", "maxLength"))
    if "pattern" in node and (bounds or "format" in node):
        return "pattern"
    if "format" in node and (bounds or not _in(node["format"], _XGRAMMAR_FORMATS)):
        return "format"
    return ""


def _in(value: Any, names: frozenset[str]) -> bool:
    return isinstance(value, str) and value in names


def _has(schema: Schema, keyword: str) -> bool:
    return any(keyword in node for _, node in _nodes(schema))


def _nodes(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """All schemas in a schema that are objects, with their paths, itself first."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        path, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        inner: list[tuple[str, Any]] = []
        for key, value in node.items():
            if key in _MAPS and isinstance(value, dict):
                inner += [(_join(path, key, str(name)), one) for name, one in value.items()]
            elif key in _LISTS and isinstance(value, list):
                inner += [(_join(path, key, str(place)), one) for place, one in enumerate(value)]
            elif key in _SCHEMAS:
                inner.append((_join(path, key), value))
        stack.extend(reversed(inner))


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
