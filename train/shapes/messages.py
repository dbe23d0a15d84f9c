"""Reads the turns of a conversation, by whatever names their fields have, as messages of OpenAI's chat format.

TURN_READS says which keys are read of the turn of each role, TURN_REFUSES which make the record unusable; all others
are left out, and reported by `left_out_of_turns`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from train.shapes.records import BadRecord, NoAnswer, Record, is_empty, kind_of, loads, one_of, quoted

# Templates may take the square of their number, and no context holds as many.
MOST_MESSAGES = 8192
ROLE, CONTENT = ("role", "from"), ("content", "value")
SYSTEM = ("system", "system_prompt")
WEIGHT = ("weight", "train", "loss", "trainable", "training", "loss_mask", "loss_scale")
REASONING = ("reasoning", "reasoning_content", "thinking")
CALLS = ("tool_calls", "function_call")
ARGUMENTS = ("arguments", "parameters", "input", "args")

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALL_ROLES = ("function_call", "tool_call")
_OF_ALL = frozenset((*ROLE, *CONTENT, *WEIGHT, "name"))
TURN_READS: Mapping[str, frozenset[str]] = {
    "system": _OF_ALL,
    "user": _OF_ALL,
    "assistant": _OF_ALL | {*CALLS, *REASONING, "refusal"},
    "tool": _OF_ALL | {"tool_call_id"},
}
FUNCTION_READS = frozenset(("name", *ARGUMENTS))
CALL_READS = {True: frozenset(("id", "type", "function")), False: frozenset(("id", "type")) | FUNCTION_READS}
"""By whether the function is in an envelope."""
PART_READS = frozenset(("type", "text", "refusal"))
_TEXTS = {"assistant": (("reasoning_content", REASONING),), "tool": (("tool_call_id", ("tool_call_id",)),)}
"""Optional texts of a role's messages, with their names in a turn."""

Refusals = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By key: which of its values make a record unusable, and why."""


def has_value(value: Any) -> bool:
    return not is_empty(value)


def is_off(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and value == 0


_MEDIA_KINDS = ("image", "images", "img", "picture", "pictures", "photo", "audio", "audios", "video", "videos")
MEDIA_REFUSES: Refusals = {
    kind + tail: (has_value, "images, audio and video cannot be trained on; leave out these examples")
    for kind in _MEDIA_KINDS
    for tail in ("", "_url", "_urls", "_path", "_paths", "_file", "_files", "_bytes")
} | {"pixel_values": (has_value, "images cannot be trained on; leave out these examples")}
TURN_REFUSES: Refusals = {
    **MEDIA_REFUSES,
    "tool_responses": (has_value, "write each result as a message with the role 'tool'"),
    "channel": (lambda value: value == "analysis", "write a thought as 'reasoning_content' of the answer after it"),
    "masked": (has_value, "write the weight 0 on a message that is not trained"),
    **{key: (has_value, "a turn cannot be continued; write it whole") for key in ("prefix", "partial")},
    "train_detail": (has_value, "a part of a message cannot be left out of the loss; make two messages of it"),
    "eot": (is_off, "the end of a turn is always trained; leave out the key, or give the message the weight 0"),
}


def refuse(record: Record, refuses: Refusals, where: str = "") -> None:
    """Raises BadRecord for a key that a record must not have."""
    for key in refuses.keys() & record.keys():
        is_refused, why = refuses[key]
        if is_refused(record[key]):
            raise BadRecord(f"{where}has {key!r}: {why}")


def read_messages(turns: Any, name: str = "messages") -> list[Record]:
    """Messages with only what training reads: calls have ids, results belong to calls. Raises BadRecord."""
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{name!r} must be a list with at least one message")
    if len(turns) > MOST_MESSAGES:
        raise BadRecord(f"has {len(turns)} messages, at most {MOST_MESSAGES} are allowed in one example")
    messages: list[Record] = []
    unanswered: list[Record] = []
    calls = 0
    for index, turn in enumerate(turns):
        where = f"{name}[{index}]"
        role = role_of(turn, where)
        is_call = turn_role(turn) in _CALL_ROLES
        message = _message(turn, role, is_call, where, calls)
        if role == "tool":
            _find_call(message, unanswered, where)
        elif role == "assistant":
            unanswered = list(message.get("tool_calls", ()))
            calls += len(unanswered)
            last = messages[-1] if messages else {}
            if is_call and last.get("role") == "assistant" and _is_call_alone(message, last):
                # Several calls, or a text and its calls, are one answer of a model.
                last["tool_calls"] = [*last.get("tool_calls", ()), *unanswered]
                unanswered = list(last["tool_calls"])
                continue
        messages.append(message)
    return messages


def with_system(turns: Any, record: Record) -> Any:
    """The turns after the system prompt that a record has besides them. Raises BadRecord where they have another."""
    text = one_of(record, SYSTEM)
    if is_empty(text):
        return turns
    if not isinstance(text, str):
        raise BadRecord(f"'system' is a {kind_of(text)}, expected a string")
    first = turns[0] if isinstance(turns, list) and turns else None
    if _ROLES.get(turn_role(first)) != "system":
        return [{"role": "system", "content": text}, *listed(turns)]
    if str(one_of(first, CONTENT)).strip() != text.strip():
        raise BadRecord("has a 'system' and another system message; expected one of the two")
    return turns


def untrained(turn: Any) -> Any:
    """A turn of a prompt: of a completion's row the completion is trained, and no earlier answer unless it says so."""
    if _ROLES.get(turn_role(turn)) != "assistant" or any(turn.get(key) is not None for key in WEIGHT):
        return turn
    return {**turn, "weight": 0}


def ends_with_user(turns: Any) -> bool:
    return last_role(turns) == "user"


def last_role(turns: Any) -> str | None:
    return _ROLES.get(turn_role(turns[-1])) if isinstance(turns, list) and turns else None


def turn_role(turn: Any) -> str:
    """The role as the turn names it, in lower case."""
    if not isinstance(turn, dict):
        return ""
    found = turn.get("role")
    if found is None:
        found = turn.get("from")
    return found.lower() if isinstance(found, str) else ""


def role_of(turn: Any, where: str) -> str:
    """One of system, user, assistant and tool. Raises BadRecord."""
    if not isinstance(turn, dict):
        raise BadRecord(f"{where} is a {kind_of(turn)}, expected an object with 'role' and 'content'")
    role = _ROLES.get(turn_role(turn))
    if role is None:
        key = next((name for name in ROLE if name in turn), "role")
        raise BadRecord(
            f"{where}.{key} is {quoted(turn.get(key))}; expected one of system, developer, user, assistant, tool "
            "(or human, gpt, function_call, observation)"
        )
    return role


def left_out_of_turns(turns: Any, name: str) -> Iterator[str]:
    """Names of what is not read of turns: `messages[].id`."""
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, dict):
            continue
        said = turn_role(turn)
        yield from _left(turn, TURN_READS[_ROLES.get(said, "user")], f"{name}[]")
        content = next((turn[key] for key in CONTENT if turn.get(key) is not None), None)
        for part in content if isinstance(content, list) else ():
            yield from _left(part, PART_READS, f"{name}[].content[]")
        for key in CALLS:
            if key in turn:
                yield from _left_of_calls(turn[key], f"{name}[].{key}")
        if said in _CALL_ROLES:
            yield from _left_of_calls(content, f"{name}[].value")


def _left_of_calls(calls: Any, name: str) -> Iterator[str]:
    for call in listed(_json(calls, name) if isinstance(calls, str) else calls):
        if isinstance(call, dict):
            yield from _left(call, CALL_READS["function" in call], name)
            yield from _left(call.get("function"), FUNCTION_READS, f"{name}.function")


def _left(value: Any, reads: frozenset[str], name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key in value.keys() - reads:
            if not is_empty(value[key]):
                yield f"{name}.{key}"


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _message(turn: Record, role: str, is_call: bool, where: str, calls_before: int) -> Record:
    refuse(turn, TURN_REFUSES, f"{where} ")
    result: Record = {"role": role}
    content: Any = one_of(turn, CONTENT, f"{where} ")
    calls = _calls_in(turn, role, where)
    if is_call:
        if not isinstance(content, str):
            raise BadRecord(f"{where} must have a call as its text: JSON with 'name' and 'arguments'")
        calls, content = [*listed(_json(content, where)), *calls], ""
    elif role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    else:
        content = _text(where, content)
    if calls:
        result["tool_calls"] = [_call(call, where, calls_before + number) for number, call in enumerate(calls, 1)]
    if role == "assistant" and (refusal := _one_text(turn, ("refusal",), where)):
        if content:
            raise BadRecord(f"{where} has both a text and a 'refusal'; expected one of the two")
        content = refusal
    if content is None and not calls:
        raise (NoAnswer if role == "assistant" else BadRecord)(f"{where}.content is missing")
    result["content"] = content or ""
    if role == "assistant" and not calls and not result["content"].strip():
        raise NoAnswer(f"{where} is an assistant message without text")
    _add_weight(result, turn, where)
    for field, names in (("name", ("name",)), *_TEXTS.get(role, ())):
        if text := _one_text(turn, names, where):
            result[field] = text
    return result


def _one_text(turn: Record, names: tuple[str, ...], where: str) -> str | None:
    value = one_of(turn, names, f"{where} ")
    if is_empty(value):
        return None
    if not isinstance(value, str):
        key = next(name for name in names if turn.get(name) is value)
        raise BadRecord(f"{where}.{key} is a {kind_of(value)}, expected a string")
    return value


def _add_weight(result: Record, turn: Record, where: str) -> None:
    given = {key: turn[key] for key in WEIGHT if turn.get(key) is not None}
    for key, value in given.items():
        is_weight = isinstance(value, (bool, int, float)) and value in (0, 1)
        if not is_weight or (value and result["role"] != "assistant"):
            raise BadRecord(f"{where}.{key} is {quoted(value)}; expected 0 or 1, on assistant messages only")
    if len(weights := {int(value) for value in given.values()}) > 1:
        raise BadRecord(f"{where} has two different weights: {', '.join(map(repr, given))}")
    if weights and result["role"] == "assistant":
        result["weight"] = weights.pop()


def _text(where: str, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"{where}.content is a {kind_of(content)}, expected a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise BadRecord(f"{where}.content has a part of type {quoted(kind)}; only text can be trained on")
        texts.append(text)
    return "".join(texts)


# -- calls and their results -------------------------------------------------------------------------------------------


def _calls_in(turn: Record, role: str, where: str) -> list[Any]:
    found = {key: turn[key] for key in CALLS if key in turn and not is_empty(turn[key])}
    for key in found:
        if role != "assistant":
            raise BadRecord(f"{where}.{key} belongs to assistant messages only")
    if len(found) > 1:
        raise BadRecord(f"{where} has both 'tool_calls' and 'function_call'; expected one of the two")
    for key, calls in found.items():
        if isinstance(calls, str):
            calls = _json(calls, f"{where}.{key}")
        if key == "tool_calls" and not isinstance(calls, list):
            raise BadRecord(f"{where}.tool_calls is a {kind_of(calls)}, expected a list of calls")
        return listed(calls)
    return []


def _call(call: Any, where: str, number: int) -> Record:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRecord(f"{where} has a call without a 'name'; expected {{'name': text, 'arguments': {{…}}}}")
    arguments = _arguments(one_of({**call, **function}, ARGUMENTS, f"{where} "), function["name"], where)
    identity = call.get("id")
    return {
        "id": f"call_{number}" if is_empty(identity) else str(identity),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _arguments(given: Any, name: str, where: str) -> str:
    """The JSON text of an object of arguments, also of one that was encoded twice. Raises BadRecord."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return "{}"
    where = f"{where}, arguments of {name[:60]!r}"
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    value = _json(text, where) if isinstance(given, str) else given
    if isinstance(value, str) and value.strip():
        text, value = value, _json(value, where)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise BadRecord(f"{where}: {quoted(value)} is not an object; expected the arguments by name")
    return text


def drop_padded_arguments(messages: list[Record], tools: list[Record]) -> None:
    """Drops null arguments that no tool defines: tables pad each call with the columns of all others."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if "null" not in function["arguments"]:
                continue
            arguments = loads(function["arguments"].encode())
            properties = (functions.get(function["name"], {}).get("parameters") or {}).get("properties") or {}
            kept = {key: value for key, value in arguments.items() if value is not None or key in properties}
            if kept != arguments:
                function["arguments"] = json.dumps(kept, ensure_ascii=False)


def _find_call(message: Record, unanswered: list[Record], where: str) -> None:
    """Gives a result without an id that of its call: the next one without a result, by name if the result has one."""
    identity, name = message.get("tool_call_id"), message.get("name")
    if identity is None:
        matches = [call for call in unanswered if name is None or call["function"]["name"] == name]
        if unanswered and not matches:
            names = ", ".join(repr(call["function"]["name"][:60]) for call in unanswered[:4])
            raise BadRecord(f"{where} is a result of {quoted(name)}; expected one of the calls before it: {names}")
        identity = message["tool_call_id"] = matches[0]["id"] if matches else "call_0"
    unanswered[:] = [call for call in unanswered if call["id"] != identity]


def _is_call_alone(message: Record, last: Record) -> bool:
    """Whether nothing of a message but its calls would be lost in the one before it."""
    is_bare = not message["content"] and message.keys() <= {"role", "content", "tool_calls", "weight"}
    return is_bare and message.get("weight") == last.get("weight")


def _json(text: str, where: str) -> Any:
    try:
        return loads(text.encode())
    except (BadRecord, UnicodeEncodeError) as error:
        raise BadRecord(f"{where}: {str(error).replace(' at character', ', in its text at character')}") from None


# -- tools -------------------------------------------------------------------------------------------------------------


def read_tools(record: Record) -> Record:
    """{"tools"} of a record that has any, as a list or as JSON text, by either of OpenAI's names; else {}. Functions
    without an envelope get one. Raises BadRecord."""
    given = {key: record[key] for key in ("tools", "functions") if not is_empty(record.get(key))}
    if len(given) > 1:
        raise BadRecord("has both 'tools' and 'functions', which is OpenAI's older name of the same")
    for key, tools in given.items():
        if isinstance(tools, str):
            tools = _json(tools, repr(key)) if tools.strip() else []
        if not is_empty(tools) and not isinstance(tools, list):
            raise BadRecord(f"{key!r} is a {kind_of(tools)}, expected a list")
        if tools:
            return {"tools": [_tool(tool, f"{key}[{index}]") for index, tool in enumerate(tools)]}
    return {}


def _tool(tool: Any, where: str) -> Record:
    if isinstance(tool, str):
        tool = _json(tool, where)
    if isinstance(tool, dict) and "function" not in tool:
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord(f"{where} needs 'type': 'function' and 'function' with a 'name'")
    parameters = one_of(function, ("parameters", "input_schema"), f"{where} ")
    if isinstance(parameters, str) and parameters.strip():
        parameters = _json(parameters, f"{where}.parameters")
    if not is_empty(parameters) and not isinstance(parameters, dict):
        raise BadRecord(f"{where}.parameters is a {kind_of(parameters)}, expected a JSON schema as an object")
    function = {key: value for key, value in function.items() if key not in ("parameters", "input_schema")}
    if isinstance(parameters, dict):
        function["parameters"] = parameters
    return _without_null({**tool, "function": function})


def _without_null(value: Any) -> Any:
    """A tool's definition without the null keys with which tables pad it."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value
