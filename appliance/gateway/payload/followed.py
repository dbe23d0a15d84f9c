"""Refuses schemas that no grammar backend of an engine enforces, by keyword and place. Pure, beside llguidance's check.

A format's schema is a promise, and so is a tool's with `strict`. Arguments of other tools are not promised, and clients
send schemas of all kinds for them.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.shapes import SCHEMA_FIELDS, each_tool, schema_holders
from serve.forms.followed_schemas import Fault, fault, fault_of_tool, without_notes

_PLACES: Final = (
    ("response_format", "json_schema", "schema"),
    ("structured_outputs", "json"),
    ("text", "format", "schema"),
    ("output_config", "format", "schema"),
)


def with_followed_schemas(data: dict[str, Any]) -> dict[str, Any]:
    """The body with schemas that an engine enforces whole; the argument itself if nothing in it changes. data: passed
    structure.py. Raises HttpError 400."""
    made = data
    for place in _PLACES:
        holders = [made]
        for name in place[:-1]:
            inner = holders[-1].get(name)
            holders.append(inner if isinstance(inner, dict) else {})
        given = holders[-1].get(place[-1])
        # As a text it is vLLM's own, which structure.py has parsed too.
        schema = orjson.loads(given) if isinstance(given, str) and place[-1] == "json" else given
        if not isinstance(schema, dict):
            continue
        noted = without_notes(schema)
        if (found := fault(noted)) is not None:
            raise _unfollowed(".".join(place), found)
        if noted is not schema:
            value: Any = noted
            for name, holder in zip(reversed(place), reversed(holders), strict=True):
                value = {**holder, name: value}
            made = value
    tools = data.get("tools")
    for at, tool in each_tool(tools if isinstance(tools, list) else []):
        for holder in schema_holders(tool):
            for name in SCHEMA_FIELDS:
                schema = holder.get(name)
                if (
                    holder.get("strict")
                    and isinstance(schema, dict)
                    and (found := fault_of_tool(without_notes(schema))) is not None
                ):
                    raise _unfollowed(f"{at}.{name}" if holder is tool else f"{at}.function.{name}", found, tool=True)
    return made


def _unfollowed(place: str, found: Fault, *, tool: bool = False) -> HttpError:
    if not found.keyword:
        return errors.bad_request(
            f"Invalid schema for `{place}`: {found.why}.", param=place, code="invalid_json_schema"
        )
    where = f"{place}.{found.path}"
    instead = "take it out, or send the tool without `strict`" if tool else "take it out and check answers yourself"
    return errors.bad_request(
        f"`{where}`: this server does not enforce the keyword `{found.keyword}` here ({found.why}): {instead}.",
        param=where,
        code="unsupported_schema_keyword",
    )
