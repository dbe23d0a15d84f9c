"""Expressions that a text fits in many ways at once are refused where xgrammar follows them."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.expression_ways import MOST_WAYS, ways
from appliance.gateway.payload.structure import check_structure

# Each took 0.08 to 1.7 s of processor time for one mask with 4,096 tokens.
SLOW = [
    *("(.{1,8}){32}", "(.{0,2}){128}", "(.{1,2}){120}", "(.?.?){100}", r"([^\x00]{1,2}){100}", "(.{1,8})*"),
    *("(.{0,16}){12}", ".{0,16}" * 12, ".?" * 16, "((?:.{1,8})*)*", "(.|..|...|....){24}", "(?:(.){1,8}?){32}"),
    *("([a-z]{1,8}){32}", r"(\d{1,8}){32}", "((a|b|c|d|e|f)?){60}", "((.{1,8}){32}", ".{0,2}+", "[^a]{1,8}" * 4),
    "(.{01,0000000008}){32}",
]
QUICK = [
    *(".{0,200}", ".*", "(.*)*", ".*" * 12, r"^\d{4}-\d{2}-\d{2}$", r"(\d{1,3}\.){3}\d{1,3}", r"\d{1,3}(\.\d{1,3}){3}"),
    *(r"^[^@\s]+@[^@\s]+\.[^@\s]+$", "https?://.+", "^(red|green|blue|yellow|black)$", "[A-Z]{2,3}-[0-9]{1,4}"),
    *(
        "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "colou?r",
        "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
        "(ab){0,50}",
        "{",
        "a{",
        ")",
    ),
]


@pytest.mark.parametrize("pattern", SLOW)
def test_what_took_an_engine_long_has_many_ways(pattern: str) -> None:
    assert ways(pattern) > MOST_WAYS


@pytest.mark.parametrize("pattern", QUICK)
def test_what_people_write_has_few(pattern: str) -> None:
    assert ways(pattern) <= MOST_WAYS


def _object(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


def _tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, **more}}]}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


SLOW_ONE = "(.{1,8}){16}"
OF_XGRAMMAR = [
    _tool(_object(SLOW_ONE)) | {"tool_choice": "required"},
    _tool(_object(SLOW_ONE), strict=True),
    _format({"type": "object", "patternProperties": {SLOW_ONE: {}}}),
    _format({"type": "object", "propertyNames": {"pattern": SLOW_ONE}}),
    _format({"anyOf": [_object(SLOW_ONE), {"type": "array", "items": {"patternProperties": {"a": {}}}}]}),
]


@pytest.mark.parametrize("body", OF_XGRAMMAR)
def test_they_are_refused_where_xgrammar_follows_them(body: dict[str, Any]) -> None:
    with pytest.raises(HttpError, match="in many ways") as refused:
        check_structure(body, Limits())
    assert refused.value.code == "structure_too_complex"


@pytest.mark.parametrize("body", [_tool(_object(SLOW_ONE)), _format(_object(SLOW_ONE))])
def test_and_nowhere_else(body: dict[str, Any]) -> None:
    check_structure(body, Limits())
