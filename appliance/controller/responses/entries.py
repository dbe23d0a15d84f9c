"""Turns kept answers into items of evaluations and of training files: a conversation in the form of chat completions,
and its answer. Reads the store, on a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance.controller.responses.completions import asked_messages
from appliance.controller.responses.items import Item
from appliance.gateway.requests.meant import items_as_meant
from appliance.store.database import Database
from appliance.store.objects import responses
from appliance.store.objects.responses import COMPLETION
from appliance.store.rows import AnswerKind, ResponseRow

Entry = dict[str, Any]
Message = dict[str, Any]
MAX_TURNS, MAX_BYTES = 100, 1 << 20
"""The longest conversation before a response: each turn is a row with its texts. A response after a longer one is left
out."""
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Arguments of a free-form custom tool, as the model sees it."""
_READ_AT_ONCE = 16
_ANSWERED = ("completed", "incomplete")
"""An answer that was cut off counts, like a chat completion whose `finish_reason` is "length"."""


@dataclass(frozen=True)
class Wanted:
    """Filters over an owner's answers. asked: values that the object has under these names, which may be nested
    ("reasoning.effort"). tools: it has at least one of these names. limit: the newest so many."""

    kind: AnswerKind
    limit: int
    model: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    after_s: float | None = None
    before_s: float | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    instructions_search: str | None = None
    tools: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    has_tool_calls: bool | None = None


def entries(db: Database, owner: str, wanted: Wanted) -> Iterator[Entry]:
    """{"item", "sample"} of each that fits, newest first; each step reads a few rows on the thread that takes it."""
    with db.snapshot():
        ids = responses.newest_ids(db, owner, wanted.kind, model=wanted.model, metadata=wanted.metadata)
    left = wanted.limit
    for at in range(0, len(ids), _READ_AT_ONCE):
        with db.snapshot():
            rows = [responses.find(db, one) for one in ids[at : at + _READ_AT_ONCE] if _may_be_judged(db, one)]
            fitting = (row for row in rows if row is not None and _fits(row, wanted))
            found = [_entry(db, row) for row in fitting if row.kind == COMPLETION or _size(db, row) <= MAX_BYTES]
        yield from found[:left]
        left -= len(found)
        if left <= 0:
            return


def _may_be_judged(db: Database, response_id: str) -> bool:
    """Checked before it is read: sixteen answers of the greatest length are 320 MiB, and parsing one of them holds all
    threads for 50 ms."""
    status, size = responses.standing(db, response_id) or ("", 0)
    return status in _ANSWERED and size <= MAX_BYTES


def _fits(row: ResponseRow, wanted: Wanted) -> bool:
    if row.kind != wanted.kind:
        return False
    if wanted.after_s is not None and row.created_s < wanted.after_s:
        return False
    if wanted.before_s is not None and row.created_s > wanted.before_s:
        return False
    if row.kind == COMPLETION:
        return True  # by its model and metadata it was found
    response = orjson.loads(row.response)
    if wanted.model is not None and response.get("model") != wanted.model:
        return False
    metadata = response.get("metadata") or {}
    if any(metadata.get(name) != value for name, value in wanted.metadata.items()):
        return False
    if any(_below(response, name) != value for name, value in wanted.asked.items()):
        return False
    if wanted.instructions_search is not None:
        text = response.get("instructions")
        if not isinstance(text, str) or wanted.instructions_search not in text:
            return False
    if wanted.tools and not {_tool_name(tool) for tool in response.get("tools") or ()}.intersection(wanted.tools):
        return False
    if wanted.users and response.get("user") not in wanted.users:
        return False
    calls = any(item.get("type") in ("function_call", "custom_tool_call") for item in response.get("output") or ())
    return wanted.has_tool_calls is None or calls == wanted.has_tool_calls


def _size(db: Database, row: ResponseRow) -> int:
    """With the turns before it."""
    return responses.chain_bytes(db, row.id, row.owner, max_turns=MAX_TURNS)


def _below(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _tool_name(tool: Any) -> str | None:
    return tool.get("name") or tool.get("type") if isinstance(tool, dict) else None


def _entry(db: Database, row: ResponseRow) -> Entry:
    response = orjson.loads(row.response)
    if row.kind == COMPLETION:
        messages, metadata = asked_messages(row), row.metadata
        answer = next((choice.get("message") or {} for choice in response["choices"]), {})
        text, calls = answer.get("content"), answer.get("tool_calls")
    else:
        messages, metadata = _conversation(db, row, response), response.get("metadata")
        answer = _chat_messages(response.get("output") or [])
        text = "\n".join(message["content"] for message in answer if isinstance(message.get("content"), str))
        calls = [call for message in answer for call in message.get("tool_calls") or ()]
    item = {
        "id": row.id,
        "created_at": int(row.created_s),
        "model": response.get("model"),
        "metadata": metadata or {},
        "input": messages,
        "tools": _chat_tools(response.get("tools") or ()),
        "output_text": text if isinstance(text, str) else "",
    }
    return {"item": item, "sample": {"output_text": item["output_text"], "output_tools": calls or []}}


def _conversation(db: Database, row: ResponseRow, response: Item) -> list[Message]:
    """What it was asked with, the turns before it included."""
    given = list[Item]()
    for response_id in responses.chain_ids(db, row.id, row.owner, max_turns=MAX_TURNS)[:-1]:
        if (earlier := responses.find(db, response_id)) is not None:
            given += [*orjson.loads(earlier.input), *(orjson.loads(earlier.response).get("output") or ())]
    given += orjson.loads(row.input)
    instructions = response.get("instructions")
    first = [{"role": "system", "content": instructions}] if isinstance(instructions, str) and instructions else []
    return [*first, *_chat_messages(given)]


def _chat_messages(items: list[Item]) -> list[Message]:
    """Items of responses as messages of a chat, as engines read them; reasoning, for which such a message has no place,
    is left out."""
    messages = list[Message]()
    for item in items_as_meant(items, []):
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments")
            if kind == "custom_tool_call":
                arguments = orjson.dumps({"input": item.get("input")}).decode()
            function = {"name": _flat(item.get("namespace"), item.get("name")), "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = item.get("output")
            text = text if isinstance(text, str) else orjson.dumps(text).decode()
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    return messages


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    if all(isinstance(text, str) for text in texts):
        return "\n".join(str(text) for text in texts)
    return [_part(part) for part in content if isinstance(part, dict)]


def _part(part: Item) -> Item:
    if part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail", "auto")}}
    return {"type": "text", "text": part["text"]} if isinstance(part.get("text"), str) else part


def _chat_tools(tools: Any) -> list[Item]:
    """Tools that an engine runs, as it shows them to the model: functions, as chat completions have them."""
    found = list[Item]()
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            found.append(tool if "function" in tool else chat_tool(tool))
        elif kind == "custom":
            told = {name: tool[name] for name in ("name", "description") if tool.get(name)}
            found.append(chat_tool(told | {"parameters": _CUSTOM}))
        elif kind == "namespace":
            inner = (one for one in tool.get("tools") or () if one.get("type") == "function")
            found += [chat_tool({**one, "name": _flat(tool.get("name"), one.get("name"))}) for one in inner]
    return found


def _flat(namespace: Any, name: Any) -> Any:
    """The name of a namespace's function for the model."""
    return f"{namespace}__{name}" if namespace else name


def chat_tool(tool: Item) -> Item:
    """A function tool of /v1/responses, as chat completions have it."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
