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
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.payload.body_weight import check_inner

_ODD_ITEMS: Final = 8
_ODD_PARTS: Final = 64
_LOGPROBS_PER_PART: Final = 8
# Values in all unrecognised items together, at any depth: the engine may compare each with every possible type.
_ODD_VALUES: Final = 256
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_INPUT_PARTS: Final = frozenset({"input_text", "input_image", "input_file"})
_PARTS: Final = frozenset(
    (
        "text image_url input_audio audio_url refusal file thinking tool_use tool_result image redacted_thinking "
        "tool_reference"
    ).split()
)
_STATUS: Final = frozenset({"in_progress", "completed", "incomplete"})
_PHASES: Final = frozenset({"commentary", "final_answer"})
_DETAILS: Final = frozenset({"auto", "low", "high", "original"})
_ANNOTATIONS: Final = frozenset({"file_citation", "url_citation", "container_file_citation", "file_path"})
# Fields that are always texts, and may be null in an item but not in a file part.
_CALL_TEXTS: Final = ("id", "namespace", "name")
_FILE_TEXTS: Final = ("file_data", "file_url", "filename")
MESSAGE_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
ANTHROPIC_ROLES: Final = frozenset({"system", "user", "assistant"})
# An engine's forms of Anthropic's messages; what a tool in them would cost is not measured.
_TOOL_CHANGES: Final = frozenset({"tool_addition", "tool_removal"})
_MESSAGE_OBJECTS: Final = ("audio", "function_call")
_FEW: Final = 16
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
# What check_messages looks at by name, and what clients send that no type of an engine has.
_MESSAGE_OWN: Final = frozenset({"role", "content", "tool_calls"})
_IGNORED: Final = frozenset(
    (
        "annotations cache_control citations created finish_reason id index parsed provider_specific_fields "
        "reasoning_details thinking_blocks weight"
    ).split()
)
_OWN_OF: Final = {**_OBJECT_OF, "tool_use": "input", "tool_result": "content"}
# At 13 µs each, the most that was measured.
_OTHER_VALUES: Final = 2048
_MESSAGE_TEXTS: Final = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")


class _Odd:
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


def check_messages(messages: list[Any], limits: Limits, roles: frozenset[str]) -> None:
    """Checks the messages of chat and of Anthropic's API. roles: those that it has. Raises HttpError 400."""
    if len(messages) > limits.messages:
        raise _too_many("messages", "messages", len(messages), limits.messages)
    parts, odd = 0, _Odd("messages", _ODD_PARTS, _ODD_VALUES)
    arguments: list[str] = []
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in roles:
            raise _wrong_role(place, role, roles)
        if content is None and role != "function" and not (role == "assistant" and _says_something(message)):
            raise errors.bad_request(
                f"Invalid value for `messages[{place}].content`: null given, expected a string or an array of parts; "
                "only a message of the assistant that has something else, such as tool calls, goes without.",
                param=f"messages[{place}].content",
                code="invalid_type",
            )
        if isinstance(content, list):
            parts += len(content)
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind in _TOOL_CHANGES:
                    raise errors.bad_request(
                        f"`messages[{place}].content` has a part of type '{kind}', which this server does not "
                        "take: name all tools in `tools`.",
                        param=f"messages[{place}].content",
                        code="unsupported_parameter",
                    )
                if not isinstance(part, dict) or not _known_part(part):
                    odd.add(part)
                elif isinstance(
                    part.get("content"), list
                ):  # of a tool's result, whose parts an engine takes one by one
                    parts += len(part["content"])
                    for inner in part["content"]:
                        if (
                            not isinstance(inner, dict)
                            or not _known_part(inner)
                            or isinstance(inner.get("content"), list)
                        ):
                            odd.add(inner)
        elif content is not None and not isinstance(content, str):
            odd.add(content)
        for name, value in message.items():
            if value is None or name in _MESSAGE_OWN or name in _IGNORED:
                continue
            if name in _MESSAGE_TEXTS:
                if not isinstance(value, str):
                    odd.add(value)
            elif name not in _MESSAGE_OBJECTS or not isinstance(value, dict) or not _all_texts(value):
                odd.add(value)
        older = message.get("function_call")  # an engine makes a tool call of it
        if isinstance(older, dict) and isinstance(older.get("arguments"), str):
            arguments.append(older["arguments"])
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            parts += len(calls)
            for call in calls:
                if not isinstance(call, dict) or not _known_call(call):
                    odd.add(call)
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                    arguments.append(function["arguments"])
        elif calls is not None:
            raise _wrong_type(f"messages[{place}].tool_calls", "an array")
    if parts > limits.messages:
        raise _too_many("messages", "parts of messages", parts, limits.messages)
    if arguments:
        check_inner("messages.tool_calls", arguments, limits.json_weight, limits.json_depth)


def _says_something(message: dict[str, Any]) -> bool:
    """Whether a message without content has anything else."""
    for name, value in message.items():
        if name != "role" and value is not None:
            return True
    return False


def schema_holders(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a tool may have its schema: in `function` (chat), or in itself (Responses, Anthropic). Which one an engine
    reads depends on the route, so that both count."""
    function = tool.get("function")
    return [tool, function] if isinstance(function, dict) else [tool]


def check_tools(tools: list[Any]) -> None:
    """Checks the tools of every route. Raises HttpError 400."""
    odd = _Odd("tools", _ODD_ITEMS, _ODD_VALUES)
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _wrong_type(f"tools[{place}]", "an object")
        holders = schema_holders(tool)
        for found in holders:
            strict = found.get("strict")
            if strict is not None and not isinstance(strict, bool):
                # An engine takes 1 or "yes" for true; what is measured must not depend on how it reads.
                raise _wrong_type(f"tools[{place}].strict", "a boolean")
        if len(holders) > 1 and (twice := [name for name in SCHEMA_FIELDS if tool.get(name) is not None]):
            raise errors.bad_request(
                f"`tools[{place}]` has both `function` and `{twice[0]}`; a tool has its schema in one place.",
                param=f"tools[{place}].{twice[0]}",
                code="invalid_value",
            )
        holder = holders[-1]
        where = f"tools[{place}].function" if len(holders) > 1 else f"tools[{place}]"
        if not isinstance(holder.get("name"), str) or not holder["name"]:
            raise _wrong_type(f"{where}.name", "a text that is not empty")
        if not _text_or_none(holder, "description"):
            raise _wrong_type(f"{where}.description", "a text")
        for name in SCHEMA_FIELDS:
            if holder.get(name) is not None and not isinstance(holder[name], dict):
                raise _wrong_type(f"{where}.{name}", "a JSON schema, which is an object")
        for name, value in tool.items():
            if name not in _TOOL_FIELDS and isinstance(value, list | dict) and _values(value, _FEW) > _FEW:
                odd.add(value)


def check_system(system: Any) -> None:
    """Checks the system prompt of Anthropic's API. Raises HttpError 400."""
    if isinstance(system, list):
        odd = _Odd("system", _ODD_PARTS, _ODD_VALUES)
        for part in system:
            if not isinstance(part, dict) or not _known_part(part):
                odd.add(part)


def check_others(data: dict[str, Any]) -> None:
    """Checks all other fields together: an engine may compare each of their values with several types. Raises HttpError
    400."""
    values = 0
    for name, value in data.items():
        if isinstance(value, list | dict) and name not in _MEASURED:
            values += _values(value, _OTHER_VALUES, schemas=name not in _FORMS)
            if values > _OTHER_VALUES:
                raise _too_many(name, "values", values, _OTHER_VALUES)


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


def _all_texts(value: dict[str, Any]) -> bool:
    if len(value) > _FEW:
        return False
    for inner in value.values():
        if inner is not None and not isinstance(inner, str):
            return False
    return True


def _refuse_uuid(part: dict[str, Any], name: str) -> None:
    """vLLM keeps what it made of a picture or a sound under this name, without its owner: who gave another's was
    answered for another's picture, and could have others answered for his own."""
    if "uuid" in part:
        raise errors.bad_request(
            f"A part of `{name}` has a `uuid`, which this server does not take: send the picture or sound itself.",
            param=name,
            code="unsupported_parameter",
        )


def _known_part(part: dict[str, Any]) -> bool:
    _refuse_uuid(part, "messages")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _PARTS:
        return False
    for name, value in part.items():
        if value is None or isinstance(value, str | bool) or name == _OWN_OF.get(kind):
            continue
        if name not in _IGNORED or (isinstance(value, list | dict) and _values(value, _FEW) > _FEW):
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


def _known_call(call: dict[str, Any]) -> bool:
    function = call.get("function")
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and _text_or_none(function, "arguments")
        and _text_or_none(call, "id")
        and call.get("type", "function") == "function"
    )


def check_items(items: list[Any], limits: Limits) -> None:
    """Checks the items of /v1/responses. Raises HttpError 400."""
    if len(items) > limits.input_items:
        raise _too_many("input", "items", len(items), limits.input_items)
    parts, odd, values = 0, 0, 0
    arguments: list[str] = []
    for item in items:
        if isinstance(item, dict):
            if isinstance(item.get("arguments"), str):
                arguments.append(item["arguments"])
            for name in ("content", "output"):
                inner = item.get(name)
                if isinstance(inner, list):
                    for part in inner:
                        if isinstance(part, dict):
                            _refuse_uuid(part, "input")
        if not isinstance(item, dict) or not _known_item(item):
            odd += 1
            values += _values(item, _ODD_VALUES)
            if odd > _ODD_ITEMS or values > _ODD_VALUES:
                break  # enough for the error, not a full count
            continue
        for name in ("content", "output", "summary"):
            inner = item.get(name)
            if isinstance(inner, list):
                parts += len(inner)
                for part in inner:
                    if not isinstance(part, dict):
                        odd += 1  # in a field that this type of item does not have
                        values += 1
                        continue
                    notes, logprobs = part.get("annotations"), part.get("logprobs")
                    parts += len(notes) if isinstance(notes, list) else 0
                    parts += len(logprobs) // _LOGPROBS_PER_PART if isinstance(logprobs, list) else 0
    if parts > limits.messages:
        raise _too_many("input", "parts of items", parts, limits.messages)
    if odd > _ODD_ITEMS or values > _ODD_VALUES:
        raise _odd("input", odd)
    if arguments:
        check_inner("input.arguments", arguments, limits.json_weight, limits.json_depth)


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


def _known_item(item: dict[str, Any]) -> bool:
    """Whether the engine finds its type at once: required fields are present, and all have the right type."""
    kind = item.get("type")
    if kind is None or kind == "message":
        return _known_message(item)
    if kind == "reasoning":
        return (
            isinstance(item.get("id"), str)
            and _status(item)
            and _text_or_none(item, "encrypted_content")
            and _told(item.get("summary"))
            and _told(item.get("content") or [])
        )
    if kind == "function_call":
        whole = all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments"))
    elif kind == "function_call_output":
        output = item.get("output")
        whole = isinstance(item.get("call_id"), str) and (
            isinstance(output, str) or (isinstance(output, list) and all(_input_part(part) for part in output))
        )
    else:
        return False
    return (
        whole
        and _status(item)
        and item.get("caller") is None
        and all(_text_or_none(item, name) for name in _CALL_TEXTS)
    )


def _known_message(item: dict[str, Any]) -> bool:
    role, content, phase = item.get("role"), item.get("content"), item.get("phase")
    if not isinstance(role, str) or role not in _ROLES:
        return False
    if phase is not None and not (isinstance(phase, str) and phase in _PHASES):
        return False
    if isinstance(content, str):
        return True
    if not isinstance(content, list):
        return False
    if all(_input_part(part) for part in content):
        return True
    # An earlier answer as returned, with its id and status.
    return (
        role == "assistant"
        and item.get("type") == "message"
        and isinstance(item.get("id"), str)
        and item.get("status") is not None
        and _status(item)
        and all(_output_part(part) for part in content)
    )


def _status(item: dict[str, Any]) -> bool:
    status = item.get("status")
    return status is None or (isinstance(status, str) and status in _STATUS)


def _text_or_none(item: dict[str, Any], name: str) -> bool:
    value = item.get(name)
    return value is None or isinstance(value, str)


def _input_part(part: Any) -> bool:
    if not isinstance(part, dict) or "prompt_cache_breakpoint" in part:
        return False
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _INPUT_PARTS:
        return False
    if kind == "input_text":
        return isinstance(part.get("text"), str)
    if "detail" in part and not (isinstance(part["detail"], str) and part["detail"] in _DETAILS):
        return False
    if not _text_or_none(part, "file_id"):
        return False
    if kind == "input_image":
        return _text_or_none(part, "image_url")
    return all(name not in part or isinstance(part[name], str) for name in _FILE_TEXTS)


def _output_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "refusal":
        return isinstance(part.get("refusal"), str)
    notes, logprobs = part.get("annotations"), part.get("logprobs")
    return (
        part.get("type") == "output_text"
        and isinstance(part.get("text"), str)
        and isinstance(notes, list)
        and all(isinstance(note, dict) and _annotates(note) for note in notes)
        and (logprobs is None or (isinstance(logprobs, list) and all(isinstance(one, dict) for one in logprobs)))
    )


def _annotates(note: dict[str, Any]) -> bool:
    kind = note.get("type")
    return isinstance(kind, str) and kind in _ANNOTATIONS


def _told(parts: Any) -> bool:
    if not isinstance(parts, list):
        return False
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)


def _wrong_role(place: int, role: Any, roles: frozenset[str]) -> HttpError:
    shown = f"'{role[:64]}'" if isinstance(role, str) else "null" if role is None else type(role).__name__
    return errors.bad_request(
        f"Invalid value for `messages[{place}].role`: {shown} given, expected one of {', '.join(sorted(roles))}.",
        param=f"messages[{place}].role",
        code="invalid_value",
    )


def _wrong_type(name: str, expected: str) -> HttpError:
    return errors.bad_request(f"Invalid type for `{name}`: expected {expected}.", param=name, code="invalid_type")


def _too_many(name: str, what: str, given: int, limit: int) -> HttpError:
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
