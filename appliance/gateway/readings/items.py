"""Items of /v1/responses as engines read them. Pure.

Clients send history without ids, thoughts that only OpenAI can read, and items of tools that only its server has. vLLM
takes the first part of an earlier answer alone, refuses encrypted thoughts, and knows no other items: these are left
out and named.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.readings.messages import result_as_text

Item = dict[str, Any]

_TEXTS: Final = frozenset({"output_text", "input_text", "text", "summary_text", "reasoning_text", "refusal"})
_REFUSED: Final = {
    "item_reference": "send the item itself, or go on from its response with `previous_response_id`",
    "compaction_trigger": "no engine compacts; ask for a summary in a message",
}


def items_as_meant(items: list[Any], left_out: list[str]) -> list[Any]:
    """The items that an engine gets. left_out: gets the types of those that it does not. Raises HttpError 400 for a
    value that is not an item, and for a type that asks for what no engine does."""
    made: list[Any] = []
    for place, item in enumerate(items):
        if isinstance(item, dict):  # objects that were dumped with their nulls
            item = {name: value for name, value in item.items() if value is not None}
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or (kind == "message" and not isinstance(item.get("role"), str)):
            # An engine would compare it with each of its thirty types.
            raise errors.bad_request(
                f"Invalid type for `input[{place}]`: expected an object with a `role` or a `type`.",
                param=f"input[{place}]",
                code="invalid_type",
            )
        if kind in _REFUSED:
            raise errors.bad_request(
                f"`input[{place}]` is of the type '{kind}', which this server does not have: {_REFUSED[kind]}.",
                param=f"input[{place}]",
                code="unsupported_item",
            )
        if kind == "message":
            made.append(_message(item))
        elif kind == "reasoning" and (thought := _thought(item)):
            made.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        elif kind == "function_call_output":
            made.append({**item, "output": _parts(result_as_text(item.get("output")))})
        elif kind == "function_call" and isinstance(item.get("arguments"), dict):
            made.append({**item, "arguments": orjson.dumps(item["arguments"]).decode()})
        elif kind in ("function_call", "custom_tool_call", "custom_tool_call_output"):
            made.append(item)
        elif kind != "reasoning" or item.get("encrypted_content"):
            left_out.append(kind[:80])
    return made


def _message(item: Item) -> Item:
    content = item.get("content")
    if not isinstance(content, list):
        return item
    texts = [_text(part) for part in content]
    if item["role"] != "assistant":
        return {**item, "content": _parts(content)}
    return item if None in texts else {"role": "assistant", "content": "".join(filter(None, texts))}


def _parts(content: Any) -> Any:
    """Parts with every text as `input_text`, which is the only form that engines know, without further fields."""
    if not isinstance(content, list):
        return content
    return [part if _text(part) is None else {"type": "input_text", "text": _text(part)} for part in content]


def _text(part: Any) -> str | None:
    """None for a part that is not a text."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str) or part["type"] not in _TEXTS:
        return None
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    return text if isinstance(text, str) else None


def _thought(item: Item) -> str:
    """The text of a thought that is not encrypted."""
    parts = item.get("content") or item.get("summary")
    return "\n\n".join(filter(None, map(_text, parts))) if isinstance(parts, list) else ""
