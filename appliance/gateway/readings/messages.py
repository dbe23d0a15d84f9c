"""Messages of chat completions and of Anthropic's API as engines read them. Pure.

A call of a custom tool in the history becomes a call of a function; blocks of Anthropic's own tools and documents
become texts, since engines know neither. Whatever else is there stays as it is.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors

Block = dict[str, Any]
Message = dict[str, Any]

_RESULT: Final = "_tool_result"
_NOTHING_TO_READ: Final = frozenset({"container_upload", "fallback"})


def chat_messages_as_meant(messages: list[Any]) -> list[Any]:
    made: list[Any] = []
    unnamed: list[str] = []  # ids made for calls whose results have none either, in their order
    for place, one in enumerate(messages):
        message = _chat_message(one) if isinstance(one, dict) else one
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
            message, unnamed = _with_ids(message, place)
        elif (
            unnamed and isinstance(message, dict) and message.get("role") == "tool" and not message.get("tool_call_id")
        ):
            message = {**message, "tool_call_id": unnamed.pop(0)}
        made.append(message)
    return made


def _with_ids(message: Message, place: int) -> tuple[Message, list[str]]:
    """The message with an id for each of its calls, and those that it had not."""
    calls, made = list(message["tool_calls"]), []
    for at, call in enumerate(calls):
        if isinstance(call, dict) and not call.get("id"):
            made.append(f"call_{place}_{at}")
            calls[at] = {**call, "id": made[-1]}
    return ({**message, "tool_calls": calls} if made else message), made


def _chat_message(message: Message) -> Message:
    content = message.get("content")
    if message.get("role") in ("tool", "function"):
        if content is None:
            return {**message, "content": ""}
        if isinstance(content, dict) or _is_data(content):
            return {**message, "content": orjson.dumps(content).decode()}
    if isinstance(content, list) and any(isinstance(part, list) for part in content):
        parts = [inner for part in content for inner in (part if isinstance(part, list) else [part])]
        return _chat_message({**message, "content": parts})
    calls = message.get("tool_calls")
    if calls == []:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if isinstance(calls, list) and any(isinstance(call, dict) and call.get("type") == "custom" for call in calls):
        return {**message, "tool_calls": [_chat_call(call) for call in calls]}
    return message


def _is_data(content: Any) -> bool:
    """Whether a result is a list of values, none of which is a part of a message."""
    return isinstance(content, list) and bool(content) and not any(_is_part(one) for one in content)


def _is_part(one: Any) -> bool:
    return isinstance(one, list) or (isinstance(one, dict) and isinstance(one.get("type"), str))


def _chat_call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    arguments = orjson.dumps({"input": custom.get("input")}).decode()
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def anthropic_messages_as_meant(messages: list[Any], left_out: list[str]) -> list[Any]:
    """left_out: gets the types of blocks that an engine does not get. Raises HttpError 400 for a document that it
    cannot read."""
    return [
        {**one, "content": _blocks(one["content"], f"messages[{place}].content", left_out)}
        if isinstance(one, dict) and isinstance(one.get("content"), list)
        else one
        for place, one in enumerate(messages)
    ]


def _blocks(blocks: list[Any], where: str, left_out: list[str]) -> list[Any]:
    made: list[Any] = []
    for place, block in enumerate(blocks):
        if isinstance(block, dict) and isinstance(block.get("type"), str):
            made += _block(block, f"{where}[{place}]", left_out)
        else:
            made.append(block)
    # A message without any content is refused.
    return made or ([{"type": "text", "text": ""}] if blocks else blocks)


def _block(block: Block, where: str, left_out: list[str]) -> list[Any]:
    kind: str = block["type"]
    content = block.get("content")
    if kind == "tool_result":
        return [{**block, "content": _blocks(content, where, left_out)}] if isinstance(content, list) else [block]
    if kind in ("server_tool_use", "mcp_tool_use"):
        return [_as_text(f"[{block.get('name')}: {_json(block.get('input'))}]")]
    if kind.endswith(_RESULT):
        return [_as_text(f"[{kind}: {_readable(content)}]")]
    if kind == "document":
        return [_as_text(_document(block, where))]
    if kind == "search_result":
        return [_as_text("\n".join([str(block.get("title")), str(block.get("source")), _readable(content)]))]
    if kind == "compaction" and isinstance(content, str):
        return [_as_text(content)]
    if kind in _NOTHING_TO_READ or kind == "compaction":
        left_out.append(kind)
        return []
    return [block]


def _document(block: Block, where: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    text = None
    if isinstance(source, dict) and kind == "text":
        text = source.get("data")
    elif isinstance(source, dict) and kind == "content":
        text = _readable(source.get("content"))
    if not isinstance(text, str):
        shown = kind if isinstance(kind, str) else type(source).__name__
        raise errors.bad_request(
            f"`{where}` is a document whose source is '{shown[:64]}'; this server reads documents as text alone "
            "(source.type 'text' or 'content'). Extract the text in your program.",
            param=where,
            code="unsupported_document",
        )
    told = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return "\n".join([*told, text])


def _readable(content: Any) -> str:
    """The texts of blocks, or the whole of it as JSON, without what is encrypted."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        return "\n".join(part["text"] for part in content)
    return _json(content)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _json(value: Any) -> str:
    if isinstance(value, list):
        value = [_seen(one) for one in value]
    return orjson.dumps(_seen(value)).decode()


def _seen(value: Any) -> Any:
    return {k: v for k, v in value.items() if not k.startswith("encrypted_")} if isinstance(value, dict) else value


def _as_text(text: str) -> Block:
    return {"type": "text", "text": text}
