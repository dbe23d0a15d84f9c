"""Estimates the processor time that engines take to compile a JSON schema to a grammar. Pure. It uses a table of
measured costs for constructs that cost more than the number of their parts suggests.

Measured with xgrammar 0.2.8 and llguidance 1.7.6, one thread, a tokenizer of 49,152 tokens (SmolLM2's). llguidance
reads what xgrammar declines, on the event loop that sends all tokens: at most 50 ms of that, and one second of all
together.
"""

from __future__ import annotations

from typing import Any, Final

# µs for each pair of an optional property and one that may follow it: 440 of any type took 0.95 s, 220 texts 0.2 s.
_ANY_PAIR: Final = 5
_TEXT_PAIR: Final = 4
_NUMBER_PAIR: Final = 2
# minProperties and maxProperties cost for each property and each count of them: 150 with at most 100 took 5 s.
_COUNTED: Final = 300
# Each character of a long literal is a state of the grammar: 100,000 took 2.5 s. Most states of short ones are shared.
_LITERAL_CHAR: Final = 26
_SHORT_LITERAL: Final = 64
# Each use of a format is a regular expression of its own: 300 of `ipv6` took 6 s; of `uri` 0.35 s on the event loop, of
# `email` 0.09 s. Since one second here stands for 50 ms there, these figures are twenty times the measured ones.
_FORMATS: Final = {"uri": 20_000, "uri-reference": 20_000, "uri-template": 20_000, "ipv6": 20_000, "email": 6_000}
_OTHER_FORMAT: Final = 2_500
# Each combination of the alternatives that members of an `allOf` have: 729 took 50 ms on the event loop.
_COMBINATION: Final = 1_400
_FEW_COMBINATIONS: Final = 8
MOST_US: Final = 1_000_000
_MOST_COMBINATIONS: Final = 1 << 20
_DEEPEST: Final = 64
_PLAIN: Final = frozenset({"enum", "const"})
_NUMBERS: Final = frozenset({"integer", "number"})


def node_us(node: dict[str, Any]) -> int:
    """The cost of one object of a schema, without those inside it."""
    return _properties(node) + _text(node)


def literal_us(value: Any) -> int:
    """The cost of a name or value that answers contain literally; in lists and objects, the texts count."""
    found, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            found += max(0, len(one) - _SHORT_LITERAL) * _LITERAL_CHAR
        elif isinstance(one, dict):
            stack.extend(one)
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)
    return found


def _properties(node: dict[str, Any]) -> int:
    named = node.get("properties")
    if not isinstance(named, dict) or not named:
        return 0
    found = sum(literal_us(name) for name in named)
    given = node.get("required")
    required = {name for name in given if isinstance(name, str)} if isinstance(given, list) else set()
    optional = [schema for name, schema in named.items() if name not in required]
    found += len(optional) * sum(_pair(schema) for schema in optional)
    counts = [node.get("minProperties"), node.get("maxProperties")]
    if any(count is not None for count in counts):
        most = max((int(count) for count in counts if isinstance(count, int | float)), default=0)
        found += _COUNTED * len(named) * max(0, min(most, len(named)))
    return found


def _pair(schema: Any) -> int:
    if not isinstance(schema, dict) or not schema:
        return _ANY_PAIR
    if not _PLAIN.isdisjoint(schema):
        return 0
    branches = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    if branches:
        return max(_pair(one) if one != schema else 0 for one in branches)
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None:
        return _TEXT_PAIR if "$ref" in schema or "pattern" in schema else _ANY_PAIR
    if "string" in kinds:
        return _TEXT_PAIR
    return _NUMBER_PAIR if any(one in _NUMBERS for one in kinds if isinstance(one, str)) else 0


def _text(node: dict[str, Any]) -> int:
    form = node.get("format")
    return _FORMATS.get(form, _OTHER_FORMAT) if isinstance(form, str) else 0


def combinations_us(root: Any) -> int:
    """The cost of all places where schemas that must hold together have alternatives: each combination is a schema of
    its own."""
    known: dict[int, int] = {}
    total = 0

    def alternatives(node: Any, depth: int) -> int:
        nonlocal total
        if not isinstance(node, dict):
            return 1
        if depth > _DEEPEST:
            return _MOST_COMBINATIONS  # no more is known of it
        if id(node) in known:
            return known[id(node)]
        known[id(node)] = 1  # of what refers to itself
        factors = []
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                factors.append(sum(alternatives(one, depth + 1) for one in node[key]))
        for one in node["allOf"] if isinstance(node.get("allOf"), list) else ():
            factors.append(alternatives(one, depth + 1))
        if isinstance(node.get("$ref"), str):
            factors.append(alternatives(_target(root, node["$ref"]), depth + 1))
        product = 1
        for factor in factors:
            product = min(product * max(factor, 1), _MOST_COMBINATIONS)
        if sum(factor > 1 for factor in factors) > 1:
            total += max(0, product - _FEW_COMBINATIONS) * _COMBINATION
        known[id(node)] = product
        return product

    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            alternatives(node, 0)
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return total


def _target(root: Any, pointer: str) -> Any:
    """What a reference within the schema names; None if there is no such thing."""
    found = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
