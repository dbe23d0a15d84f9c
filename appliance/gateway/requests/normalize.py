"""Rewrites a checked request for engines: tools, messages, items of /v1/responses, schemas. Pure.

Clients send tool calls without ids, reasoning that only OpenAI can decrypt, and items of tools that only OpenAI's
server runs. vLLM reads only the first part of an earlier answer, and refuses encrypted reasoning and unknown items. So
parts are joined, and what vLLM refuses is left out and named in a header."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from serve.core import legacy_functions as legacy

Object = dict[str, Any]

IGNORED_TOOLS: Final = b"x-appliance-ignored-tools"
IGNORED_ITEMS: Final = b"x-appliance-ignored-items"
# vLLM's older field names, which clients still send -> fields of `structured_outputs`.
GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
# Values of `include` that engines do not know; they concern only items of OpenAI's own tools.
_INCLUDES: Final = ("web_search_call.results", "web_search_call.action.sources")
_TEXTS: Final = frozenset({"output_text", "input_text", "text", "summary_text", "reasoning_text", "refusal"})
_REFUSED: Final = {
    "item_reference": "send the item itself, or continue its response with `previous_response_id`",
    "compaction_trigger": "engines cannot compact; request a summary in a message",
}
# Types of Anthropic's content blocks that engines know.
_BLOCKS: Final = frozenset(
    "text image tool_use tool_result tool_reference thinking redacted_thinking tool_addition tool_removal".split()
)
# Types of tools that engines take, by route.
_OWN: Final = {"responses": ("function", "namespace", "custom"), "messages": (None, "custom")}
_CHOICES: Final = ("auto", "any", "custom", "none", "tool", "function", "allowed_tools")
# Schema of a tool without parameters, whose only valid call is `{}`.
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def normalize(route: str, fields: Object) -> tuple[Object, list[tuple[bytes, bytes]]]:
    """Return the request for the engine, and response headers that name the omitted items. fields: checked fields,
    without nulls. Raises HttpError 400."""
    route = route.removesuffix(".input_tokens").removesuffix(".count_tokens")
    data, items = dict(fields), list[str]()
    try:
        tools = _set_tools(route, data)
        if "messages" in data and route != "messages":
            data["messages"] = _chat_messages(data["messages"])
        elif "messages" in data:
            data["messages"] = [
                {**message, "content": _blocks(message["content"], f"messages[{at}].content", items)}
                for at, message in enumerate(data["messages"])
            ]
    except legacy.LegacyRefused as error:
        raise errors.bad_request(str(error), param=error.param, code="invalid_value") from None
    if data.get("top_p") == 0:  # a `top_p` of 0 means greedy, but engines refuse it
        data["temperature"], data["top_p"] = 0, 1
    if data.get("temperature") == 0 and data.get("n", 1) != 1:  # engines refuse this pair; top_k 1 is greedy too
        data["temperature"], data["top_k"] = 1, 1
    _set_format(data)
    if route == "responses":
        data.pop("client_metadata", None)  # Codex sends this field
        if isinstance(data.get("input"), list):
            data["input"] = normalize_items(data["input"], items)
        if "include" in data:
            data["include"] = [value for value in data["include"] if value not in _INCLUDES]
    return data, [*_header(IGNORED_TOOLS, tools), *_header(IGNORED_ITEMS, items)]


def _header(name: bytes, left_out: list[str]) -> list[tuple[bytes, bytes]]:
    """Build the header with at most 16 distinct names in ASCII; no header without names."""
    plain = dict.fromkeys(re.sub(r"[^A-Za-z0-9._:-]", "_", text[:80]) for text in left_out)
    return [(name, ", ".join([*plain][:16]).encode())] if plain else []


def _set_format(data: Object) -> None:
    """Move a schema from the field that the client used to the field that engines read."""
    for older, newer in GUIDED.items():
        if older in data:
            data["structured_outputs"] = {newer: data.pop(older), **data.get("structured_outputs", {})}
    requested, text = data.get("response_format"), data.get("text")
    if requested and (flat := _format(requested)) is not requested:
        inner = {name: value for name, value in flat.items() if name != "type"}
        data["response_format"] = {"type": "json_schema", "json_schema": inner}
    if text and isinstance(text.get("format"), dict):
        data["text"] = {**text, "format": _format(text["format"])}


def _format(requested: Object) -> Object:
    """Return a format with its schema moved to the field `schema`, as in /v1/responses; a format without a schema is
    returned unchanged."""
    inner = _object(requested.get("json_schema"))
    schema = requested.get("schema") or inner.get("schema") or ({} if "name" in inner else inner)
    if requested.get("type") not in ("json_object", "json_schema") or not isinstance(schema, dict) or not schema:
        return requested
    labels = {key: inner.get(key, requested.get(key)) for key in ("name", "description", "strict")}
    result = {"type": "json_schema", "name": "answer", "schema": schema}
    return result | {key: value for key, value in labels.items() if value is not None}


# -- tools: tools that only their vendor's server runs are left out if functions remain


def _set_tools(route: str, data: Object) -> list[str]:
    """Rewrite `tools` and `tool_choice` of a body in place. Returns the names of tools that are left out. Raises
    HttpError 400, LegacyRefused."""
    if data.get("functions") == []:
        data.pop("functions")
        data.pop("function_call", None)
    elif route == "chat.completions" and legacy.is_legacy(data):
        data |= legacy.as_tools(data)  # `functions` stays, because the answer must have the older form too
    if "tools" not in data:
        return []
    ignored: dict[str, Any] = {}  # label -> tool name
    kept = _runnable(route, data["tools"], ignored)
    choice = data.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and isinstance(kind, str):
        named = choice.get("server_label", _own_name(choice))
        if kind not in _CHOICES or (named is not None and named in ignored.values() and kind != "allowed_tools"):
            raise _cannot_run("tool_choice", "`tool_choice` demands", kind)
    if ignored and not kept and kind != "none":
        raise _cannot_run("tools[0]", "`tools[0]` is", next(iter(ignored)))
    if kind == "allowed_tools" and isinstance(choice, dict):
        kept, kind = _allowed(kept, choice)
        data["tool_choice"] = kind
    if not kept:  # without tools there is nothing to choose
        del data["tools"]
        if kind in ("auto", "none"):
            del data["tool_choice"]
        data.pop("parallel_tool_calls", None)
    else:
        data["tools"] = kept if kind in ("auto", "none", None) else [_enforced(route, tool) for tool in kept]
    return list(ignored)


def _enforced(route: str, tool: Object) -> Object:
    """Mark a tool `strict`, because engines enforce only strict schemas: a small model that had to call
    `get_weather(city)` wrote a schema instead of arguments."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": {**tool["function"], "strict": True}}
    if tool.get("type") == "namespace":
        return {**tool, "tools": [_enforced(route, inner) for inner in tool["tools"]]}
    return tool if route == "responses" and tool.get("type") == "custom" else {**tool, "strict": True}


def _runnable(route: str, tools: list[Object], ignored: dict[str, Any], space: str = "") -> list[Object]:
    """Return the tools that an engine can run, and add the others to `ignored`. space: namespace of the tools."""
    own = ("function",) if space else _OWN.get(route, (None, "function"))
    kept: list[Object] = []
    for tool in tools:
        kind = tool.get("type")
        has_grammar = _object(tool.get("format")).get("type", "text") != "text"
        if kind not in own or has_grammar:
            ignored[space + _label(tool)] = None if space else _own_name(tool)
        elif kind == "namespace":
            if functions := _runnable(route, _objects(tool.get("tools")), ignored, f"{tool.get('name')}."):
                kept.append({**tool, "tools": functions})
        elif route == "responses" and kind == "custom":
            kept.append(tool)
        elif route != "responses" and isinstance(tool.get("function"), dict):
            kept.append({**tool, "function": _with_parameters("parameters", tool["function"])})
        else:
            kept.append(_with_parameters("input_schema" if route == "messages" else "parameters", tool))
    return kept


def _with_parameters(name: str, tool: Object) -> Object:
    """Give a tool without a schema, or with an empty one, the schema of no parameters. name: the schema's field."""
    schema = tool.get(name) or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return tool
    says = any(value for key, value in schema.items() if key not in ("type", "title", "description", "$schema"))
    return tool if says else {**tool, name: _NOTHING}


def _allowed(tools: list[Object], choice: Object) -> tuple[list[Object], str]:
    """Return the tools that `choice` allows, and its mode. Raises HttpError 400 if it allows none."""
    inner = _object(choice.get("allowed_tools", choice))
    names = [_own_name(tool) for tool in _objects(inner.get("tools"))]
    kept, mode = [tool for tool in tools if _own_name(tool) in names], inner.get("mode", "auto")
    if not kept or mode not in ("auto", "required"):
        text = "Invalid value for `tool_choice`: expected a mode ('auto' or 'required') and tools of `tools`."
        raise errors.bad_request(text, param="tool_choice", code="invalid_value")
    return kept, mode


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Object]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _own_name(tool: Object) -> Any:
    inner = tool.get("function") or tool.get("custom")
    return inner.get("name") if isinstance(inner, dict) else tool.get("name", tool.get("server_label"))


def _label(tool: Object) -> str:
    """Return a tool's type, with its name if it has one: `custom:apply_patch`."""
    kind, own = str(tool.get("type"))[:64], _own_name(tool)
    return f"{kind}:{own[:64]}" if isinstance(own, str) and own != kind else kind


def _cannot_run(param: str, asks: str, name: str) -> HttpError:
    text = (
        f"{asks} the tool '{name[:64]}', which only its vendor's server runs. This server calls functions that your "
        "program runs: turn this tool off in your client's settings, or add a function."
    )
    return errors.bad_request(text, param=param, code="unsupported_tool")


# -- messages of chat completions and of Anthropic's API


def _chat_messages(messages: list[Object]) -> list[Object]:
    """Rewrite chat messages. Raises LegacyRefused for a message with both the older and the newer form of a call."""
    normalized: list[Object] = []
    unnamed: list[str] = []  # ids generated for calls without ids; results without ids take them
    for place, message in enumerate(messages):
        message = legacy.with_tool_call(place, message)
        if calls := message.get("tool_calls"):
            ids = {at: f"call_{place}_{at}" for at, call in enumerate(calls) if not call.get("id")}
            unnamed = [*ids.values()]
            named_calls = []
            for at, call in enumerate(calls):
                if custom := _object(call.get("custom")):  # engines know only function calls
                    arguments = orjson.dumps({"input": custom.get("input")}).decode()
                    call = {"type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
                named_calls.append({**call, "id": ids.get(at) or calls[at]["id"]})
            message = {**message, "tool_calls": named_calls}
        if message.get("role") == "tool":
            message = {**message, "content": _result_as_text(message.get("content"))}
            if unnamed and not message.get("tool_call_id"):
                message["tool_call_id"] = unnamed.pop(0)
        elif isinstance(parts := message.get("content"), list):  # lists within the content are flattened
            flat = chain.from_iterable(part if isinstance(part, list) else [part] for part in parts)
            message = {**message, "content": [*flat]}
        normalized.append(message)
    return normalized


def _result_as_text(content: Any) -> Any:
    """Return a tool result as JSON text, unless it is text or message parts."""
    parts = content if isinstance(content, list) else [None]
    if isinstance(content, str) or all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in parts):
        return content
    return "" if content is None else orjson.dumps(content).decode()


def _blocks(blocks: str | list[Any], where: str, left_out: list[str]) -> Any:
    """Turn documents and search results into text, and remove blocks of Anthropic's own tools. left_out: this function
    adds the removed blocks' types. Raises HttpError 400 for a document that is not text."""
    if isinstance(blocks, str):
        return blocks
    normalized: list[Any] = []
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and isinstance(block.get("content"), list):
            normalized.append({**block, "content": _blocks(block["content"], where, left_out)})
        elif not isinstance(kind, str) or kind in _BLOCKS:
            normalized.append(block)
        elif kind in ("document", "search_result"):
            normalized.append({"type": "text", "text": _document(block, f"{where}[{place}]")})
        else:
            left_out.append(kind[:80])
    return normalized or ([{"type": "text", "text": ""}] if blocks else normalized)


def _document(block: Object, where: str) -> str:
    """Return a document or search result as text, with its title. Raises HttpError 400 if it is not text."""
    source = block.get("source")
    content = block.get("content", source)
    if isinstance(content, dict):
        content = content.get("data") if content.get("type") == "text" else content.get("content")
    texts = [part.get("text") for part in _objects(content)] if isinstance(content, list) else [content]
    if not all(isinstance(text, str) for text in texts):
        text = f"`{where}` is not a text document, and this server reads only text. Extract the text."
        raise errors.bad_request(text, param=where, code="unsupported_document")
    return "\n".join(
        filter(None, (block.get("title"), block.get("context"), source if isinstance(source, str) else "", *texts))
    )


# -- items of /v1/responses


def normalize_items(items: list[Object], left_out: list[str]) -> list[Object]:
    """Return the items that an engine can read. left_out: this function adds the other items' types. Raises HttpError
    400 for an object that is not an item, and for types that no engine supports."""
    kept: list[Object] = []
    for place, item in enumerate(items):
        item = {name: value for name, value in item.items() if value is not None}  # some clients send nulls
        kind = item.get("type", "message")
        if kind == "message" and "role" not in item:  # refused here: an engine's error would list all thirty types
            text = f"Invalid type for `input[{place}]`: expected an object with a `role` or a `type`."
            raise errors.bad_request(text, param=f"input[{place}]", code="invalid_type")
        if kind in _REFUSED:
            text = f"`input[{place}]` has the type '{kind}', which this server does not support: {_REFUSED[kind]}."
            raise errors.bad_request(text, param=f"input[{place}]", code="unsupported_item")
        if kind == "message":
            kept.append(_message(item))
        elif kind == "reasoning" and (
            thought := "\n\n".join(filter(None, map(_text, _objects(item.get("content") or item.get("summary")))))
        ):
            kept.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        elif kind == "function_call_output":
            kept.append({**item, "output": _parts(_result_as_text(item.get("output")))})
        elif kind == "function_call" and isinstance(item.get("arguments"), dict):
            kept.append({**item, "arguments": orjson.dumps(item["arguments"]).decode()})
        elif kind in ("function_call", "custom_tool_call", "custom_tool_call_output"):
            kept.append(item)
        elif kind != "reasoning" or item.get("encrypted_content"):
            left_out.append(kind[:80])
    return kept


def _message(item: Object) -> Object:
    content = item.get("content")
    if not isinstance(content, list):
        return item
    if item["role"] != "assistant":
        return {**item, "content": _parts(content)}
    texts = [_text(part) for part in content]
    return item if None in texts else {"role": "assistant", "content": "".join(filter(None, texts))}


def _parts(content: Any) -> Any:
    """Turn every text part into a plain `input_text`, the only text type that engines know."""
    if not isinstance(content, list):
        return content
    return [part if (text := _text(part)) is None else {"type": "input_text", "text": text} for part in content]


def _text(part: Any) -> str | None:
    """Return a part's text; None for a part without text."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str) or part["type"] not in _TEXTS:
        return None
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    return text if isinstance(text, str) else None
