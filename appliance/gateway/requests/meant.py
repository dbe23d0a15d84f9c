"""A whole request as engines read it: tools, messages, items of /v1/responses, schemas. Pure: takes a parsed body,
returns another one.

Clients send history without ids, thoughts that only OpenAI can read, and items of tools that only its server has. vLLM
takes the first part of an earlier answer alone, refuses encrypted thoughts, and knows no other items: these are left
out and named.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from weights.format import legacy_functions as legacy

Object = dict[str, Any]

IGNORED_TOOLS: Final = b"x-appliance-ignored-tools"
IGNORED_ITEMS: Final = b"x-appliance-ignored-items"
_GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
"""vLLM's older names, which its clients still send -> fields of `structured_outputs`."""
_INCLUDES: Final = ("web_search_call.results", "web_search_call.action.sources")
"""Values of `include` that engines do not know; they add to items that only OpenAI's own tools make."""
_TEXTS: Final = frozenset({"output_text", "input_text", "text", "summary_text", "reasoning_text", "refusal"})
_REFUSED: Final = {
    "item_reference": "send the item itself, or go on from its response with `previous_response_id`",
    "compaction_trigger": "no engine compacts; ask for a summary in a message",
}
_BLOCKS: Final = frozenset(
    "text image tool_use tool_result tool_reference thinking redacted_thinking tool_addition tool_removal".split()
)
"""Types of Anthropic's blocks that engines know."""
_OWN: Final = {"responses": ("function", "namespace", "custom"), "messages": (None, "custom")}
"""Types of tools that engines take, by route."""
_CHOICES: Final = ("auto", "any", "custom", "none", "tool", "function", "allowed_tools")
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a tool that takes none: a call of it is `{}`, and ends there."""
_SAYS_NOTHING: Final = frozenset({"type", "properties", "required", "additionalProperties", "title", "description"})


def as_meant(route: str, data: Object) -> tuple[Object, list[tuple[bytes, bytes]]]:
    """The request that a client means by this body, without nulls, `data` itself where nothing changes; and headers of
    the answer, naming what is left out. Raises HttpError 400."""
    route = route.removesuffix(".input_tokens").removesuffix(".count_tokens")
    made = {name: value for name, value in data.items() if value is not None}
    items: list[str] = []
    tools = tools_as_meant(route, made)
    if made.get("top_p") == 0:  # greedy, which engines refuse in this form
        made["temperature"], made["top_p"] = 0, 1
    if made.get("temperature") == 0 and made.get("n", 1) != 1:  # several greedy answers: the same
        made["temperature"], made["top_k"] = 1, 1
    if route != "messages":
        _one_format(made)
    if isinstance(made.get("messages"), list):
        read = anthropic_messages_as_meant if route == "messages" else chat_messages_as_meant
        made["messages"] = read(made["messages"], items)
    if route == "responses":
        made.pop("client_metadata", None)  # Codex's own notes
        if isinstance(made.get("input"), list):
            made["input"] = items_as_meant(made["input"], items)
        if isinstance(made.get("include"), list):
            made["include"] = [one for one in made["include"] if one not in _INCLUDES]
    return data if made == data else made, [*_header(IGNORED_TOOLS, tools), *_header(IGNORED_ITEMS, items)]


def _header(name: bytes, left_out: list[str]) -> list[tuple[bytes, bytes]]:
    """The header that names these, each once, in ASCII, and a few; none without any."""
    if not left_out:
        return []
    shown = ["".join(c if c.isascii() and (c.isalnum() or c in "._:-") else "_" for c in one) for one in left_out]
    value = ", ".join([one[:80] for one in dict.fromkeys(shown)][:16])
    return [(name, value.encode())]


def _one_format(data: Object) -> None:
    """One schema in the place where engines look for it, whatever field the client put it into."""
    for older, newer in _GUIDED.items():
        if older in data and not data.get("structured_outputs"):  # with them it stays, and is refused
            data["structured_outputs"] = {newer: data.pop(older)}
    wanted, text = data.get("response_format"), data.get("text")
    if isinstance(wanted, dict) and (flat := _format(wanted)) is not wanted:
        inner = {name: value for name, value in flat.items() if name != "type"}
        data["response_format"] = {"type": "json_schema", "json_schema": inner}
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        data["text"] = {**text, "format": _format(text["format"])}


def _format(wanted: Object) -> Object:
    """A format with its schema beside its type, as /v1/responses has it, wherever the client put the schema; the
    argument itself where there is none."""
    inner = wanted.get("json_schema")
    inner = inner if isinstance(inner, dict) else {}
    schema = wanted.get("schema") or inner.get("schema") or ({} if "name" in inner else inner)
    if wanted.get("type") not in ("json_object", "json_schema") or not isinstance(schema, dict) or not schema:
        return wanted
    named = {key: inner.get(key, wanted.get(key)) for key in ("name", "description", "strict")}
    made = {"type": "json_schema", "name": "answer", "schema": schema}
    return made | {key: value for key, value in named.items() if value is not None}


# -- tools: those that only their maker's own server runs are left out, where functions remain


def tools_as_meant(route: str, data: Object) -> list[str]:
    """Rewrites `tools` and `tool_choice` of a body in place. Returns the names of tools that are left out. Raises
    HttpError 400."""
    if data.get("functions") == []:
        data.pop("functions")
        data.pop("function_call", None)
    elif route == "chat.completions" and legacy.is_legacy(data):
        try:
            data |= legacy.as_tools(data)  # `functions` stay: the answer is to have their form
        except legacy.LegacyRefused as error:
            raise errors.bad_request(str(error), param=error.param, code="invalid_value") from None
    tools = data.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return []
    gone: dict[str, Any] = {}  # label -> own name
    kept = _kept(route, tools, gone)
    choice = data.get("tool_choice")
    kind = _kind(choice)
    if isinstance(choice, dict) and isinstance(kind, str):
        named = choice.get("server_label", _own_name(choice))
        if kind not in _CHOICES or (named is not None and named in gone.values() and kind != "allowed_tools"):
            raise _cannot_run("tool_choice", "`tool_choice` demands", kind)
    if gone and not kept and kind != "none":
        raise _cannot_run("tools[0]", "`tools[0]` is", next(iter(gone)))
    data["tools"] = kept
    if kind == "allowed_tools" and isinstance(choice, dict):
        _only_allowed(data, choice)
    if not data["tools"]:  # none, so nothing can be chosen
        del data["tools"]
        if kind in ("auto", "none"):
            del data["tool_choice"]
        data.pop("parallel_tool_calls", None)
    elif _kind(data.get("tool_choice")) not in ("auto", "none", None):
        data["tools"] = [_enforced(route, tool) for tool in data["tools"]]
    return list(gone)


def _kind(choice: Any) -> Any:
    return choice.get("type") if isinstance(choice, dict) else choice


def _enforced(route: str, tool: Object) -> Object:
    """The tool with its schema enforced, as engines do for `strict` tools alone: a small model that had to call
    `get_weather(city)` wrote schemas."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": {**tool["function"], "strict": True}}
    if tool.get("type") == "namespace":
        return {**tool, "tools": [_enforced(route, one) for one in tool["tools"]]}
    return tool if route == "responses" and tool.get("type") == "custom" else {**tool, "strict": True}


def _kept(route: str, tools: list[Object], gone: dict[str, Any], space: str = "") -> list[Object]:
    """The tools that an engine gets. gone: gets the others. space: the namespace that they are in."""
    kept: list[Object] = []
    for tool in tools:
        kind, form = tool.get("type"), tool.get("format")
        has_grammar = isinstance(form, dict) and form.get("type") != "text"
        own = ("function",) if space else _OWN.get(route, (None, "function"))
        if kind not in own or has_grammar:
            gone[space + _label(tool)] = None if space else _own_name(tool)
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = [one for one in tool["tools"] if isinstance(one, dict)]
            if functions := _kept(route, inner, gone, f"{tool.get('name')}."):
                kept.append({**tool, "tools": functions})
        elif kind == "custom" and route == "responses":
            kept.append(tool)
        else:
            kept.append(_with_parameters(route, tool))
    return kept


def _with_parameters(route: str, tool: Object) -> Object:
    """The tool with a schema that takes nothing, if it has none or its own says nothing else."""
    if route != "responses" and isinstance(tool.get("function"), dict):
        return {**tool, "function": _with_parameters("responses", tool["function"])}
    name = "input_schema" if route == "messages" else "parameters"
    schema = tool.get(name) or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object" or schema.keys() - _SAYS_NOTHING:
        return tool
    if any(schema.get(key) for key in ("properties", "required", "additionalProperties")):
        return tool
    return {**tool, name: _NOTHING}


def _only_allowed(data: Object, choice: Object) -> None:
    """The model sees the allowed tools alone. Raises HttpError 400 where none of them is there."""
    inner = choice.get("allowed_tools", choice)
    allowed = inner.get("tools") if isinstance(inner, dict) else None
    names = [_own_name(tool) for tool in allowed if isinstance(tool, dict)] if isinstance(allowed, list) else []
    kept = [tool for tool in data["tools"] if isinstance(tool, dict) and _own_name(tool) in names]
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    if not kept or mode not in ("auto", "required"):
        raise errors.bad_request(
            "Invalid value for `tool_choice`: expected a mode ('auto' or 'required') and tools of `tools`.",
            param="tool_choice",
            code="invalid_value",
        )
    data["tools"], data["tool_choice"] = kept, mode


def _own_name(tool: Object) -> Any:
    inner = tool.get("function") or tool.get("custom")
    return inner.get("name") if isinstance(inner, dict) else tool.get("name", tool.get("server_label"))


def _label(tool: Object) -> str:
    """Its type, with its own name where it has one: `custom:apply_patch`."""
    kind, own = str(tool.get("type"))[:64], _own_name(tool)
    return f"{kind}:{own[:64]}" if isinstance(own, str) and own != kind else kind


def _cannot_run(param: str, asks: str, name: str) -> HttpError:
    return errors.bad_request(
        f"{asks} the tool '{name[:64]}', which only its maker's own server runs. This server calls functions that your "
        "program runs: turn this tool off in your client's settings, or add a function.",
        param=param,
        code="unsupported_tool",
    )


# -- messages of chat completions and of Anthropic's API


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


def _function_call(call: Object) -> Object:
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


def _document(block: Object, where: str) -> str:
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


# -- items of /v1/responses


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


def _message(item: Object) -> Object:
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


def _thought(item: Object) -> str:
    """The text of a thought that is not encrypted."""
    parts = item.get("content") or item.get("summary")
    return "\n\n".join(filter(None, map(_text, parts))) if isinstance(parts, list) else ""
