"""Checks a request's structured output: JSON schemas, regular expressions, choices, tools that must be called. Pure.

Engines compile them within a time limit of their own (serve.forms.grammars). Here their size is bounded, and a schema
is refused for a keyword that no engine enforces. A format's schema is a promise, and so is that of a tool with
`strict`; arguments of other tools are not, and clients send schemas of all kinds for them. Text grammars and structural
tags are refused: they reach more of an engine than answers need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.nesting import check_text_depth
from appliance.gateway.payload.shapes import SCHEMA_FIELDS, each_tool, schema_holders
from serve.forms.keywords import counted, defined, unenforced, unenforced_in_tools

Form = tuple[str, Any, bool]
# Its place in the request, what it is, and whether it is promised.

# Of all forms in a request. llguidance takes 0.3 s for as much, xgrammar up to 4 s.
_FORM_BYTES: Final = 256 * 1024
# Of all `minItems` and `maxItems` in a request.
_ITEMS: Final = 10_000
_DEFINITIONS: Final = 256
_FORMATS: Final = frozenset({"text", "json_object", "json_schema"})
_OTHERS: Final = ("grammar", "structural_tag", "whitespace_pattern")


def check_structure(data: dict[str, Any], limits: Limits) -> list[str]:
    """Returns the places of keywords that a strict tool's calls are not held to. Raises HttpError 400 for structured
    output that engines do not enforce, or that is too large."""
    forms = [*_formats(data), *_outputs(data.get("structured_outputs"), limits), *_enforced_tools(data)]
    for place, form, promised in forms:
        if promised and not place.startswith("tools") and (path := next(unenforced(form), "")):
            raise errors.bad_request(
                f"`{place}.{path}`: this server does not enforce the keyword `{path.rpartition('.')[2]}` here. "
                "Take it out, and check answers yourself.",
                param=f"{place}.{path}",
                code="unsupported_schema_keyword",
            )
    for what, measure, most in (
        ("bytes of schemas, expressions and choices", lambda form: len(orjson.dumps(form)), _FORM_BYTES),
        ("items in all `minItems` and `maxItems`", counted, _ITEMS),
        ("definitions", defined, _DEFINITIONS),
    ):
        sizes = [measure(form) for _, form, _ in forms]
        if sum(sizes) > most:
            raise errors.bad_request(
                f"The request has {sum(sizes)} {what} that an engine compiles, at most {most} are allowed. "
                "Ask for a simpler form.",
                param=forms[sizes.index(max(sizes))][0].partition(".")[0],
                code="structure_too_complex",
            )
    return [
        f"{place}.{path}"
        for place, form, promised in forms
        if promised and place.startswith("tools")
        for path in unenforced_in_tools(form)
    ]


def _formats(data: dict[str, Any]) -> Iterator[Form]:
    for place in ("response_format", "text.format", "output_config.format"):
        outer, _, inner = place.partition(".")
        given = data.get(outer)
        if inner and isinstance(given, dict):
            given = given.get(inner)
        if not isinstance(given, dict):
            continue  # an engine says what it expects
        kind = given.get("type", "json_schema" if outer == "output_config" else None)
        if kind in _OTHERS:
            raise _unsupported(place, f"the type `{kind}`")
        if not isinstance(kind, str) or kind not in _FORMATS:
            # Where an engine knows no type, it compares the format with each of its own.
            raise errors.bad_request(
                f"Invalid value for `{place}.type`; expected one of {', '.join(sorted(_FORMATS))}.",
                param=f"{place}.type",
                code="invalid_value",
            )
        named = given.get("json_schema")
        if isinstance(named, dict):
            yield f"{place}.json_schema.schema", named.get("schema"), True
        yield f"{place}.schema", given.get("schema"), True


def _outputs(given: Any, limits: Limits) -> Iterator[Form]:
    name = "structured_outputs"
    if given is None:
        return
    if not isinstance(given, dict):
        raise errors.bad_request(
            f"Invalid type for `{name}`: expected an object with `json`, `regex` or `choice`.",
            param=name,
            code="invalid_type",
        )
    for key in _OTHERS:
        if given.get(key) is not None:
            raise _unsupported(name, f"`{key}`")
    schema = given.get("json")
    if isinstance(schema, str):
        # Before it is parsed: what reads it goes down by recursion.
        check_text_depth(f"{name}.json", schema, limits.json_depth)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise errors.bad_request(f"`{name}.json` is not JSON: {error}", param=name) from None
    yield f"{name}.json", schema, True
    yield f"{name}.regex", given.get("regex"), False
    yield f"{name}.choice", given.get("choice"), False


def _enforced_tools(data: dict[str, Any]) -> Iterator[Form]:
    tools = data.get("tools")
    forced = data.get("tool_choice") not in (None, "auto", "none")
    for at, tool in each_tool(tools if isinstance(tools, list) else []):
        for holder in schema_holders(tool):
            for name in SCHEMA_FIELDS:
                if forced or holder.get("strict"):
                    where = f"{at}.{name}" if holder is tool else f"{at}.function.{name}"
                    yield where, holder.get(name), bool(holder.get("strict"))


def _unsupported(name: str, what: str) -> HttpError:
    return errors.bad_request(
        f"`{name}`: {what} is not accepted by this server, expected a JSON schema, a regular expression or choices.",
        param=name,
        code="unsupported_parameter",
    )
