"""Limits the items of /v1/responses and their parts; see shapes.py. Pure."""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core.config import Limits
from appliance.gateway.payload.body_weight import check_inner
from appliance.gateway.payload.shapes import ODD_ITEMS, ODD_VALUES, Odd, refuse_uuid, text_or_none, too_many

_LOGPROBS_PER_PART: Final = 8
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_INPUT_PARTS: Final = frozenset({"input_text", "input_image", "input_file"})
_STATUS: Final = frozenset({"in_progress", "completed", "incomplete"})
_PHASES: Final = frozenset({"commentary", "final_answer"})
_DETAILS: Final = frozenset({"auto", "low", "high", "original"})
_ANNOTATIONS: Final = frozenset({"file_citation", "url_citation", "container_file_citation", "file_path"})
# Fields that are always texts, and may be null in an item but not in a file part.
_CALL_TEXTS: Final = ("id", "namespace", "name")
_FILE_TEXTS: Final = ("file_data", "file_url", "filename")


def check_items(items: list[Any], limits: Limits) -> None:
    """Raises HttpError 400."""
    if len(items) > limits.input_items:
        raise too_many("input", "items", len(items), limits.input_items)
    parts, odd = 0, Odd("input", ODD_ITEMS, ODD_VALUES)
    arguments: list[str] = []
    for item in items:
        if not isinstance(item, dict):
            odd.add(item)
            continue
        if isinstance(item.get("arguments"), str):
            arguments.append(item["arguments"])
        known = _known_item(item)
        for name in ("content", "output", "summary"):
            inner = item.get(name)
            if isinstance(inner, list):
                parts += _parts(inner, odd if known else None)
        if not known:
            odd.add(item)
    if parts > limits.messages:
        raise too_many("input", "parts of items", parts, limits.messages)
    if arguments:
        check_inner("input.arguments", arguments, limits.json_weight, limits.json_depth)


def _parts(inner: list[Any], odd: Odd | None) -> int:
    """How many there are. odd: counts those that stand in a field which this type of item does not have."""
    count = len(inner)
    for part in inner:
        if isinstance(part, dict):
            refuse_uuid(part, "input")
            notes, logprobs = part.get("annotations"), part.get("logprobs")
            count += len(notes) if isinstance(notes, list) else 0
            count += len(logprobs) // _LOGPROBS_PER_PART if isinstance(logprobs, list) else 0
        elif odd is not None:
            odd.add(part)
    return count


def _known_item(item: dict[str, Any]) -> bool:
    """Whether the engine finds its type at once: required fields are present, and all have the right type."""
    kind = item.get("type")
    if kind is None or kind == "message":
        return _known_message(item)
    if kind == "reasoning":
        return (
            isinstance(item.get("id"), str)
            and _status(item)
            and text_or_none(item, "encrypted_content")
            and _all_have_text(item.get("summary"))
            and _all_have_text(item.get("content") or [])
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
        whole and _status(item) and item.get("caller") is None and all(text_or_none(item, name) for name in _CALL_TEXTS)
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
    if not text_or_none(part, "file_id"):
        return False
    if kind == "input_image":
        return text_or_none(part, "image_url")
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


def _all_have_text(parts: Any) -> bool:
    if not isinstance(parts, list):
        return False
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
