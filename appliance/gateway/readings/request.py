"""A whole request as engines read it. Pure: takes a parsed body, returns another one."""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.readings.items import items_as_meant
from appliance.gateway.readings.messages import anthropic_messages_as_meant, chat_messages_as_meant
from appliance.gateway.readings.tools import tools_as_meant

Object = dict[str, Any]

IGNORED_TOOLS: Final = b"x-appliance-ignored-tools"
IGNORED_ITEMS: Final = b"x-appliance-ignored-items"
IGNORED_KEYWORDS: Final = b"x-appliance-ignored-keywords"
_GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
"""vLLM's older names, which its clients still send -> fields of `structured_outputs`."""
_INCLUDES: Final = frozenset({"web_search_call.results", "web_search_call.action.sources"})
"""Values of `include` that engines do not know; they add to items that only OpenAI's own tools make."""


class Reading:
    """data: the body, the argument itself where nothing changed. tools, items: names of what is left out of it;
    keywords: places of those that the calls of strict tools are not held to."""

    def __init__(self, data: Object, tools: list[str], items: list[str]) -> None:
        self.data = data
        self.tools = tools
        self.items = items
        self.keywords: list[str] = []

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer that name these."""
        named = ((IGNORED_TOOLS, self.tools), (IGNORED_ITEMS, self.items), (IGNORED_KEYWORDS, self.keywords))
        return [(name, _listed(left_out)) for name, left_out in named if left_out]


def as_meant(route: str, data: Object) -> Reading:
    """The request that a client means by this body. Raises HttpError 400."""
    route = route.removesuffix(".input_tokens").removesuffix(".count_tokens")
    made = dict(data)
    tools: list[str] = []
    items: list[str] = []
    tools_as_meant(route, made, tools)
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
        _response(made, items)
    return Reading(data if made == data else made, tools, items)


def _response(data: Object, left_out: list[str]) -> None:
    data.pop("client_metadata", None)  # Codex's own notes
    # Null is OpenAI's default, at which an engine fails.
    for name in ("background", "truncation", "service_tier", "tools", "tool_choice", "top_logprobs"):
        if data.get(name, 0) is None:
            del data[name]
    if isinstance(data.get("input"), list):
        data["input"] = items_as_meant(data["input"], left_out)
    if isinstance(data.get("include"), list):
        data["include"] = [one for one in data["include"] if not (isinstance(one, str) and one in _INCLUDES)]


def _one_format(data: Object) -> None:
    """One schema in the place where engines look for it, whatever field the client put it into."""
    for older, newer in _GUIDED.items():
        if data.get(older) is None:
            data.pop(older, None)
        elif not data.get("structured_outputs"):  # beside them it stays, and is refused
            data["structured_outputs"] = {newer: data.pop(older)}
    wanted = data.get("response_format")
    if isinstance(wanted, dict):
        flat = _format(wanted)
        if flat is not wanted:
            inner = {name: value for name, value in flat.items() if name != "type"}
            data["response_format"] = {"type": "json_schema", "json_schema": inner}
        elif _asks_less(wanted, data):
            del data["response_format"]
    text = data.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        data["text"] = {**text, "format": _format(text["format"])}
        if _asks_less(data["text"]["format"], data):
            del data["text"]["format"]


def _asks_less(wanted: Object, data: Object) -> bool:
    """Whether a format asks for less than `structured_outputs` do: an engine takes one of both."""
    return bool(data.get("structured_outputs")) and wanted.get("type") in ("json_object", "text")


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


def _listed(names: list[str]) -> bytes:
    """Names as the value of a header: each once, in ASCII, and a few."""
    shown = ["".join(c if c.isascii() and (c.isalnum() or c in "._:-") else "_" for c in name) for name in names]
    return ", ".join([name[:80] for name in dict.fromkeys(shown)][:16]).encode()
