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

_ODD_ITEMS: Final = 8
_ODD_PARTS: Final = 64
_LOGPROBS_PER_PART: Final = 8
# Values in all unrecognised items together, at any depth: the engine may compare each with every possible type.
_ODD_VALUES: Final = 256
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_INPUT_PARTS: Final = frozenset({"input_text", "input_image", "input_file"})
_PARTS: Final = frozenset(
    {
        "text",
        "image_url",
        "input_audio",
        "audio_url",
        "refusal",
        "file",
        "thinking",
        "tool_use",
        "tool_result",
        "image",
        "redacted_thinking",
        "tool_reference",
    }
)
_STATUS: Final = frozenset({"in_progress", "completed", "incomplete"})
_PHASES: Final = frozenset({"commentary", "final_answer"})
_DETAILS: Final = frozenset({"auto", "low", "high", "original"})
_ANNOTATIONS: Final = frozenset({"file_citation", "url_citation", "container_file_citation", "file_path"})
# Fields that are always texts, and may be null in an item but not in a file part.
_CALL_TEXTS: Final = ("id", "namespace", "name")
_FILE_TEXTS: Final = ("file_data", "file_url", "filename")
_MESSAGE_TEXTS: Final = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")


def check_messages(messages: list[Any], limits: Limits) -> None:
    """Of chat and of Anthropic's messages. Raises HttpError 400."""
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
        if not isinstance(message.get("role"), str) or not all(_text_or_none(message, name) for name in _MESSAGE_TEXTS):
            odd += 1
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            parts += len(calls)
    if parts > limits.messages:
        raise _too_many("messages", "parts of messages", parts, limits.messages)
    if odd > _ODD_PARTS:
        raise _odd("messages", odd)


def check_items(items: list[Any], limits: Limits) -> None:
    """Of /v1/responses. Raises HttpError 400."""
    if len(items) > limits.input_items:
        raise _too_many("input", "items", len(items), limits.input_items)
    parts, odd, values = 0, 0, 0
    for item in items:
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
                    notes, logprobs = part.get("annotations"), part.get("logprobs")
                    parts += len(notes) if isinstance(notes, list) else 0
                    parts += len(logprobs) // _LOGPROBS_PER_PART if isinstance(logprobs, list) else 0
    if parts > limits.messages:
        raise _too_many("input", "parts of items", parts, limits.messages)
    if odd > _ODD_ITEMS or values > _ODD_VALUES:
        raise _odd("input", odd)


def _values(root: Any, most: int) -> int:
    """Number of values in an item, at any depth, up to `most`."""
    found, stack = 0, [root]
    while stack and found <= most:
        node = stack.pop()
        if isinstance(node, dict):
            found += len(node)
            stack.extend(node.values())
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


def _texts(part: dict[str, Any]) -> bool:
    return part.get("type") != "text" or isinstance(part.get("text"), str)


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
