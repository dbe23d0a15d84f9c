"""Converts the turns of a conversation, whose fields have many names, to messages of OpenAI's chat format."""

from __future__ import annotations

import json
from typing import Any

from train.data.records import (
    BadRecord,
    Fields,
    NoAnswer,
    Record,
    Refuses,
    has_value,
    kind_of,
    listed,
    loads,
    quoted,
)

# Rendering time may grow with the square of the number of messages; no context has space for so many.
MOST_MESSAGES = 8192
WEIGHT = ("weight", "train", "loss", "trainable", "training", "loss_mask", "loss_scale")
CALLS = ("tool_calls", "function_call")
_CONTENT = ("content", "value")
_REASONING = ("reasoning", "reasoning_content", "thinking")
_ARGUMENTS = ("arguments", "parameters", "input", "args")
_CALL_ROLES = ("function_call", "tool_call")
_ROLES = {
    role: ours
    for ours, roles in {
        "system": ("system", "developer"),
        "user": ("user", "human", "prompter"),
        "assistant": ("assistant", "gpt", "model", "chatgpt", "bing", "bard", "bot", *_CALL_ROLES),
        "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
    }.items()
    for role in roles
}


def is_off(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and value == 0


_MEDIA_KINDS = ("image", "images", "img", "picture", "pictures", "photo", "audio", "audios", "video", "videos")
MEDIA_REFUSES: Refuses = {
    kind + tail: (has_value, "images, audio and video cannot be trained on; leave out these examples")
    for kind in _MEDIA_KINDS
    for tail in ("", "_url", "_urls", "_path", "_paths", "_file", "_files", "_bytes")
} | {"pixel_values": (has_value, "images cannot be trained on; leave out these examples")}
TURN_REFUSES: Refuses = {
    **MEDIA_REFUSES,
    "tool_responses": (has_value, "write each result as a message with the role 'tool'"),
    "channel": (lambda value: value == "analysis", "write a thought as 'reasoning_content' of the answer after it"),
    "masked": (has_value, "write the weight 0 on a message that is not trained"),
    **{key: (has_value, "a turn cannot be continued; write it whole") for key in ("prefix", "partial")},
    "train_detail": (has_value, "a part of a message cannot be left out of the loss; make two messages of it"),
    "eot": (is_off, "the end of a turn is always trained; leave out the key, or give the message the weight 0"),
}


def read_messages(turns: Any, left_out: set[str], name: str = "messages", n_calls: int = 0) -> list[Record]:
    """Return messages with the fields that training reads; each result has the id of its call. Raises BadRecord.

    Args:
        left_out: as in `Fields`.
        name: the place of the turns in the row.
        n_calls: the number of tool calls in earlier messages.
    """
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{name!r} must be a list with at least one message")
    if len(turns) > MOST_MESSAGES:
        raise BadRecord(f"has {len(turns)} messages, at most {MOST_MESSAGES} are allowed in one example")
    messages: list[Record] = []
    unanswered: list[Record] = []
    for index, turn in enumerate(turns):
        where = f"{name}[{index}]"
        if not isinstance(turn, dict):
            raise BadRecord(f"{where} is a {kind_of(turn)}, expected an object with 'role' and 'content'")
        with Fields(turn, left_out, where, TURN_REFUSES) as fields:
            message = _message(fields, where, n_calls)
        if message["role"] == "tool":
            _find_call(message, unanswered, where)
        elif message["role"] == "assistant":
            unanswered = list(message.get("tool_calls", ()))
            n_calls += len(unanswered)
            last = messages[-1] if messages else {}
            is_bare = not message["content"] and message.keys() <= {"role", "content", "tool_calls", "weight"}
            joins = last.get("role") == "assistant" and message.get("weight") == last.get("weight")
            if _role_in(turn) in _CALL_ROLES and is_bare and joins:
                # Consecutive calls, or a text and its calls, form one answer of the model.
                last["tool_calls"] = [*last.get("tool_calls", ()), *unanswered]
                unanswered = list(last["tool_calls"])
                continue
        messages.append(message)
    return messages


def with_system(turns: Any, fields: Fields) -> Any:
    """Return the turns, beginning with the system prompt if the row has one in a separate field. Raises BadRecord if
    the turns have another system prompt."""
    text = fields.text("system", "system_prompt")
    if text is None:
        return turns
    first = turns[0] if isinstance(turns, list) and turns else None
    if role_of(first) != "system":
        return [{"role": "system", "content": text}, *listed(turns)]
    if str(Fields(first, set()).take(*_CONTENT)).strip() != text.strip():
        raise BadRecord("has a 'system' and another system message; expected one of the two")
    return turns


def untrained(turn: Any) -> Any:
    """Return a prompt's turn; an answer without a weight gets weight 0, because a row trains only its completion."""
    if role_of(turn) != "assistant" or any(turn.get(key) is not None for key in WEIGHT):
        return turn
    return {**turn, "weight": 0}


def last_role(turns: Any) -> str | None:
    return role_of(turns[-1]) if isinstance(turns, list) and turns else None


def role_of(turn: Any) -> str | None:
    """Return system, user, assistant or tool; None for an unknown role."""
    return _ROLES.get(_role_in(turn))


def _role_in(turn: Any) -> str:
    """Return the role as the turn spells it, in lower case."""
    if not isinstance(turn, dict):
        return ""
    role = turn.get("from") if turn.get("role") is None else turn["role"]
    return role.lower() if isinstance(role, str) else ""


def _message(fields: Fields, where: str, calls_before: int) -> Record:
    role = role_of(fields.record)
    key = "from" if fields.take("role") is None and fields.take("from") is not None else "role"
    if role is None:
        raise BadRecord(
            f"{where}.{key} is {quoted(fields.record.get(key))}; expected one of system, developer, user, assistant, "
            "tool (or human, gpt, function_call, observation)"
        )
    message: Record = {"role": role}
    content, calls = fields.take(*_CONTENT), _calls_in(fields, role, where)
    if _role_in(fields.record) in _CALL_ROLES:
        if not isinstance(content, str):
            raise BadRecord(f"{where} must have a call as its text: JSON with 'name' and 'arguments'")
        calls, content = [*listed(_json(content, where)), *calls], ""
    elif role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    else:
        content = _text(content, fields.left_out, f"{where}.content")
    if calls:
        message["tool_calls"] = [
            _call(call, fields.left_out, where, calls_before + number) for number, call in enumerate(calls, 1)
        ]
    if role == "assistant" and (refusal := fields.text("refusal")):
        if content:
            raise BadRecord(f"{where} has both a text and a 'refusal'; expected one of the two")
        content = refusal
    if content is None and not calls:
        raise (NoAnswer if role == "assistant" else BadRecord)(f"{where}.content is missing")
    message["content"] = content or ""
    if role == "assistant" and not calls and not message["content"].strip():
        raise NoAnswer(f"{where} is an assistant message without text")
    optional = {"weight": _weight(fields, role, where), "name": fields.text("name")}
    if role == "assistant":
        optional["reasoning_content"] = fields.text(*_REASONING)
    if role == "tool":
        optional["tool_call_id"] = fields.text("tool_call_id")
    return message | {key: value for key, value in optional.items() if value is not None}


def _weight(fields: Fields, role: str, where: str) -> int | None:
    weight = fields.take(*WEIGHT)
    is_weight = weight is None or (isinstance(weight, (bool, int, float)) and weight in (0, 1))
    if not is_weight or (weight and role != "assistant"):
        key = fields.name(*WEIGHT)
        raise BadRecord(f"{where}.{key} is {quoted(weight)}; expected 0 or 1, on assistant messages only")
    return None if weight is None or role != "assistant" else int(weight)


def _text(content: Any, left_out: set[str], where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"{where} is a {kind_of(content)}, expected a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        with Fields(part if isinstance(part, dict) else {}, left_out, f"{where}[{index}]") as fields:
            kind = fields.take("type")
            text = fields.take("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise BadRecord(f"{where} has a part of type {quoted(kind)}; only text can be trained on")
        texts.append(text)
    return "".join(texts)


# -- calls and their results -------------------------------------------------------------------------------------------


def _calls_in(fields: Fields, role: str, where: str) -> list[Any]:
    calls, key = fields.take(*CALLS), fields.name(*CALLS)
    if not has_value(calls):
        return []
    if role != "assistant":
        raise BadRecord(f"{where}.{key} belongs to assistant messages only")
    return listed(_json(calls, f"{where}.{key}") if isinstance(calls, str) else calls)


def _call(call: Any, left_out: set[str], where: str, number: int) -> Record:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRecord(f"{where} has a call without a 'name'; expected {{'name': text, 'arguments': {{…}}}}")
    merged = {key: value for key, value in call.items() if key != "function"} | function
    with Fields(merged, left_out, f"{where}.tool_calls") as fields:
        name, identity, _ = (fields.take(key) for key in ("name", "id", "type"))
        arguments = _arguments(fields.take(*_ARGUMENTS), name, where)
    return {
        "id": str(identity) if has_value(identity) else f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _arguments(value: Any, name: str, where: str) -> str:
    """Return the arguments as the JSON text of an object, even if they were encoded twice. Raises BadRecord."""
    where, text = f"{where}, arguments of {name[:60]!r}", None
    while isinstance(value, str) and value.strip():
        text, value = value, _json(value, where)
    if isinstance(value, str) or not has_value(value):
        return "{}"
    if not isinstance(value, dict):
        raise BadRecord(f"{where}: {quoted(value)} is not an object; expected the arguments by name")
    return text or json.dumps(value, ensure_ascii=False)


def drop_padded_arguments(messages: list[Record], tools: list[Record]) -> None:
    """Drop null arguments that no tool defines: a table pads each call with the arguments of all other calls."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        arguments = loads(function["arguments"].encode())
        properties = schemas.get(function["name"], {}).get("properties")
        defined = properties if isinstance(properties, dict) else {}
        kept = {key: value for key, value in arguments.items() if value is not None or key in defined}
        if kept != arguments:
            function["arguments"] = json.dumps(kept, ensure_ascii=False)


def _find_call(message: Record, unanswered: list[Record], where: str) -> None:
    """Give a result without an id the id of its call: the next call without a result, of the same name if the result
    has a name."""
    identity, name = message.get("tool_call_id"), message.get("name")
    if identity is None:
        matches = [call for call in unanswered if name is None or call["function"]["name"] == name]
        if unanswered and not matches:
            names = ", ".join(repr(call["function"]["name"][:60]) for call in unanswered[:4])
            raise BadRecord(f"{where} is a result of {quoted(name)}; expected one of the calls before it: {names}")
        identity = message["tool_call_id"] = matches[0]["id"] if matches else "call_0"
    unanswered[:] = [call for call in unanswered if call["id"] != identity]


def _json(text: str, where: str) -> Any:
    try:
        return loads(text.encode())
    except (BadRecord, UnicodeEncodeError) as error:
        raise BadRecord(f"{where}: {str(error).replace(' at character', ', in its text at character')}") from None


# -- tools -------------------------------------------------------------------------------------------------------------


def read_tools(fields: Fields) -> Record:
    """Return {"tools"} of a row, from a list or its JSON text under either of OpenAI's names; {} without tools. Bare
    functions get {"type": "function"} around them. Raises BadRecord."""
    tools, key = fields.take("tools", "functions"), fields.name("tools", "functions")
    if isinstance(tools, str):
        tools = _json(tools, repr(key)) if tools.strip() else []
    if not has_value(tools):
        return {}
    if not isinstance(tools, list):
        raise BadRecord(f"{key!r} is a {kind_of(tools)}, expected a list")
    return {"tools": [_tool(tool, f"{key}[{index}]") for index, tool in enumerate(tools)]}


def _tool(tool: Any, where: str) -> Record:
    if isinstance(tool, str):
        tool = _json(tool, where)
    if isinstance(tool, dict) and "function" not in tool:
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord(f"{where} needs 'type': 'function' and 'function' with a 'name'")
    fields = Fields(function, set(), where)
    parameters = fields.take("parameters", "input_schema")
    if isinstance(parameters, str) and parameters.strip():
        parameters = _json(parameters, f"{where}.parameters")
    if has_value(parameters) and not isinstance(parameters, dict):
        raise BadRecord(f"{where}.parameters is a {kind_of(parameters)}, expected a JSON schema as an object")
    schema = {"parameters": parameters} if isinstance(parameters, dict) else {}
    return _without_null({**tool, "function": fields.unread | schema})


def _without_null(value: Any) -> Any:
    """Return a tool's definition without the null keys with which tables pad it."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value
