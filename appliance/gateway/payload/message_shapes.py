"""Limits the messages of chat and of Anthropic's API, and their parts; see shapes.py. Pure."""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.body_weight import check_inner
from appliance.gateway.payload.shapes import (
    IGNORED,
    ODD_PARTS,
    ODD_VALUES,
    Odd,
    all_texts,
    is_known_part,
    text_or_none,
    too_many,
    wrong_type,
)

MESSAGE_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
ANTHROPIC_ROLES: Final = frozenset({"system", "user", "assistant"})
# An engine's forms of Anthropic's messages; what a tool in them would cost is not measured.
_TOOL_CHANGES: Final = frozenset({"tool_addition", "tool_removal"})
_MESSAGE_OBJECTS: Final = ("audio", "function_call")
# What check_messages looks at by name.
_MESSAGE_OWN: Final = frozenset({"role", "content", "tool_calls"})
_MESSAGE_TEXTS: Final = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")


def check_messages(messages: list[Any], limits: Limits, roles: frozenset[str]) -> None:
    """Checks the messages of chat and of Anthropic's API. roles: those that it has. Raises HttpError 400."""
    if len(messages) > limits.messages:
        raise too_many("messages", "messages", len(messages), limits.messages)
    parts, odd = 0, Odd("messages", ODD_PARTS, ODD_VALUES)
    arguments: list[str] = []
    for place, message in enumerate(messages):
        _check_role(message, place, roles)
        parts += _content(message.get("content"), place, odd)
        _others(message, odd)
        older = message.get("function_call")  # an engine makes a tool call of it
        if isinstance(older, dict) and isinstance(older.get("arguments"), str):
            arguments.append(older["arguments"])
        parts += _calls(message.get("tool_calls"), place, odd, arguments)
    if parts > limits.messages:
        raise too_many("messages", "parts of messages", parts, limits.messages)
    if arguments:
        check_inner("messages.tool_calls", arguments, limits.json_weight, limits.json_depth)


def _check_role(message: dict[str, Any], place: int, roles: frozenset[str]) -> None:
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise _wrong_role(place, role, roles)
    if message.get("content") is None and role != "function" and not (role == "assistant" and _says_something(message)):
        raise errors.bad_request(
            f"Invalid value for `messages[{place}].content`: null given, expected a string or an array of parts; "
            "only a message of the assistant that has something else, such as tool calls, goes without.",
            param=f"messages[{place}].content",
            code="invalid_type",
        )


def _content(content: Any, place: int, odd: Odd) -> int:
    """How many parts it has."""
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            odd.add(content)
        return 0
    parts = len(content)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _TOOL_CHANGES:
            raise errors.bad_request(
                f"`messages[{place}].content` has a part of type '{kind}', which this server does not take: name all "
                "tools in `tools`.",
                param=f"messages[{place}].content",
                code="unsupported_parameter",
            )
        if not isinstance(part, dict) or not is_known_part(part):
            odd.add(part)
        elif isinstance(part.get("content"), list):  # of a tool's result, whose parts an engine takes one by one
            parts += len(part["content"])
            for inner in part["content"]:
                if not isinstance(inner, dict) or not is_known_part(inner) or isinstance(inner.get("content"), list):
                    odd.add(inner)
    return parts


def _others(message: dict[str, Any], odd: Odd) -> None:
    for name, value in message.items():
        if value is None or name in _MESSAGE_OWN or name in IGNORED:
            continue
        if name in _MESSAGE_TEXTS:
            if not isinstance(value, str):
                odd.add(value)
        elif name not in _MESSAGE_OBJECTS or not isinstance(value, dict) or not all_texts(value):
            odd.add(value)


def _calls(calls: Any, place: int, odd: Odd, arguments: list[str]) -> int:
    """How many calls there are. Adds their arguments."""
    if not isinstance(calls, list):
        if calls is not None:
            raise wrong_type(f"messages[{place}].tool_calls", "an array")
        return 0
    for call in calls:
        if not isinstance(call, dict) or not _known_call(call):
            odd.add(call)
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments.append(function["arguments"])
    return len(calls)


def _says_something(message: dict[str, Any]) -> bool:
    """Whether a message without content has anything else."""
    for name, value in message.items():
        if name != "role" and value is not None:
            return True
    return False


def _known_call(call: dict[str, Any]) -> bool:
    function = call.get("function")
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and text_or_none(function, "arguments")
        and text_or_none(call, "id")
        and call.get("type", "function") == "function"
    )


def _wrong_role(place: int, role: Any, roles: frozenset[str]) -> HttpError:
    shown = f"'{role[:64]}'" if isinstance(role, str) else "null" if role is None else type(role).__name__
    return errors.bad_request(
        f"Invalid value for `messages[{place}].role`: {shown} given, expected one of {', '.join(sorted(roles))}.",
        param=f"messages[{place}].role",
        code="invalid_value",
    )
