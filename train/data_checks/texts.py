"""The texts of an example: its own text without what many examples share, its answers, and every string in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from train.data.formats import Record

_NAMES = ("role", "from", "type", "id", "tool_call_id", "weight")


class Texts(NamedTuple):
    """body: all texts except system prompts, which many examples share. answer: the last text that is learnt. system:
    the system prompts, and what a grader sees."""

    body: str
    answer: str
    system: str


def texts_of(made: Record) -> Texts:
    """The texts of an example as a method has converted it."""
    chats = made.get("sequences", (made,))
    body, system = [], []
    for number, chat in enumerate(chats):
        # The sequences of a pair share their prompt.
        for message in chat["messages"] if number == 0 else chat["messages"][-1:]:
            (system if message["role"] == "system" else body).append(message["content"])
            body += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    if made.get("item"):
        system.append(orjson.dumps(made["item"]).decode())
    last = chats[0]["messages"][-1]
    return Texts("\n".join(body), last["content"] if last["role"] == "assistant" else "", "\n".join(system))


def with_strings(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    """A record with every text in it changed; names of roles and ids stay, and JSON in a text stays JSON."""
    if isinstance(value, dict):
        return {key: with_strings(inside, change, key) for key, inside in value.items()}
    if isinstance(value, list):
        return [with_strings(inside, change, name) for inside in value]
    if not isinstance(value, str) or name in _NAMES:
        return value
    if name == "arguments":
        try:
            parsed = json.loads(value)
            changed = _with_values(parsed, change)
            return value if changed == parsed else json.dumps(changed, ensure_ascii=False)
        except (ValueError, RecursionError):  # no JSON, or more levels than can be gone through
            return change(value)
    return change(value)


def _with_values(value: Any, change: Callable[[str], str]) -> Any:
    """As `with_strings`, for arguments of a call, where a number may be a card."""
    if isinstance(value, dict):
        return {key: _with_values(inside, change) for key, inside in value.items()}
    if isinstance(value, list):
        return [_with_values(inside, change) for inside in value]
    if isinstance(value, str):
        return change(value)
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
        changed = change(text)
        return value if changed == text else changed
    return value
