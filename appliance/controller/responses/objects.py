"""Builds the object of a background response from creation to end, and the events of its stream. Pure.

A normal response is an engine's own object; a background response exists before any engine has seen it. Shapes:
https://platform.openai.com/docs/api-reference/responses/object and …/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

Object = dict[str, Any]
_ASKED = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": None,
    "model": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": "auto",
    "temperature": 1.0,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_ENDS = {"completed": "completed", "failed": "failed"}


def queued(response_id: str, request: Object, created_s: float) -> Object:
    """From the request's body, with the API's defaults."""
    settings = {name: default if request.get(name) is None else request[name] for name, default in _ASKED.items()}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created_s),
        "status": "queued",
        "background": True,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "store": True,
        "usage": None,
        **settings,
    }


def answered(before: Object, answer: Object) -> Object:
    """before: the object while it was queued; answer: the engine's."""
    kept = ("id", "created_at", "background", "store", "previous_response_id", "error")
    return {**before, **answer, **{name: before[name] for name in kept}}


def failed(before: Object, code: str, message: str) -> Object:
    return {**before, "status": "failed", "error": {"code": code, "message": message}}


def engine_body(request: Object, items: list[Any] | None) -> Object:
    """The request to the engine; items: the whole conversation, None if the request contains all of it."""
    dropped = ("background", "stream", "stream_options", "previous_response_id")
    body = {name: value for name, value in request.items() if name not in dropped}
    return {**body, "store": False} | ({} if items is None else {"input": items})


def events(response: Object, after: int = -1) -> Iterator[tuple[int, bytes]]:
    """The events of its stream so far with numbers above `after`, each with its number, in wire format. While the
    response runs, more are appended and none of these changes.

    One by one: most of them contain the whole request, so that all together would be several times its size."""
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
        yield from _item(place, item)
    yield f"response.{_ENDS.get(status, 'incomplete')}", {"response": response}


def _item(place: int, item: Object) -> Iterator[tuple[str, Object]]:
    at = {"output_index": place}
    of = {**at, "item_id": item.get("id")}
    empty = {"content": []} if item.get("type") == "message" else {}
    empty |= {"arguments": ""} if item.get("type") == "function_call" else {}
    yield "response.output_item.added", {**at, "item": {**item, "status": "in_progress", **empty}}
    if item.get("type") == "message":
        for index, part in enumerate(item.get("content") or ()):
            yield from _part({**of, "content_index": index}, part)
    elif item.get("type") == "function_call":
        arguments = item.get("arguments", "")
        yield "response.function_call_arguments.delta", {**of, "delta": arguments}
        yield "response.function_call_arguments.done", {**of, "arguments": arguments, "name": item.get("name")}
    yield "response.output_item.done", {**at, "item": item}


def _part(of: Object, part: Object) -> Iterator[tuple[str, Object]]:
    if part.get("type") != "output_text":
        return
    text = part.get("text", "")
    yield "response.content_part.added", {**of, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**of, "delta": text, "logprobs": []}
    yield "response.output_text.done", {**of, "text": text, "logprobs": []}
    yield "response.content_part.done", {**of, "part": part}
