"""Bounds a request's structured output: JSON schemas, regular expressions, choices, tools that must be called. Pure.

An engine compiles them to a grammar, and the time is unrelated to their size: `.{1000}` took 5 s, a hundred optional
letters did not finish. So this module measures the features found to be expensive (table in docs/gateway.md) and
refuses what exceeds the bounds before an engine sees it. It refuses text grammars and structural tags, which cannot be
measured.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.expression_ways import MOST_WAYS, atom_end, quantifier, ways
from appliance.gateway.payload.nesting import check_text_depth
from appliance.gateway.payload.schema_cost import MOST_US, combinations_us, literal_us, node_us
from appliance.gateway.payload.shapes import SCHEMA_FIELDS, each_tool, schema_holders

_REGEX_CHARS: Final = 1024
_REGEX_QUANTIFIERS: Final = 16
_REGEX_GROUPS_DEEP: Final = 16
# For one expression: how many characters it gains when its repeats are expanded.
_REGEX_REPEATS: Final = 256
# The same for all expressions of a request, each counted once: a gateway reads every character of them, some twice.
_REGEX_CHARS_TOGETHER: Final = 32 * 1024
_SCHEMA_DEPTH: Final = 48
# For one list: more than that many items, and engines took 19 s to compile it; 2**31 never ended.
_ITEMS: Final = 1000
# For all lists together, as for characters: each bounded item is a rule.
_ITEMS_TOGETHER: Final = 4000
# Number ranges are compiled digit by digit: 150 of twelve digits took 5.4 s.
_RANGES: Final = 32
# An engine makes one automaton of expressions that must hold together, and fourteen stopped its event loop for 45 s.
# Eight took 5 ms.
_TOGETHER: Final = 6
# An automaton for multiples of 9,973 has as many states and took 40 ms, for 999,983 8 s.
_MULTIPLES: Final = 10_000
_COMBINERS: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
# What stands beside them without restricting them.
_NOTES: Final = frozenset(
    {
        *("$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly", "nullable", "discriminator"),
    }
)
_CHOICES: Final = 1000
_CHOICE_CHARS: Final = 32 * 1024
_SCHEMA_TEXT: Final = 256 * 1024
# A longer text costs a grammar no more.
_LONG_TEXT: Final = 200
# A repeat with more digits is more than any limit.
_DIGITS: Final = 9
_MANY: Final = 1 << 30
_RULES_PER_PART: Final = 20
_FREE: Final = frozenset({"auto", "none"})


def check_structure(data: dict[str, Any], limits: Limits) -> None:
    """Raises HttpError 400 for structured output that would take an engine too long to compile."""
    budget = _Budget(limits)
    wanted = data.get("response_format")
    if wanted is not None:
        _format("response_format", wanted, budget)
    wanted = data.get("structured_outputs")
    if wanted is not None:
        _structured_outputs(wanted, budget)
    text = data.get("text")
    if isinstance(text, dict) and text.get("format") is not None:
        _format("text.format", text["format"], budget)
    output = data.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        _format("output_config.format", output["format"], budget)
    tools = data.get("tools")
    if isinstance(tools, list):
        choice = data.get("tool_choice")
        forced = choice is not None and not (isinstance(choice, str) and choice in _FREE)
        for at, tool in each_tool(tools):
            if not isinstance(tool, dict):
                continue
            holders = schema_holders(tool)
            # The engine compiles a grammar of them only if it must enforce them.
            if forced or any(holder.get("strict") for holder in holders):
                for holder in holders:
                    for name in SCHEMA_FIELDS:
                        if holder.get(name) is not None:
                            budget.schema(f"{at}.{name}", holder[name], enforced=True)


_FORMATS: Final = frozenset({"text", "json_object", "json_schema", "structural_tag"})


def _format(name: str, wanted: Any, budget: _Budget) -> None:
    # Where an engine knows no type, it holds a format against all that it has.
    kind = wanted.get("type", "json_schema" if name.startswith("output") else None) if isinstance(wanted, dict) else ""
    if isinstance(wanted, dict) and not (isinstance(kind, str) and kind in _FORMATS):
        raise errors.bad_request(
            f"Invalid value for `{name}.type`; expected one of {', '.join(sorted(_FORMATS))}.",
            param=f"{name}.type",
            code="invalid_value",
        )
    if not isinstance(wanted, dict):
        return  # the engine says what it expects
    kind = wanted.get("type")
    if kind == "structural_tag" or (kind == "grammar"):
        raise _unsupported(name, f"the type `{kind}`")
    inner = wanted.get("json_schema")
    if isinstance(inner, dict):
        for key in ("schema", "json_schema"):
            if inner.get(key) is not None:
                budget.schema(name, inner[key])
    if wanted.get("schema") is not None:
        budget.schema(name, wanted["schema"])


def _structured_outputs(wanted: Any, budget: _Budget) -> None:
    name = "structured_outputs"
    if not isinstance(wanted, dict):
        raise errors.bad_request(
            f"Invalid type for `{name}`: expected an object with `json`, `regex` or `choice`.",
            param=name,
            code="invalid_type",
        )
    for key in ("grammar", "structural_tag", "whitespace_pattern"):
        if wanted.get(key) is not None:
            raise _unsupported(name, f"`{key}`")
    schema = wanted.get("json")
    if isinstance(schema, str):
        if len(schema) > _SCHEMA_TEXT:
            raise _too_complex(name, f"a schema of {len(schema)} characters", _SCHEMA_TEXT)
        # Before it is parsed, as the body was: what measures a schema goes down into it by recursion.
        check_text_depth(f"{name}.json", schema, budget.limits.json_depth)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise errors.bad_request(f"`{name}.json` is not JSON: {error}", param=name) from None
    if schema is not None:
        budget.schema(name, schema)
    regex = wanted.get("regex")
    if isinstance(regex, str):
        budget.regex(name, regex)
    choice = wanted.get("choice")
    if isinstance(choice, list):
        budget.choices(name, choice)


class _Budget:
    """Totals over all schemas, expressions and choices in one request."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._nodes = 0
        self._choices = 0
        self._choice_chars = 0
        self._repeats = 0
        self._most_nodes = limits.schema_nodes
        self._most_repeats = limits.schema_repeats
        self._items = 0
        self._ranges = 0
        self._lengths: set[tuple[int, int]] = set()
        self._patterns: set[str] = set()
        self._pattern_chars = 0
        # Those of which nobody has asked yet in how many ways a text fits them.
        self._unread: list[str] = []
        self._us = 0
        self._formats: set[str] = set()
        self._multiples: set[int] = set()
        self._combines = False
        # Whether xgrammar follows a schema's expressions: engines give others to llguidance.
        self._of_xgrammar = False

    def schema(self, name: str, root: Any, *, enforced: bool = False) -> None:
        """All that a JSON schema asks for. enforced: it is a tool's, whose expressions xgrammar follows."""
        self._of_xgrammar = self._of_xgrammar or enforced
        self._parts(name, root)
        self._together(name)
        self._cost(name, combinations_us(root))

    def _parts(self, name: str, root: Any) -> None:
        stack: list[tuple[Any, int]] = [(root, 1)]
        while stack:
            node, depth = stack.pop()
            if depth > _SCHEMA_DEPTH:
                raise _too_complex(name, f"a schema nested deeper than {_SCHEMA_DEPTH} levels", _SCHEMA_DEPTH)
            if isinstance(node, list):
                self._count(name, len(node))
                stack.extend((item, depth + 1) for item in node if isinstance(item, dict | list))
                continue
            if not isinstance(node, dict):
                continue
            self._count(name, 1)
            self._length(name, node)
            self._list(name, node)
            self._range(name, node)
            self._some_of(name, node)
            self._cost(name, node_us(node))
            self._combined(node)
            if "patternProperties" in node or "propertyNames" in node:
                self._of_xgrammar = True
            for key, value in node.items():
                if key == "const":
                    self.choices(name, [value])
                elif key == "enum" and isinstance(value, list):
                    self.choices(name, value)
                elif key == "pattern" and isinstance(value, str):
                    self.regex(name, value)
                elif isinstance(value, dict):
                    if key == "patternProperties":
                        for pattern in value:
                            self.regex(name, pattern)
                    # Each listed property of an object has a name in the grammar.
                    self._count(name, len(value))
                    stack.append((value, depth + 1))
                elif isinstance(value, list):
                    stack.append((value, depth + 1))

    def choices(self, name: str, values: list[Any]) -> None:
        self._choices += len(values)
        if self._choices > _CHOICES:
            raise _too_complex(name, f"{self._choices} values to choose from", _CHOICES)
        for value in values:
            if isinstance(value, dict | list):
                # Counted before it is walked and written: of constants within constants each level does so again.
                self._parts(name, value)
            self._cost(name, literal_us(value))
            self._choice_chars += len(value) if isinstance(value, str) else 8
            if isinstance(value, dict | list):
                self._choice_chars += len(orjson.dumps(value))
            if self._choice_chars > _CHOICE_CHARS:
                raise _too_complex(name, f"values to choose from with {self._choice_chars} characters", _CHOICE_CHARS)

    def regex(self, name: str, pattern: str) -> None:
        """A repeated expression costs only once."""
        if pattern in self._patterns:
            return
        if len(pattern) > _REGEX_CHARS:
            raise _too_complex(name, f"a regular expression of {len(pattern)} characters", _REGEX_CHARS)
        self._pattern_chars += len(pattern)
        if self._pattern_chars > _REGEX_CHARS_TOGETHER:
            what = f"regular expressions of {self._pattern_chars} characters"
            raise _too_complex(name, what, _REGEX_CHARS_TOGETHER)
        quantifiers, repeats = measure_regex(name, pattern)
        if quantifiers > _REGEX_QUANTIFIERS:
            raise _too_complex(name, f"a regular expression with {quantifiers} repeats in it", _REGEX_QUANTIFIERS)
        if repeats > _REGEX_REPEATS:
            raise _too_complex(
                name, f"a regular expression that stands for {repeats} more characters than it has", _REGEX_REPEATS
            )
        self._patterns.add(pattern)
        self._unread.append(pattern)
        self._spend(name, repeats)

    def _length(self, name: str, node: dict[str, Any]) -> None:
        """`minLength` and `maxLength`: texts with equal bounds share grammar rules. Those of 200 and of 201 do not: 30
        such lengths took 87 s."""
        low, high = _bound(node.get("minLength")), _bound(node.get("maxLength"))
        if (low or high) and (low, high) not in self._lengths:
            self._lengths.add((low, high))
            self._spend(name, min(max(low, high), _LONG_TEXT))

    def _list(self, name: str, node: dict[str, Any]) -> None:
        """`minItems`, `maxItems`: each item up to them is a rule of the grammar."""
        for key in ("minItems", "maxItems", "minContains", "maxContains"):
            items = node.get(key)
            if isinstance(items, int | float) and not isinstance(items, bool) and items > 0:
                if items > _ITEMS:
                    raise _too_complex(name, f"a list with `{key}` {items}", _ITEMS)
                self._items += int(items)
        if self._items > _ITEMS_TOGETHER:
            raise _too_complex(name, f"lists of bounded length that add up to {self._items} items", _ITEMS_TOGETHER)

    def _range(self, name: str, node: dict[str, Any]) -> None:
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if isinstance(node.get(key), int | float) and not isinstance(node.get(key), bool):
                self._ranges += 1
        if self._ranges > 2 * _RANGES:
            raise _too_complex(name, f"{self._ranges} bounds of numbers", 2 * _RANGES)

    def _some_of(self, name: str, node: dict[str, Any]) -> None:
        """`minProperties`, `maxProperties`: each count of properties so far, at each property, is a separate rule. 200
        properties with bounds 100 to 150 took 89 ms on the event loop that sends tokens."""
        named = node.get("properties")
        low, high = node.get("minProperties"), node.get("maxProperties")
        if isinstance(named, dict) and (low is not None or high is not None):
            most = max(value if isinstance(value, int) else 0 for value in (low, high))
            # Never less than nothing: a negative bound made room for twenty thousand parts elsewhere in the request.
            self._count(name, len(named) * max(0, min(most, len(named))) // _RULES_PER_PART)

    def _cost(self, name: str, us: int) -> None:
        self._us += us
        if self._us > MOST_US:
            raise _too_complex(
                name,
                f"its grammar would take about {self._us / 1e6:.1f} s of an engine's time (counted or optional "
                "properties, long literal texts, formats, or alternatives that must hold together)",
                "1 s",
            )

    def _combined(self, node: dict[str, Any]) -> None:
        kind = node.get("format")
        if isinstance(kind, str):
            self._formats.add(kind)
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and multiple > 0:
            self._multiples.add(_digits(multiple))
        parts = node.get("allOf")
        if isinstance(parts, list) and len(parts) > 1:
            self._combines = True
        elif not _COMBINERS.isdisjoint(node) and node.keys() - _COMBINERS - _NOTES:
            self._combines = True

    def _together(self, name: str) -> None:
        """Which expressions and multiples have to hold together is not followed through references: once any part of a
        request combines schemas, all of them count."""
        multiples = math.lcm(*self._multiples) if self._combines else sum(self._multiples)
        if multiples > _MULTIPLES:
            raise _too_complex(name, f"multiples (`multipleOf`) that come to {min(multiples, _MANY)}", _MULTIPLES)
        expressions = len(self._patterns) + len(self._formats)
        if self._combines and expressions > _TOGETHER:
            raise _too_complex(
                name,
                f"{expressions} regular expressions and formats in schemas that are combined (`allOf`, or a `$ref`, "
                "`anyOf` or `oneOf` with further restrictions next to it)",
                _TOGETHER,
            )
        while self._of_xgrammar and self._unread:
            if ways(self._unread.pop()) > MOST_WAYS:
                raise _too_many_ways(name)

    def _spend(self, name: str, repeats: int) -> None:
        self._repeats += repeats
        if self._repeats > self._most_repeats:
            raise _too_complex(
                name,
                f"texts of bounded length (minLength, maxLength, patterns) that add up to {self._repeats} characters",
                self._most_repeats,
            )

    def _count(self, name: str, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > self._most_nodes:
            raise _too_complex(name, "schemas of more parts", self._most_nodes)


def _digits(multiple: Any) -> int:
    """The whole number whose multiples an engine counts: 25 for 0.25."""
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return min(int("".join(map(str, digits))) * 10 ** min(max(exponent, 0), _DIGITS), _MANY)


def _bound(value: Any) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        return 0
    return int(value)


def measure_regex(name: str, pattern: str) -> tuple[int, int]:
    """Return the repeats in an expression, and how many characters it gains when bounded ones are expanded.

    It parses only what that needs: the engine reports syntax errors. Raises HttpError 400 for groups nested too
    deep."""
    quantifiers, at, end = 0, 0, len(pattern)
    # Characters of each open group so far, as written and expanded; and those of the last atom.
    written: list[list[int]] = [[0, 0]]
    last = [0, 0]
    while at < end:
        char = pattern[at]
        if char == "(":
            if len(written) > _REGEX_GROUPS_DEEP:
                raise _too_complex(name, "a regular expression with deeper groups", _REGEX_GROUPS_DEEP)
            written.append([0, 0])
            last = [0, 0]
            at += 1
        elif char == ")" and len(written) > 1:
            last = written.pop()
            written[-1][0] += last[0]
            written[-1][1] += last[1]
            at += 1
        elif (bounds := quantifier(pattern, at)) is not None:
            low, high, at = bounds
            times = max(low, high)
            quantifiers += 1
            written[-1][1] += last[1] * (times - 1) if times > 1 else 0
            last = [last[0], last[1] * max(1, times)]
        else:
            if pattern.startswith(("[]", "[^]"), at):
                raise _empty_class(name)
            at = atom_end(pattern, at)
            last = [1, 1]
            written[-1][0] += 1
            written[-1][1] += 1
        if written[-1][1] > 1 << 40:
            break
    while len(written) > 1:  # a group that is never closed
        inner = written.pop()
        written[-1][0] += inner[0]
        written[-1][1] += inner[1]
    return quantifiers, written[0][1] - written[0][0]


def _too_complex(name: str, what: str, limit: int | str) -> HttpError:
    return errors.bad_request(
        f"`{name}` is too complex: {what}, at most {limit} are allowed. Ask for a simpler form.",
        param=name.partition(".")[0],
        code="structure_too_complex",
    )


def _too_many_ways(name: str) -> HttpError:
    return errors.bad_request(
        f"`{name}` is too complex: a regular expression has several parts, or a repeated one, whose length may differ "
        "(`{m,n}`, `?`), so that a text fits it in many ways. In tools whose arguments are enforced, and next to "
        "`patternProperties` and `propertyNames`, write it with parts of one length, or without a bound (`*`, `+`).",
        param=name.partition(".")[0],
        code="structure_too_complex",
    )


def _empty_class(name: str) -> HttpError:
    # Parsers take the `]` for a member or for the end: what follows would be measured as one and run as the other.
    return errors.bad_request(
        f"`{name}`: a regular expression has a class that begins with `[]` or `[^]`, which parsers read differently, "
        "expected one with members. Write `\\]` for the character in it, or `[\\s\\S]` for any character.",
        param=name.partition(".")[0],
        code="unsupported_parameter",
    )


def _unsupported(name: str, what: str) -> HttpError:
    return errors.bad_request(
        f"`{name}`: {what} is not accepted by this server, expected a JSON schema, a regular expression or choices.",
        param=name,
        code="unsupported_parameter",
    )
