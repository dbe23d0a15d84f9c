"""Finds the paths of JSON schema keywords that engines do not enforce. Pure.

llguidance enforces schemas of answers; xgrammar enforces schemas of tools (grammars.py). llguidance and xgrammar
silently ignore unknown keywords; tests/property/test_schema_keywords.py tries every keyword on llguidance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

Schema = dict[str, Any]

OPTIONS: Final = {"whitespace_flexible": False, "lenient": True}
"""llguidance's options. No free whitespace, so that no answer fills its limit with it. `lenient` ignores unknown
keywords: the gateway refuses them in schemas of answers."""
_IGNORED: Final = frozenset(
    (
        "not if contains propertyNames dependentRequired dependentSchemas dependencies unevaluatedProperties "
        "unevaluatedItems uniqueItems $dynamicRef $recursiveRef"
    ).split()
)
# Formats that JSON Schema defines and llguidance ignores. Formats outside JSON Schema restrict nothing.
_IGNORED_FORMATS: Final = (
    "idn-email idn-hostname iri iri-reference uri-reference uri-template json-pointer relative-json-pointer regex"
).split()
NOT_IN_TOOLS: Final = _IGNORED.union(
    "pattern patternProperties minLength maxLength minProperties maxProperties format multipleOf".split()
)
"""Keywords that are not enforced on tool calls, even with `strict`: refusing them would refuse the tool. xgrammar
took 2.4 s to compile a `maxLength` of 500 with 49,152 tokens, 15 s for counted properties, 120 s for 300 formats, and
25 s and more, within a step of the engine, for one mask of the pattern `^(\\w{1,20}\\s?){1,50}$`."""
_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def unenforced(schema: Any) -> Iterator[str]:
    """Return the paths of keywords that engines do not enforce on answers, such as `properties.a.not`."""
    for path, node in nodes(schema):
        keywords = {name for name in node.keys() & _IGNORED if node[name] is not False or name != "uniqueItems"}
        if node.get("format") in _IGNORED_FORMATS:
            keywords.add("format")
        if "properties" in node:  # llguidance counts properties only if all are required
            keywords |= node.keys() & {"minProperties", "maxProperties"}
        yield from (f"{path}{keyword}" for keyword in sorted(keywords))


def unenforced_in_tools(schema: Any) -> Iterator[str]:
    """Paths of keywords that engines do not enforce on calls of a strict tool, such as `properties.a.pattern`."""
    for path, node in nodes(schema):
        yield from (f"{path}{keyword}" for keyword in sorted(node.keys() & NOT_IN_TOOLS))


def without(keywords: frozenset[str], schema: Any) -> Any:
    """Return a copy of the schema without these keywords; properties with such names stay."""
    copied = copy.deepcopy(schema)
    for _, node in nodes(copied):
        for keyword in node.keys() & keywords:
            del node[keyword]
    return copied


def counted(schema: Any) -> float:
    """Return the sum of all `minItems` and `maxItems`. llguidance expands every item: 10,000 items take 0.2 s, and
    2**31 items exhaust the process's memory."""
    bounds = (node.get(name) for _, node in nodes(schema) for name in ("minItems", "maxItems"))
    return sum(bound for bound in bounds if isinstance(bound, int | float) and bound > 0)


def defined(schema: Any) -> int:
    """Return the number of definitions. llguidance follows references by recursion: it survived a chain of 400
    definitions (lists of objects); a chain of 500 crashed the process."""
    definitions = (node.get(name) for _, node in nodes(schema) for name in ("$defs", "definitions"))
    return sum(len(named) for named in definitions if isinstance(named, dict))


def nodes(schema: Any) -> Iterator[tuple[str, Schema]]:
    """Yield the schema and every schema inside it, each with a path that ends in a dot."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, list):
            stack.extend((f"{path}{place}.", child) for place, child in reversed(list(enumerate(node))))
        elif isinstance(node, dict):
            yield path, node
            for key, value in reversed(node.items()):
                if key in _MAPS and isinstance(value, dict):
                    stack.extend((f"{path}{key}.{name}.", child) for name, child in reversed(value.items()))
                elif key not in ("enum", "const", "default", "examples"):
                    stack.append((f"{path}{key}.", value))
