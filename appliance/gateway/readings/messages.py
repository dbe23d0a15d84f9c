"""Messages of chat completions and of Anthropic's API as engines read them. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from weights.format import legacy_functions as legacy

Message = dict[str, Any]

_BLOCKS: Final = frozenset(
    "text image tool_use tool_result tool_reference thinking redacted_thinking tool_addition tool_removal".split()
)
"""Types of Anthropic's blocks that engines know."""


def chat_messages_as_meant(messages: list[Any], left_out: list[str]) -> list[Any]:
    """Raises HttpError 400 for a message that has the older and the newer form of a call."""
    made: list[Any] = []
    unnamed: list[str] = []  # ids made for calls that had none, whose results have none either
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            made.append(message)
            continue
        if legacy.has_call(message):
            try:
                message = legacy.with_tool_call(place, message)
            except legacy.LegacyRefused as error:
                raise errors.bad_request(str(error), param=error.param, code="invalid_value") from None
        calls, content = message.get("tool_calls"), message.get("content")
        if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
            named = [
                {**_function_call(call), "id": call.get("id") or f"call_{place}_{at}"} for at, call in enumerate(calls)
            ]
            unnamed = [call["id"] for call, given in zip(named, calls, strict=True) if not given.get("id")]
            message = {**message, "tool_calls": named}
        if message.get("role") == "tool":
            message = {**message, "content": result_as_text(content)}
            if unnamed and not message.get("tool_call_id"):
                message["tool_call_id"] = unnamed.pop(0)
        elif isinstance(content, list) and any(isinstance(part, list) for part in content):
            flat = [inner for part in content for inner in (part if isinstance(part, list) else [part])]
            message = {**message, "content": flat}
        made.append(message)
    return made


def _function_call(call: Message) -> Message:
    """A call of a custom tool as one of a function."""
    custom = call.get("custom")
    if not isinstance(custom, dict):
        return call
    arguments = orjson.dumps({"input": custom.get("input")}).decode()
    return {"type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def result_as_text(content: Any) -> Any:
    """A tool's result that is data, not a text or parts of a message, as its JSON."""
    if content is None:
        return ""
    is_parts = isinstance(content, list) and all(
        isinstance(p, dict) and isinstance(p.get("type"), str) for p in content
    )
    return content if isinstance(content, str) or is_parts else orjson.dumps(content).decode()


def anthropic_messages_as_meant(messages: list[Any], left_out: list[str]) -> list[Any]:
    """Documents and search results as texts, and without blocks of Anthropic's own tools. left_out: gets their types.
    Raises HttpError 400 for a document that is not a text."""
    return [
        {**message, "content": _blocks(message["content"], f"messages[{place}].content", left_out)}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for place, message in enumerate(messages)
    ]


def _blocks(blocks: list[Any], where: str, left_out: list[str]) -> list[Any]:
    made: list[Any] = []
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            made.append(block)
        elif kind == "tool_result" and isinstance(block.get("content"), list):
            made.append({**block, "content": _blocks(block["content"], where, left_out)})
        elif kind in _BLOCKS:
            made.append(block)
        elif kind in ("document", "search_result"):
            made.append({"type": "text", "text": _document(block, f"{where}[{place}]")})
        else:
            left_out.append(kind[:80])
    return made or ([{"type": "text", "text": ""}] if blocks else made)


def _document(block: Message, where: str) -> str:
    """The text of a document or a search result, under its title. Raises HttpError 400."""
    source = block.get("source")
    content = block.get("content")
    if isinstance(source, dict):
        content = source.get("data") if source.get("type") == "text" else source.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise errors.bad_request(
            f"`{where}` is a document that is not a text (source.type 'text' or 'content'), which this server does not "
            "read. Extract the text in your program.",
            param=where,
            code="unsupported_document",
        )
    told = [block.get("title"), source, block.get("context"), content]
    return "\n".join(text for text in told if isinstance(text, str))
