"""Items of responses: the contents of a conversation so far, and the listing of an input's items. Pure.

An item is an element of `input` and `output` of /v1/responses
(https://platform.openai.com/docs/api-reference/responses/input-items).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from appliance.store.rows import ResponseRow

Item = dict[str, Any]
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def items_of(given: Any) -> list[Item]:
    """The items of an `input`, which may be a plain string."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [item for item in given if isinstance(item, dict)]


def turn_items(row: ResponseRow) -> list[Item]:
    """The items of this response that a later answer continues from: its input and output."""
    return [*orjson.loads(row.input), *outputs(row)]


def listed(row: ResponseRow, *, answered: bool) -> list[Item]:
    """The input items of one response, each with an id. answered: also its output, since a later response receives that
    too."""
    found = [_shown(item, row.id, place) for place, item in enumerate(orjson.loads(row.input))]
    return [*found, *outputs(row)] if answered else found


def outputs(row: ResponseRow) -> Iterator[Item]:
    """Its output in the form an engine accepts as input: messages without text are left out."""
    for item in orjson.loads(row.response).get("output") or ():
        if isinstance(item, dict) and (item.get("type") != "message" or item.get("content")):
            yield item


def _shown(item: Item, response_id: str, place: int) -> Item:
    """An input item in its full form. Its id is a function of its position, so that it is the same every time."""
    kind = item.get("type") or "message"
    made = f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix('resp_')}{place:04x}"
    shown = {**item, "id": item.get("id") or made, "type": kind}
    if kind == "message":
        shown["status"] = item.get("status") or "completed"
        shown["content"] = _parts(item.get("content"), item.get("role") == "assistant")
    return shown


def _parts(content: Any, answered: bool) -> Any:
    if isinstance(content, str):
        return [
            {"type": "output_text", "text": content, "annotations": []}
            if answered
            else {"type": "input_text", "text": content}
        ]
    if not isinstance(content, list):
        return content
    return [
        {"detail": "auto", **part} if isinstance(part, dict) and part.get("type") == "input_image" else part
        for part in content
    ]
