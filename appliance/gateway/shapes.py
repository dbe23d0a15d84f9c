"""How many messages, parts and items a body has, and how many of them have no shape that an engine knows at once. Pure.

An engine reads a body with unions of some thirty types. What fits one of them is read at once; what fits none is held
against all, and every mismatch of every field is written down: an item of /v1/responses without its role took 4 ms of
the loop that sends everybody's tokens, 4,000 of them (40 KB) 41 s. The engine is to say what is wrong with such an
item, so a few may pass.
"""

from __future__ import annotations

from typing import Any, Final

from . import errors
from .config import Limits
from .errors import ApiError

_ODD_ITEMS: Final = 8
_ODD_PARTS: Final = 64
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_INPUT_PARTS: Final = frozenset({"input_text", "input_image", "input_file"})
_PARTS: Final = frozenset(
    {
        "text", "image_url", "input_audio", "audio_url", "refusal", "file", "thinking", "tool_use", "tool_result",
        "image", "redacted_thinking", "tool_reference",
    }
)  # fmt: skip
_STATUS: Final = frozenset({"in_progress", "completed", "incomplete", None})


def check_messages(messages: list[Any], limits: Limits) -> None:
    """Of chat and of Anthropic's messages. Raises ApiError 400."""
    if len(messages) > limits.messages:
        raise _too_many("messages", "messages", len(messages), limits.messages)
    parts, odd = 0, 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts += len(content)
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in _PARTS or not _texts(part):
                    odd += 1
        elif content is not None and not isinstance(content, str):
            odd += 1
        if not isinstance(message.get("role"), str):
            odd += 1
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            parts += len(calls)
    if parts > limits.messages:
        raise _too_many("messages", "parts of messages", parts, limits.messages)
    if odd > _ODD_PARTS:
        raise _odd("messages", odd)


def check_items(items: list[Any], limits: Limits) -> None:
    """Of /v1/responses. Raises ApiError 400."""
    if len(items) > limits.input_items:
        raise _too_many("input", "items", len(items), limits.input_items)
    parts, odd = 0, 0
    for item in items:
        if not isinstance(item, dict) or not _known_item(item):
            odd += 1
        elif isinstance(item.get("content"), list):
            parts += len(item["content"])
        elif isinstance(item.get("output"), list):
            parts += len(item["output"])
    if parts > limits.messages:
        raise _too_many("input", "parts of items", parts, limits.messages)
    if odd > _ODD_ITEMS:
        raise _odd("input", odd)


def _known_item(item: dict[str, Any]) -> bool:
    """Whether the engine finds its type at once: its required fields are there and are what they should be."""
    kind = item.get("type")
    if kind is None or kind == "message":
        if not isinstance(item.get("role"), str) or item["role"] not in _ROLES:
            return False
        content = item.get("content")
        if isinstance(content, str):
            return True
        if not isinstance(content, list):
            return False
        if all(_input_part(part) for part in content):
            return True
        # An answer of before, as it was given: with the id and status that it had.
        return (
            item["role"] == "assistant"
            and kind == "message"
            and isinstance(item.get("id"), str)
            and isinstance(item.get("status"), str)
            and item["status"] in _STATUS
            and all(_output_part(part) for part in content)
        )
    if kind == "function_call":
        return all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments"))
    if kind == "function_call_output":
        output = item.get("output")
        whole = isinstance(output, str) or (isinstance(output, list) and all(_input_part(part) for part in output))
        return whole and isinstance(item.get("call_id"), str)
    if kind == "reasoning":
        return isinstance(item.get("id"), str) and _told(item.get("summary")) and _told(item.get("content") or [])
    return False


def _input_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str) or part["type"] not in _INPUT_PARTS:
        return False
    if part["type"] == "input_text":
        return isinstance(part.get("text"), str)
    return True


def _output_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "refusal":
        return isinstance(part.get("refusal"), str)
    return (
        part.get("type") == "output_text"
        and isinstance(part.get("text"), str)
        and isinstance(part.get("annotations"), list)
    )


def _told(parts: Any) -> bool:
    if not isinstance(parts, list):
        return False
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)


def _texts(part: dict[str, Any]) -> bool:
    return part.get("type") != "text" or isinstance(part.get("text"), str)


def _too_many(name: str, what: str, given: int, limit: int) -> ApiError:
    return errors.bad_request(
        f"Invalid value for `{name}`: {given} {what} given, at most {limit} are allowed.",
        param=name,
        code="too_many_values",
    )


def _odd(name: str, given: int) -> ApiError:
    return errors.bad_request(
        f"Invalid value for `{name}`: {given} of its parts have no known type, or lack what that type needs "
        "(`type`, `role`, `content`, `text`, …).",
        param=name,
    )
