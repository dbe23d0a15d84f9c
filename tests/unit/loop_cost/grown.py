"""Bodies that grow: for every list, map, text and nesting that a route's body may have, the body with so much of it.

Places follow from the OpenAPI document and from bodies that a route takes; a new field is one more by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from appliance.controller.http.bodies import Bound

Schema = dict[str, Any]
Put = Callable[[Any], Any]
"""The whole body with another value at one place."""
DEEP = 150
"""Levels, of MAX_DEPTH."""
_LIST, _TEXT, _OTHER = 12, 4, 1  # as http/bodies weighs


@dataclass(frozen=True)
class Growing:
    """name: the place and what grows there. of: the body with so much of it."""

    name: str
    of: Callable[[int], Any]


def growing(schema: Schema, definitions: dict[str, Schema], body: Any) -> Iterator[Growing]:
    seen = set()
    for one in _growing(schema, definitions, body, lambda value: value, "", 0):
        if one.name not in seen:
            seen.add(one.name)
            yield one


def largest(of: Callable[[int], Any], bound: Bound) -> int:
    """How many fit the bound of a route, a little below it."""
    few, more = of(1500), of(4500)
    nbytes = max(1.0, (len(orjson.dumps(more)) - len(orjson.dumps(few))) / 3000)
    weight = (weight_of(more) - weight_of(few)) / 3000
    most = 0.98 * (bound.nbytes - len(orjson.dumps(of(1)))) / (nbytes + 1)
    return max(1, int(min(most, 0.98 * (bound.weight - weight_of(of(1))) / weight if weight else most)))


def weight_of(value: Any) -> int:
    if isinstance(value, dict):
        return _LIST + sum(_TEXT + weight_of(one) for one in value.values())
    if isinstance(value, list):
        return _LIST + sum(map(weight_of, value))
    return _TEXT if isinstance(value, str) else _OTHER


def _growing(
    schema: Schema, definitions: dict[str, Schema], value: Any, put: Put, where: str, deep: int
) -> Iterator[Growing]:
    if deep > 9:
        return
    for option in _options(schema, definitions, value):
        kind = option.get("type")
        fits = _fits(option, value)
        here = value if fits else _example(option, definitions)
        if kind == "object" or "properties" in option:
            yield from _object(option, definitions, here, put, where, deep)
        elif kind == "array":
            yield from _array(option, definitions, here, put, where, deep)
        elif kind == "string" and "enum" not in option and "const" not in option:
            yield Growing(f"{where} text", lambda n: put("x" * n))
            yield Growing(f"{where} places", lambda n: put("{{ item.a }}" * n))
        elif kind is None:
            yield from _anything(put, where)
    if isinstance(value, dict | list) and not any(_fits(one, value) for one in _options(schema, definitions, value)):
        yield from _example_grows(value, put, where, deep)


def _object(
    schema: Schema, definitions: dict[str, Schema], value: Any, put: Put, where: str, deep: int
) -> Iterator[Growing]:
    value = value if isinstance(value, dict) else {}
    known = schema.get("properties", {})
    for name, of in known.items():
        yield from _growing(
            of,
            definitions,
            value.get(name),
            lambda new, name=name: put({**value, name: new}),
            f"{where}.{name}",
            deep + 1,
        )
    more = schema.get("additionalProperties")
    if known:
        yield Growing(f"{where} unknown", lambda n: put({**value, **{f"u{i}": i for i in range(n)}}))
    if more or not known:
        example = _example(more, definitions) if isinstance(more, dict) else 1
        yield Growing(f"{where} keys", lambda n: put({**value, **{f"k{i}": example for i in range(n)}}))
        if isinstance(more, dict) and more:
            yield from _growing(more, definitions, None, lambda new: put({**value, "k0": new}), f"{where}.*", deep + 1)
        else:
            yield from _anything(lambda new: put({**value, "k0": new}), f"{where}.*")
        yield from _example_grows(
            {k: v for k, v in value.items() if k not in known}, lambda new: put({**value, **new}), where, deep
        )


def _array(
    schema: Schema, definitions: dict[str, Schema], value: Any, put: Put, where: str, deep: int
) -> Iterator[Growing]:
    items = schema.get("items", {})
    first = value[0] if isinstance(value, list) and value else _example(items, definitions)
    yield Growing(f"{where} items", lambda n: put([_again(first, i) for i in range(n)]))
    yield from _growing(items, definitions, first, lambda new: put([new, *(value or [])[1:]]), f"{where}[]", deep + 1)


def _example_grows(value: Any, put: Put, where: str, deep: int) -> Iterator[Growing]:
    """Of a value that no schema says anything of: what it looks like."""
    if deep > 9:
        return
    if isinstance(value, dict):
        if value:
            yield Growing(f"{where} unknown", lambda n: put({**value, **{f"u{i}": i for i in range(n)}}))
        for name, one in value.items():
            yield from _example_grows(
                one, lambda new, name=name: put({**value, name: new}), f"{where}.{name}", deep + 1
            )
    elif isinstance(value, list) and value:
        yield Growing(f"{where} items", lambda n: put([_again(value[0], i) for i in range(n)]))
        yield from _example_grows(value[0], lambda new: put([new, *value[1:]]), f"{where}[]", deep + 1)
    elif isinstance(value, str):
        yield Growing(f"{where} text", lambda n: put("x" * n))
        yield Growing(f"{where} places", lambda n: put("{{ item.a }}" * n))
    else:
        yield from _anything(put, where)


def _anything(put: Put, where: str) -> Iterator[Growing]:
    yield Growing(f"{where} any text", lambda n: put("x" * n))
    yield Growing(f"{where} any keys", lambda n: put({f"k{i}": 1 for i in range(n)}))
    yield Growing(f"{where} any numbers", lambda n: put([1.5] * n))
    yield Growing(f"{where} any texts", lambda n: put([f"t{i}" for i in range(n)]))
    yield Growing(f"{where} any lists", lambda n: put([[]] * n))
    yield Growing(f"{where} any deep", lambda n: put([_nested() for _ in range(n // DEEP + 1)]))


def _nested() -> Any:
    made: Any = 1
    for _ in range(DEEP - 10):
        made = [made]
    return made


def _options(schema: Schema, definitions: dict[str, Schema], value: Any) -> list[Schema]:
    """What it may be, but null; what the value is, where it says which."""
    schema = _resolved(schema, definitions)
    found = []
    for one in schema.get("anyOf", schema.get("oneOf", [schema])):
        one = _resolved(one, definitions)
        if one.get("type") != "null":
            found += _options(one, definitions, value) if "anyOf" in one or "oneOf" in one else [one]
    named = [one for one in found if isinstance(value, dict) and _names(one, definitions, value)]
    return named or found


def _names(schema: Schema, definitions: dict[str, Schema], value: dict[str, Any]) -> bool:
    of = schema.get("properties", {}).get("type", {})
    return "type" in value and value["type"] in (of.get("enum") or [of.get("const")])


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema


def _fits(schema: Schema, value: Any) -> bool:
    kind = schema.get("type", "object" if "properties" in schema else None)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}
    return value is not None and kind in kinds and isinstance(value, kinds[kind])


def _example(schema: Schema, definitions: dict[str, Schema]) -> Any:
    options = _options(schema, definitions, None)
    one = options[0] if options else {}
    kind = one.get("type")
    if "default" in one and one["default"] is not None:
        return one["default"]
    if "enum" in one or "const" in one:
        return one.get("const", (one.get("enum") or [None])[0])
    if kind == "object" or "properties" in one:
        known = one.get("properties", {})
        return {name: _example(known[name], definitions) for name in one.get("required", [])}
    if kind == "array":
        return [_example(one.get("items", {}), definitions)] * one.get("minItems", 1)
    if kind == "string":
        return "x" * max(1, one.get("minLength", 1))
    if kind in ("integer", "number"):
        return max(one.get("minimum", 1), one.get("exclusiveMinimum", 0) + 1 if "exclusiveMinimum" in one else 1)
    return False if kind == "boolean" else 1


def _again(value: Any, place: int) -> Any:
    """Another like it, for what has to have names or values of its own; the first is as it was."""
    if not place:
        return value
    if isinstance(value, str):
        return f"{value}{place}" if not value.startswith("{{") else value
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return {**value, "name": f"{value['name']}{place}"}
    return copy.copy(value)
