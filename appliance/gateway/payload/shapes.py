"""Bounds how many messages, items, parts and tools a body holds, and checks the few fields of them that nobody behind
the gateway would report clearly. Pure. The rest is the engine's check, whose errors are turned into OpenAI's shape."""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.nesting import check_text_depth

MESSAGE_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
ANTHROPIC_ROLES: Final = frozenset({"system", "user", "assistant"})
SCHEMA_FIELDS: Final = ("parameters", "input_schema")
# Those of namespaces included; OpenAI takes 128, each of which may be a namespace.
_MOST_TOOLS: Final = 1024
_LARGEST_TOKEN: Final = (1 << 32) - 1


def check_messages(messages: Any, limits: Limits, roles: frozenset[str]) -> None:
    """Checks the messages of chat and of Anthropic's API. roles: those that it has. Raises HttpError 400."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise wrong_type("messages", "an array of objects")
    if len(messages) > limits.messages:
        raise too_many("messages", "messages", len(messages), limits.messages)
    parts = 0
    for place, message in enumerate(messages):
        _check_role(message, place, roles)
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise wrong_type(f"messages[{place}].tool_calls", "an array")
        calls = calls or []
        parts += len(calls) + _parts("messages", message.get("content"))
        for call in (message, *calls):  # `function_call` of a message is the older kind of call
            function = call.get("function_call" if call is message else "function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                check_text_depth(f"messages[{place}].tool_calls", function.get("arguments"), limits.json_depth)
    if parts > limits.messages:
        raise too_many("messages", "parts of messages", parts, limits.messages)


def check_items(items: list[Any], limits: Limits) -> None:
    """Checks the items of /v1/responses. Raises HttpError 400."""
    if len(items) > limits.input_items:
        raise too_many("input", "items", len(items), limits.input_items)
    parts = 0
    for place, item in enumerate(items):
        # An engine compares an item that has neither with each of its thirty types.
        if not isinstance(item, dict) or not (isinstance(item.get("role"), str) or isinstance(item.get("type"), str)):
            raise wrong_type(f"input[{place}]", "an object with a `role` or a `type`")
        parts += sum(_parts("input", item.get(name)) for name in ("content", "output", "summary"))
        check_text_depth(f"input[{place}].arguments", item.get("arguments"), limits.json_depth)
    if parts > limits.messages:
        raise too_many("input", "parts of items", parts, limits.messages)


def check_tools(tools: list[Any]) -> None:
    """Checks the tools of every route. Raises HttpError 400."""
    every = each_tool(tools)
    if len(every) > _MOST_TOOLS:
        raise too_many("tools", "tools", len(every), _MOST_TOOLS)
    for at, tool in every:
        if not isinstance(tool, dict):
            raise wrong_type(at, "an object")
        holders = schema_holders(tool)
        for found in holders:
            if not isinstance(found.get("strict"), bool | None):
                # An engine takes 1 or "yes" for true; what is measured must not depend on how it reads.
                raise wrong_type(f"{at}.strict", "a boolean")
        if len(holders) > 1 and (twice := [name for name in SCHEMA_FIELDS if tool.get(name) is not None]):
            raise errors.bad_request(
                f"`{at}` has both `function` and `{twice[0]}`; a tool has its schema in one place.",
                param=f"{at}.{twice[0]}",
                code="invalid_value",
            )
        holder = holders[-1]
        where = f"{at}.function" if len(holders) > 1 else at
        if not isinstance(holder.get("name"), str) or not holder["name"]:
            raise wrong_type(f"{where}.name", "a text that is not empty")
        if not isinstance(holder.get("description"), str | None):
            raise wrong_type(f"{where}.description", "a text")
        for name in SCHEMA_FIELDS:
            if not isinstance(holder.get(name), dict | None):
                raise wrong_type(f"{where}.{name}", "a JSON schema, which is an object")


def schema_holders(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a tool may have its schema: in `function` (chat), or in itself (Responses, Anthropic). Which one an engine
    reads depends on the route, so that both count."""
    function = tool.get("function")
    return [tool, function] if isinstance(function, dict) else [tool]


def each_tool(tools: list[Any]) -> list[tuple[str, Any]]:
    """All tools with their places, those of namespaces too."""
    found: list[tuple[str, Any]] = []
    for place, tool in enumerate(tools):
        found.append((f"tools[{place}]", tool))
        if isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            found += [(f"tools[{place}].tools[{inner}]", one) for inner, one in enumerate(tool["tools"])]
    return found


def same_kind(values: list[Any]) -> bool:
    """Whether a prompt is tokens alone, texts alone, or lists of tokens alone. values: not empty."""
    kind = type(values[0])
    if kind is list:
        return all(type(tokens) is list and _are_tokens(tokens) for tokens in values)
    return _are_tokens(values) if kind is int else all(type(value) is str for value in values)


def _are_tokens(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= _LARGEST_TOKEN for value in values)


def _parts(name: str, content: Any) -> int:
    """How many parts a content has, those of a tool's result included."""
    if not isinstance(content, list):
        return 0
    found = len(content)
    for part in content:
        if not isinstance(part, dict):
            continue
        if "uuid" in part:
            # vLLM keeps what it made of a picture or a sound under this name, without its owner: who gave another's
            # was answered for another's picture.
            raise errors.bad_request(
                f"A part of `{name}` has a `uuid`, which this server does not take: send the picture or sound itself.",
                param=name,
                code="unsupported_parameter",
            )
        found += _parts(name, part.get("content"))
    return found


def _check_role(message: dict[str, Any], place: int, roles: frozenset[str]) -> None:
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        shown = f"'{role[:64]}'" if isinstance(role, str) else "null" if role is None else type(role).__name__
        raise errors.bad_request(
            f"Invalid value for `messages[{place}].role`: {shown} given, expected one of {', '.join(sorted(roles))}.",
            param=f"messages[{place}].role",
            code="invalid_value",
        )
    says_more = any(name != "role" and value is not None for name, value in message.items())
    if message.get("content") is None and role != "function" and not (role == "assistant" and says_more):
        raise errors.bad_request(
            f"Invalid value for `messages[{place}].content`: null given, expected a string or an array of parts; "
            "only a message of the assistant that has something else, such as tool calls, goes without.",
            param=f"messages[{place}].content",
            code="invalid_type",
        )


def wrong_type(name: str, expected: str) -> HttpError:
    return errors.bad_request(f"Invalid type for `{name}`: expected {expected}.", param=name, code="invalid_type")


def too_many(name: str, what: str, given: int, limit: int) -> HttpError:
    return errors.bad_request(
        f"Invalid value for `{name}`: {given} {what} given, at most {limit} are allowed.",
        param=name,
        code="too_many_values",
    )
