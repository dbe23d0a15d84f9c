"""A whole request as engines read it. Pure: takes a parsed body, returns another one."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from appliance.gateway.readings.items import items_as_meant
from appliance.gateway.readings.messages import anthropic_messages_as_meant, chat_messages_as_meant
from appliance.gateway.readings.tools import tools_as_meant

Object = dict[str, Any]

IGNORED_TOOLS: Final = b"x-appliance-ignored-tools"
IGNORED_ITEMS: Final = b"x-appliance-ignored-items"
IGNORED_KEYWORDS: Final = b"x-appliance-ignored-keywords"
_GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
"""vLLM's older names, which its clients still send -> fields of `structured_outputs`."""
_INCLUDES: Final = ("web_search_call.results", "web_search_call.action.sources")
"""Values of `include` that engines do not know; they add to items that only OpenAI's own tools make."""


class Reading(NamedTuple):
    """data: the body, the argument itself where nothing changed. headers: of the answer, naming what is left out."""

    data: Object
    headers: list[tuple[bytes, bytes]]


def as_meant(route: str, data: Object) -> Reading:
    """The request that a client means by this body, without nulls. Raises HttpError 400."""
    route = route.removesuffix(".input_tokens").removesuffix(".count_tokens")
    made = {name: value for name, value in data.items() if value is not None}
    items: list[str] = []
    tools = tools_as_meant(route, made)
    if made.get("top_p") == 0:  # greedy, which engines refuse in this form
        made["temperature"], made["top_p"] = 0, 1
    if made.get("temperature") == 0 and made.get("n", 1) != 1:  # several greedy answers: the same
        made["temperature"], made["top_k"] = 1, 1
    if route != "messages":
        _one_format(made)
    if isinstance(made.get("messages"), list):
        read = anthropic_messages_as_meant if route == "messages" else chat_messages_as_meant
        made["messages"] = read(made["messages"], items)
    if route == "responses":
        made.pop("client_metadata", None)  # Codex's own notes
        if isinstance(made.get("input"), list):
            made["input"] = items_as_meant(made["input"], items)
        if isinstance(made.get("include"), list):
            made["include"] = [one for one in made["include"] if one not in _INCLUDES]
    return Reading(data if made == data else made, [*header(IGNORED_TOOLS, tools), *header(IGNORED_ITEMS, items)])


def header(name: bytes, left_out: list[str]) -> list[tuple[bytes, bytes]]:
    """The header that names these, each once, in ASCII, and a few; none without any."""
    shown = ["".join(c if c.isascii() and (c.isalnum() or c in "._:-") else "_" for c in one) for one in left_out]
    value = ", ".join([one[:80] for one in dict.fromkeys(shown)][:16])
    return [(name, value.encode())] if value else []


def _one_format(data: Object) -> None:
    """One schema in the place where engines look for it, whatever field the client put it into."""
    for older, newer in _GUIDED.items():
        if older in data and not data.get("structured_outputs"):  # with them it stays, and is refused
            data["structured_outputs"] = {newer: data.pop(older)}
    wanted, text = data.get("response_format"), data.get("text")
    if isinstance(wanted, dict) and (flat := _format(wanted)) is not wanted:
        inner = {name: value for name, value in flat.items() if name != "type"}
        data["response_format"] = {"type": "json_schema", "json_schema": inner}
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        data["text"] = {**text, "format": _format(text["format"])}


def _format(wanted: Object) -> Object:
    """A format with its schema beside its type, as /v1/responses has it, wherever the client put the schema; the
    argument itself where there is none."""
    inner = wanted.get("json_schema")
    inner = inner if isinstance(inner, dict) else {}
    schema = wanted.get("schema") or inner.get("schema") or ({} if "name" in inner else inner)
    if wanted.get("type") not in ("json_object", "json_schema") or not isinstance(schema, dict) or not schema:
        return wanted
    named = {key: inner.get(key, wanted.get(key)) for key in ("name", "description", "strict")}
    made = {"type": "json_schema", "name": "answer", "schema": schema}
    return made | {key: value for key, value in named.items() if value is not None}
