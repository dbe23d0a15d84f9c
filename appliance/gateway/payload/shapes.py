"""Limits messages, parts and items in a body, and those whose type an engine cannot determine at once. Pure.

An engine validates a body against unions of some thirty types. It reads a value that matches one of them at once; it
compares a value that matches none with all, and records every mismatch of every field: an item of /v1/responses without
its role blocked the event loop that sends all tokens for 4 ms, 4,000 of them (40 KB) for 41 s. One field of the wrong
type in an otherwise valid item costs as much (1,000 times `"status": "x"`, 75 KB: 11 s and 490 MB), and so does each
part of an item that matches nothing. A few small ones may pass, so that the engine can report the error.
"""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

ODD_ITEMS: Final = 8
ODD_PARTS: Final = 64
# Values in all unrecognised items together, at any depth: the engine may compare each with every possible type.
ODD_VALUES: Final = 256
_PARTS: Final = frozenset(
    (
        "text image_url input_audio audio_url refusal file thinking tool_use tool_result image redacted_thinking "
        "tool_reference"
    ).split()
)
_FEW: Final = 16
# Those of namespaces included; OpenAI takes 128, each of which may be a namespace.
_MOST_TOOLS: Final = 1024
# The one field that says what a part of this type is.
_TEXT_OF: Final = {"text": "text", "refusal": "refusal", "thinking": "thinking", "redacted_thinking": "data"}
_OBJECT_OF: Final = {
    "image_url": "image_url",
    "input_audio": "input_audio",
    "audio_url": "audio_url",
    "file": "file",
    "image": "source",
}
SCHEMA_FIELDS: Final = ("parameters", "input_schema")
_TOOL_FIELDS: Final = frozenset({"function", *SCHEMA_FIELDS})
# Counted by other checks: texts and tokens, and the forms of answers (structure.py).
_MEASURED: Final = frozenset("messages input prompt tools functions system chat_template_kwargs".split())
_FORMS: Final = frozenset({"response_format", "structured_outputs", "text", "output_config"})
_LARGEST_TOKEN: Final = (1 << 32) - 1
# What clients send that no type of an engine has.
IGNORED: Final = frozenset(
    (
        "annotations cache_control citations created finish_reason id index parsed provider_specific_fields "
        "reasoning_details thinking_blocks weight"
    ).split()
)
_OWN_OF: Final = {**_OBJECT_OF, "tool_use": "input", "tool_result": "content"}
# At 13 µs each, the most that was measured.
_OTHER_VALUES: Final = 2048


class Odd:
    """How many places of a field have no shape that an engine recognises at once, and how many values they contain at
    any depth."""

    def __init__(self, name: str, places: int, values: int) -> None:
        self._name = name
        self._places = places
        self._values = values
        self._found = 0

    def add(self, value: Any) -> None:
        """Raises HttpError 400 when there are too many."""
        self._found += 1
        if isinstance(value, list | dict):
            self._values -= _values(value, self._values)
        if self._found > self._places or self._values < 0:
            raise _odd(self._name, self._found)


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


def check_tools(tools: list[Any]) -> None:
    """Checks the tools of every route. Raises HttpError 400."""
    odd = Odd("tools", ODD_ITEMS, ODD_VALUES)
    every = each_tool(tools)
    if len(every) > _MOST_TOOLS:
        raise too_many("tools", "tools", len(every), _MOST_TOOLS)
    for at, tool in every:
        if not isinstance(tool, dict):
            raise wrong_type(at, "an object")
        holders = schema_holders(tool)
        for found in holders:
            strict = found.get("strict")
            if strict is not None and not isinstance(strict, bool):
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
        if not text_or_none(holder, "description"):
            raise wrong_type(f"{where}.description", "a text")
        for name in SCHEMA_FIELDS:
            if holder.get(name) is not None and not isinstance(holder[name], dict):
                raise wrong_type(f"{where}.{name}", "a JSON schema, which is an object")
        for name, value in tool.items():
            if name == "tools" and tool.get("type") == "namespace":
                continue
            if name not in _TOOL_FIELDS and isinstance(value, list | dict) and _values(value, _FEW) > _FEW:
                odd.add(value)


def check_system(system: Any) -> None:
    """Checks the system prompt of Anthropic's API. Raises HttpError 400."""
    if isinstance(system, list):
        odd = Odd("system", ODD_PARTS, ODD_VALUES)
        for part in system:
            if not isinstance(part, dict) or not is_known_part(part):
                odd.add(part)


def check_others(data: dict[str, Any]) -> None:
    """Checks all other fields together: an engine may compare each of their values with several types. Raises HttpError
    400."""
    values = 0
    for name, value in data.items():
        if isinstance(value, list | dict) and name not in _MEASURED:
            values += _values(value, _OTHER_VALUES, schemas=name not in _FORMS)
            if values > _OTHER_VALUES:
                raise too_many(name, "values", values, _OTHER_VALUES)


def same_kind(values: list[Any]) -> bool:
    """Whether a prompt is tokens alone, texts alone, or lists of tokens alone. values: not empty."""
    kind = type(values[0])
    if kind is list:
        for tokens in values:
            if type(tokens) is not list or not _numbers(tokens):
                return False
        return True
    if kind is int:
        return _numbers(values)
    for value in values:
        if type(value) is not str:
            return False
    return True


def _numbers(values: list[Any]) -> bool:
    for value in values:
        if type(value) is not int or value < 0 or value > _LARGEST_TOKEN:
            return False
    return True


def all_texts(value: dict[str, Any]) -> bool:
    if len(value) > _FEW:
        return False
    for inner in value.values():
        if inner is not None and not isinstance(inner, str):
            return False
    return True


def refuse_uuid(part: dict[str, Any], name: str) -> None:
    """vLLM keeps what it made of a picture or a sound under this name, without its owner: who gave another's was
    answered for another's picture, and could have others answered for his own."""
    if "uuid" in part:
        raise errors.bad_request(
            f"A part of `{name}` has a `uuid`, which this server does not take: send the picture or sound itself.",
            param=name,
            code="unsupported_parameter",
        )


def is_known_part(part: dict[str, Any]) -> bool:
    refuse_uuid(part, "messages")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _PARTS:
        return False
    for name, value in part.items():
        if value is None or isinstance(value, str | bool) or name == _OWN_OF.get(kind):
            continue
        if name not in IGNORED or (isinstance(value, list | dict) and _values(value, _FEW) > _FEW):
            return False
    if kind in _TEXT_OF:
        return isinstance(part.get(_TEXT_OF[kind]), str)
    if kind in _OBJECT_OF:
        value = part.get(_OBJECT_OF[kind])
        return isinstance(value, str) or (isinstance(value, dict) and _values(value, _FEW) <= _FEW)
    if kind == "tool_use":
        return isinstance(part.get("name"), str) and isinstance(part.get("input"), dict)
    if kind == "tool_result":
        content = part.get("content")
        if isinstance(content, list):
            for inner in content:
                if not isinstance(inner, dict):
                    return False
            return True
        return content is None or isinstance(content, str)
    return True


def _values(root: Any, most: int, schemas: bool = True) -> int:
    """Number of values in an item, at any depth, up to `most`. schemas: with those of JSON schemas in it, which
    structure.py measures in the forms of answers."""
    found, stack = 0, [root]
    while stack and found <= most:
        node = stack.pop()
        if isinstance(node, dict):
            found += len(node)
            if schemas:
                stack.extend(node.values())
                continue
            for name, value in node.items():
                if name != "schema" and not (name == "json" and isinstance(value, dict)):
                    stack.append(value)
        elif isinstance(node, list):
            found += len(node)
            stack.extend(node)
    return found


def text_or_none(item: dict[str, Any], name: str) -> bool:
    value = item.get(name)
    return value is None or isinstance(value, str)


def wrong_type(name: str, expected: str) -> HttpError:
    return errors.bad_request(f"Invalid type for `{name}`: expected {expected}.", param=name, code="invalid_type")


def too_many(name: str, what: str, given: int, limit: int) -> HttpError:
    return errors.bad_request(
        f"Invalid value for `{name}`: {given} {what} given, at most {limit} are allowed.",
        param=name,
        code="too_many_values",
    )


def _odd(name: str, given: int) -> HttpError:
    return errors.bad_request(
        f"Invalid value for `{name}`: {given} of its parts have no known type, or lack what that type needs "
        "(`type`, `role`, `content`, `text`, …).",
        param=name,
    )
