"""Recognises the formats of fine-tuning data and converts them to OpenAI's chat format. Pure; one record at a time.

chat              {"messages": [{"role", "content", "weight"?, "tool_calls"?, ...}], "tools"?}   (OpenAI)
alpaca            {"instruction", "input"?, "output", "system"?, "history"?}     (stanford_alpaca)
sharegpt          {"conversations": [{"from", "value"}], "system"?, "tools"?}    (ShareGPT, LLaMA-Factory)
prompt_completion {"prompt", "completion"}                                       (OpenAI legacy, TRL)
question_answer   {"question", "answer"}                                         (GSM8K)
preference        pairs of outputs, converted by train.data.preferences
prompt            as chat, but it ends with the user: converted by train.data.prompts
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weights.format.legacy_functions import LegacyRefused, has_call, tools_of, with_tool_call

Record = dict[str, Any]
# Templates may take the square of their number, and no context holds as many.
MOST_MESSAGES = 8192

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_KEYS = set(
    "role content name weight tool_calls tool_call_id function_call refusal reasoning reasoning_content audio".split()
)
_CHAT_KEYS = {"messages", "tools", "parallel_tool_calls", "functions", "metadata"}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "function_call",
}


class BadRecord(Exception):
    """Why one record cannot be used; the text is shown beside its line number."""


def shape_of(record: Any) -> str:
    """Shape of a record, from its keys. Raises BadRecord when it has none we know."""
    if not isinstance(record, dict):
        raise BadRecord(f"is a {_kind(record)}, expected a JSON object")
    keys = record.keys()
    if {"chosen", "rejected"} <= keys or {"preferred_output", "non_preferred_output"} <= keys:
        return "preference"
    if "messages" in keys:
        return "prompt" if _ends_with_user(record["messages"]) else "chat"
    if "conversations" in keys:
        return "sharegpt"
    if "instruction" in keys and "output" in keys:
        return "alpaca"
    if {"prompt", "completion"} <= keys:
        return "prompt_completion"
    if {"question", "answer"} <= keys:
        return "question_answer"
    raise BadRecord(
        f"has the keys {sorted(map(str, keys))[:8]}; expected 'messages' (OpenAI chat), 'instruction' and 'output' "
        "(alpaca), 'conversations' (ShareGPT), 'prompt' and 'completion', 'question' and 'answer', or for pairs "
        "'input', 'preferred_output' and 'non_preferred_output' (OpenAI) or 'chosen' and 'rejected' (TRL, ShareGPT)"
    )


def _ends_with_user(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "user"


def to_chat(record: Record, shape: str) -> Record:
    """`record` of shape `shape` as {"messages": [...], "tools"?: [...]}, checked. Raises BadRecord."""
    if shape not in _CONVERT:
        raise BadRecord(f"has the shape {shape!r}, which is not a conversation")
    return check_chat(_CONVERT[shape](record))


def check_chat(record: Record) -> Record:
    """The chat record with only what training reads; text parts joined. Raises BadRecord with the reason."""
    unknown = record.keys() - _CHAT_KEYS
    if unknown:
        raise BadRecord(f"has the unknown key {sorted(map(str, unknown))[0]!r} next to 'messages'")
    checked = check_messages(record)
    if not any(m["role"] == "assistant" for m in checked):
        raise BadRecord("has no assistant message, so there is nothing to learn")
    if checked[-1]["role"] != "assistant":
        raise BadRecord(f"the last message is from {checked[-1]['role']!r}; expected 'assistant'")
    if all(m.get("weight") == 0 for m in checked if m["role"] == "assistant"):
        raise BadRecord("every assistant message has weight 0, so there is nothing to learn")
    _check_parallel_calls(record, checked)
    return {"messages": checked, **tools_in(record)}


def check_messages(record: Record) -> list[Record]:
    """The messages of a record with only what training reads. Raises BadRecord with the reason."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRecord("'messages' must be a list with at least one message")
    if len(messages) > MOST_MESSAGES:
        raise BadRecord(f"has {len(messages)} messages, at most {MOST_MESSAGES} are allowed in one example")
    return [_message(index, _with_tool_call(index, message)) for index, message in enumerate(messages)]


def _check_parallel_calls(record: Record, messages: list[Record]) -> None:
    """Raises BadRecord: templates do not know of it, so that it is only kept by what is learnt."""
    allowed = record.get("parallel_tool_calls")
    if allowed is not None and not isinstance(allowed, bool):
        raise BadRecord(f"'parallel_tool_calls' is a {_kind(allowed)}, expected true or false")
    for index, message in enumerate(messages):
        if allowed is False and message.get("weight") != 0 and len(calls := message.get("tool_calls", ())) > 1:
            raise BadRecord(f"messages[{index}] has {len(calls)} tool calls, and 'parallel_tool_calls' is false")


def tools_in(record: Record) -> Record:
    """{"tools"} of a record that has any, also by OpenAI's older name, else {}. Raises BadRecord with the reason."""
    tools = record.get("tools")
    if record.get("functions") is not None:
        if tools is not None:
            raise BadRecord("has both 'tools' and 'functions', which is OpenAI's older name of the same")
        tools = tools_of(record["functions"])
    return {} if tools is None else {"tools": _tools(tools)}


def _with_tool_call(index: int, message: Any) -> Any:
    if not has_call(message):
        return message
    try:
        return with_tool_call(index, message)
    except LegacyRefused as error:
        raise BadRecord(str(error)) from error


def _message(index: int, message: Any) -> Record:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BadRecord(f"{where} is a {_kind(message)}, expected an object")
    unknown = message.keys() - _MESSAGE_KEYS
    if unknown:
        raise BadRecord(f"{where} has the unknown key {sorted(map(str, unknown))[0]!r}")
    role = message.get("role")
    if role not in ROLES:
        raise BadRecord(f"{where}.role is {_short(role)}; expected one of {', '.join(ROLES)}")
    result: Record = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise BadRecord(f"{where}.tool_calls belongs to assistant messages only")
        result["tool_calls"] = _tool_calls(where, calls)
    content = _text(where, message.get("content"))
    if content is None and not calls:
        raise BadRecord(f"{where}.content is missing")
    result["content"] = content or ""
    if role == "assistant" and not calls and not result["content"].strip():
        raise BadRecord(f"{where} is an assistant message without text")
    if "weight" in message:
        weight = message["weight"]
        if role != "assistant" or isinstance(weight, bool) or weight not in (0, 1):
            raise BadRecord(f"{where}.weight is {_short(weight)}; expected 0 or 1, on assistant messages only")
        result["weight"] = int(weight)
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise BadRecord(f"{where} is from a tool and needs a 'tool_call_id' (string)")
        result["tool_call_id"] = message["tool_call_id"]
    # What a model thinks is `reasoning` in answers of vLLM; templates and others know it by its older name.
    for key, kept in (("name", "name"), ("reasoning", "reasoning_content"), ("reasoning_content", "reasoning_content")):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise BadRecord(f"{where}.{key} is a {_kind(message[key])}, expected a string")
            if result.get(kept, message[key]) != message[key]:
                raise BadRecord(f"{where} has two different texts as 'reasoning' and 'reasoning_content'")
            result[kept] = message[key]
    return result


def _text(where: str, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"{where}.content is a {_kind(content)}, expected a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRecord(f"{where}.content has a part of type {_short(kind)}; only text can be trained on")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(where: str, calls: Any) -> list[Record]:
    if not isinstance(calls, list) or not calls:
        raise BadRecord(f"{where}.tool_calls must be a list with at least one call")
    checked = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f"{where}.tool_calls[{number}] needs 'function' with a 'name'")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            raise BadRecord(f"{where}.tool_calls[{number}].function.arguments must be a string that holds JSON")
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{where}.tool_calls[{number}].function.arguments is not JSON ({error})") from error
        named = {"name": function["name"], "arguments": arguments}
        checked.append({"id": str(call.get("id", f"call_{number}")), "type": "function", "function": named})
    return checked


def _tools(tools: Any) -> list[Record]:
    if not isinstance(tools, list):
        raise BadRecord(f"'tools' is a {_kind(tools)}, expected a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f"tools[{index}] needs 'type': 'function' and 'function' with a 'name'")
    return tools


def _alpaca(record: Record) -> Record:
    for key in ("instruction", "input", "output", "system"):
        if record.get(key) is not None and not isinstance(record[key], str):
            raise BadRecord(f"{key!r} is a {_kind(record[key])}, expected a string")
    messages: list[Record] = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    for turn in record.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(side, str) for side in turn)):
            raise BadRecord("'history' must be a list of [question, answer] pairs")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(part for part in (record.get("instruction"), record.get("input")) if part)
    if not question:
        raise BadRecord("'instruction' and 'input' are both empty")
    messages.append({"role": "user", "content": question})
    return {"messages": [*messages, {"role": "assistant", "content": record.get("output")}]}


def _sharegpt(record: Record) -> Record:
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRecord("'conversations' must be a list with at least one turn")
    messages: list[Record] = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    last_call = ""
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise BadRecord(f"{where} needs 'from' and 'value' (strings)")
        role = _SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            expected = "human, gpt, system, function_call or observation"
            raise BadRecord(f"{where}.from is {_short(turn.get('from'))}; expected {expected}")
        if role == "function_call":
            last_call = f"call_{index}"
            call = _sharegpt_call(where, turn["value"], last_call)
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif role == "tool":
            messages.append({"role": "tool", "content": turn["value"], "tool_call_id": last_call or "call_0"})
        else:
            messages.append({"role": role, "content": turn["value"]})
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"'tools' is not JSON ({error})") from error
    if isinstance(tools, list):
        tools = [t if isinstance(t, dict) and "function" in t else {"type": "function", "function": t} for t in tools]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _sharegpt_call(where: str, value: str, call_id: str) -> Record:
    try:
        call = json.loads(value)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"{where}.value must be JSON with 'name' and 'arguments'") from error
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _pair(question_key: str, answer_key: str) -> Callable[[Record], Record]:
    def convert(record: Record) -> Record:
        messages: list[Record] = []
        for key, role in ((question_key, "user"), (answer_key, "assistant")):
            value = record[key]
            if isinstance(value, str):
                messages.append({"role": role, "content": value})
            elif isinstance(value, list):
                messages += value
            else:
                raise BadRecord(f"{key!r} is a {_kind(value)}, expected a string or a list of messages")
        return {"messages": messages}

    return convert


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_CONVERT: dict[str, Callable[[Record], Record]] = {
    "chat": lambda record: record,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "prompt_completion": _pair("prompt", "completion"),
    "question_answer": _pair("question", "answer"),
}
