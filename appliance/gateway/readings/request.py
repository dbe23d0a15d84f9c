"""A whole request as engines read it. Pure: takes a parsed body, returns another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from appliance.gateway.readings.accepted import ACCEPTED, INCLUDES
from appliance.gateway.readings.formats import formats_as_meant
from appliance.gateway.readings.items import items_as_meant, with_settings_of_items
from appliance.gateway.readings.messages import anthropic_messages_as_meant, chat_messages_as_meant
from appliance.gateway.readings.tools import tools_as_meant

IGNORED_TOOLS: Final = b"x-appliance-ignored-tools"
IGNORED_ITEMS: Final = b"x-appliance-ignored-items"
_ROUTES: Final = {"responses.input_tokens": "responses", "messages.count_tokens": "messages"}
_FORMED: Final = frozenset({"chat.completions", "completions", "responses"})
_MOST_NAMED: Final = 16
_NAME_CHARS: Final = 80


class Reading:
    """data: the body, the argument itself where nothing changed. tools, items: names of what is left out of it."""

    def __init__(self, data: dict[str, Any], tools: list[str], items: list[str]) -> None:
        self.data = data
        self.tools = tools
        self.items = items

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer that name these."""
        named = ((IGNORED_TOOLS, self.tools), (IGNORED_ITEMS, self.items))
        return [(name, _listed(left_out)) for name, left_out in named if left_out]


def as_meant(route: str, data: dict[str, Any]) -> Reading:
    """The request that a client means by this body. Raises HttpError 400 for a tool or document that nothing here can
    take the place of."""
    route = _ROUTES.get(route, route)
    taken = ACCEPTED.get(route, {})
    made = {name: value for name, value in data.items() if name not in taken}
    tools: list[str] = []
    items: list[str] = []
    if route == "responses" and isinstance(made.get("input"), list):
        made = with_settings_of_items(made)
    tools_as_meant(route, made, tools)
    if route in _FORMED:
        formats_as_meant(made)
    if route == "responses":
        _response(made, items)
    elif isinstance(made.get("messages"), list):
        if route == "messages":
            made["messages"] = anthropic_messages_as_meant(made["messages"], items)
        else:
            made["messages"] = chat_messages_as_meant(made["messages"])
    return Reading(data if made == data else made, tools, items)


def _response(data: dict[str, Any], left_out: list[str]) -> None:
    if isinstance(data.get("input"), list):
        data["input"] = items_as_meant(data["input"], left_out)
    include = data.get("include")
    if isinstance(include, list):
        data["include"] = [one for one in include if not (isinstance(one, str) and one in INCLUDES)]


def _listed(names: Iterable[str]) -> bytes:
    """Names as the value of a header: each once, in ASCII, and a few."""
    shown = [_plain(name) for name in dict.fromkeys(names)]
    more = [f"and {len(shown) - _MOST_NAMED} more"] if len(shown) > _MOST_NAMED else []
    return ", ".join([*shown[:_MOST_NAMED], *more]).encode()


def _plain(name: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char in "._:-") else "_" for char in name)[
        :_NAME_CHARS
    ]
