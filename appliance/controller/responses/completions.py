"""Kept chat completions: their rows, and the objects that are shown. Pure.

Shapes: https://platform.openai.com/docs/api-reference/chat/object and …/chat/getMessages.
"""

from __future__ import annotations

from typing import Any

import orjson

from appliance.gateway.requests.transcript import OPTIONS
from appliance.store.objects import responses
from appliance.store.rows import ResponseRow

Object = dict[str, Any]
_ANSWERED = ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier")
_CHOICE = ("index", "message", "logprobs", "finish_reason")


def completion_row(key_id: str, owner: str, request: Object, answer: Object) -> ResponseRow:
    """The row for a gateway's copy. Raises KeyError, TypeError, ValueError for a malformed one."""
    messages, metadata = request["messages"], request.get("metadata") or None
    made = {name: answer.get(name) for name in _ANSWERED} | {name: request.get(name) for name in OPTIONS}
    made["choices"] = [{name: choice.get(name) for name in _CHOICE} for choice in answer["choices"]]
    # As OpenAI's stored objects have them, null where nothing was asked.
    made["input_user"] = request.get("user")
    given, answered = orjson.dumps(messages).decode(), orjson.dumps(made).decode()
    described = None if metadata is None else orjson.dumps(metadata).decode()
    return ResponseRow(
        id=answer["id"],
        key_id=key_id,
        owner=owner,
        status="completed",
        kind="chat.completion",
        created_s=float(answer["created"]),
        bytes=responses.bytes_of(given, answered, described),
        input=given,
        response=answered,
        model=answer["model"],
        metadata=metadata,
    )


def completion_object(row: ResponseRow) -> Object:
    return {**orjson.loads(row.response), "metadata": row.metadata or {}, "owner": row.owner or None}


def asked_messages(row: ResponseRow) -> list[Object]:
    found: list[Object] = orjson.loads(row.input)
    return found


def stored_messages(row: ResponseRow) -> list[Object]:
    """What it was asked with, each message with an id."""
    return [_message(row.id, place, message) for place, message in enumerate(asked_messages(row))]


def _message(completion_id: str, place: int, message: Object) -> Object:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    made = message.get("id") or f"{completion_id}-{place}"
    return {"name": None, **message, "id": made, "content": content, "content_parts": parts}
