"""Objects and rows of stored answers: responses, their items and conversations, responses in background with their
events, and kept chat completions. Pure.

An item is an element of `input` and `output` of /v1/responses. A normal response is an engine's own object; one in
background exists before any engine has seen it. Shapes: https://platform.openai.com/docs/api-reference/responses/object,
…/responses-streaming, …/responses/input-items, …/chat/object and …/chat/getMessages.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, cast, get_args

import orjson

from appliance.gateway.requests.answers import OPTIONS
from appliance.store.rows import UNFINISHED_STATUSES, ResponseRow, ResponseStatus

Object = dict[str, Any]
COMPLETION = "chat.completion"
_QUEUED = {
    **dict.fromkeys(("error", "incomplete_details", "usage")),
    "object": "response",
    "status": "queued",
    "background": True,
    "output": [],
    "store": True,
}
_DEFAULTS = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "metadata", "model")),
    **dict.fromkeys(("previous_response_id", "reasoning", "text", "top_logprobs", "user")),
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
_ENDED = frozenset(get_args(ResponseStatus)) - {*UNFINISHED_STATUSES}
_ANSWERED = ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier")
_CHOICE = ("index", "message", "logprobs", "finish_reason")


# --- rows


def bytes_of(*parts: Any) -> int:
    """Return the size of values as stored JSON."""
    return len(orjson.dumps(parts))


def _row(key_id: str, owner: str, items: Any, answer: Object, request: Object | None = None, **of: Any) -> ResponseRow:
    """Return an answer's row. items: of its input, or a completion's messages. request: of a background response."""
    return ResponseRow(
        id=answer["id"],
        key_id=key_id,
        owner=owner,
        status=ended_status(answer.get("status")) if request is None else "queued",
        created_s=float(answer.get("created_at") or answer["created"]),
        bytes=bytes_of(items, answer, request),
        input=items,
        response=answer,
        request=request,
        **of,
    )


def ended_status(status: str | None) -> ResponseStatus:
    """Return the status of an answer for its row: newer engines may report other statuses, and completions none."""
    return cast(ResponseStatus, status) if status in _ENDED else "completed"


def copy_row(copy: Object, owner: str) -> ResponseRow:
    """Return the row for a gateway's copy of an answer, in the form of `StoredResponses.take`."""
    if copy["response"].get("object") == COMPLETION:
        return completion_row(copy["key"], owner, copy["input"], copy["response"])
    return _row(copy["key"], owner, items_of(copy["input"]), copy["response"], previous_id=copy["previous"])


def completion_row(key_id: str, owner: str, request: Object, answer: Object) -> ResponseRow:
    completion = {name: answer.get(name) for name in _ANSWERED} | {name: request.get(name) for name in OPTIONS}
    completion["choices"] = [{name: choice.get(name) for name in _CHOICE} for choice in answer["choices"]]
    # Null where the request has none, as in OpenAI's stored objects.
    completion["input_user"] = request.get("user")
    described = {"model": answer["model"], "metadata": request.get("metadata") or None}
    return _row(key_id, owner, request["messages"], completion, kind=COMPLETION, **described)


def queued_row(body: Object, key_id: str, owner: str) -> ResponseRow:
    """Return the row of a background response, with the API's defaults. body: the request's body."""
    settings = {name: default if body.get(name) is None else body[name] for name, default in _DEFAULTS.items()}
    response = {"id": f"resp_{secrets.token_hex(16)}", "created_at": int(time.time()), **_QUEUED, **settings}
    request = {name: value for name, value in body.items() if name != "input"}
    previous_id = body.get("previous_response_id")
    return _row(key_id, owner, items_of(body["input"]), response, request, background=1, previous_id=previous_id)


# --- items


def items_of(content: Any) -> list[Object]:
    """Return the items of an `input`, which may be a string."""
    if isinstance(content, str):
        return [{"type": "message", "role": "user", "content": content}]
    return [item for item in content if isinstance(item, dict)]


def listed(row: ResponseRow, *, answered: bool) -> list[Object]:
    """Return the input items of one response, each with an id. answered: append its output, which a later response also
    receives."""
    items = [_shown(item, row.id, place) for place, item in enumerate(row.input)]
    return [*items, *outputs(row)] if answered else items


def outputs(row: ResponseRow) -> Iterator[Object]:
    """Return a response's output in the form that an engine accepts as input, omitting messages without text."""
    for item in row.response.get("output") or ():
        if isinstance(item, dict) and (item.get("type") != "message" or item.get("content")):
            yield item


def _shown(item: Object, response_id: str, place: int) -> Object:
    """Return an input item in its full form, with an id derived from its position so that the id never changes."""
    kind = item.get("type") or "message"
    item_id = f"item_{response_id.removeprefix('resp_')}{place:04x}"
    shown = {**item, "id": item.get("id") or item_id, "type": kind}
    if kind == "message":
        shown["status"] = item.get("status") or "completed"
        shown["content"] = _parts(item.get("content"), item.get("role") == "assistant")
    return shown


def _parts(content: Any, answered: bool) -> Any:
    if isinstance(content, str):
        part = {"type": "output_text", "annotations": []} if answered else {"type": "input_text"}
        return [{**part, "text": content}]
    if not isinstance(content, list):
        return content
    images = [isinstance(part, dict) and part.get("type") == "input_image" for part in content]
    return [{"detail": "auto", **part} if is_image else part for part, is_image in zip(content, images, strict=True)]


# --- responses in background


def events(response: Object, after: int = -1) -> Iterator[tuple[int, bytes]]:
    """Yield (number, event in wire format) for the events of a response's stream so far with numbers above `after`.
    While the response runs, later calls append events and change none."""
    for place, (kind, data) in enumerate(_events(response)):
        if place > after:
            body = orjson.dumps({"type": kind, "sequence_number": place, **data})
            yield place, b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


def _events(response: Object) -> Iterator[tuple[str, Object]]:
    status = response["status"]
    begun = {**response, "status": "queued", "output": [], "usage": None, "error": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.queued", {"response": begun}
    if status == "queued":
        return
    yield "response.in_progress", {"response": {**begun, "status": "in_progress"}}
    if status == "in_progress":
        return
    for place, item in enumerate(response["output"]):
        at, kind = {"output_index": place}, item.get("type")
        of = {**at, "item_id": item.get("id")}
        empty: Object = {"message": {"content": []}, "function_call": {"arguments": ""}}.get(kind, {})
        yield "response.output_item.added", {**at, "item": {**item, "status": "in_progress", **empty}}
        if kind == "function_call":
            arguments = item.get("arguments", "")
            yield "response.function_call_arguments.delta", {**of, "delta": arguments}
            yield "response.function_call_arguments.done", {**of, "arguments": arguments, "name": item.get("name")}
        for index, part in enumerate(item.get("content") or () if kind == "message" else ()):
            if part.get("type") == "output_text":
                whole, text = {**of, "content_index": index}, part.get("text", "")
                yield "response.content_part.added", {**whole, "part": {**part, "text": ""}}
                yield "response.output_text.delta", {**whole, "delta": text, "logprobs": []}
                yield "response.output_text.done", {**whole, "text": text, "logprobs": []}
                yield "response.content_part.done", {**whole, "part": part}
        yield "response.output_item.done", {**at, "item": item}
    end = status if status in ("completed", "failed") else "incomplete"
    yield f"response.{end}", {"response": response}


# --- kept chat completions


def completion_object(row: ResponseRow) -> Object:
    return {**row.response, "metadata": row.metadata or {}, "owner": row.owner or None}


def stored_messages(row: ResponseRow) -> Iterator[Object]:
    """Yield the messages of a completion's request, each with an id."""
    for place, message in enumerate(row.input):
        content = message.get("content")
        parts = content if isinstance(content, list) else None
        if parts is not None:
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            content = "\n".join(text for text in texts if isinstance(text, str))
        message_id = message.get("id") or f"{row.id}-{place}"
        yield {"name": None, **message, "id": message_id, "content": content, "content_parts": parts}
