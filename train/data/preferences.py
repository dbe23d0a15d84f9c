"""Converts pairs of a preferred and a non-preferred output, in any of their formats, to two chats that share a prompt.

OpenAI     {"input": {"messages": [...], "tools"?, "parallel_tool_calls"?}, "preferred_output": [...],
            "non_preferred_output": [...]}
TRL        {"prompt", "chosen", "rejected"}: texts or lists of messages; without "prompt", or where a side is a whole
           conversation, what both sides begin with is the prompt
ShareGPT   {"conversations": [{"from", "value"}], "chosen": {"from", "value"}, "rejected": {...}, "system"?, "tools"?}
"""

from __future__ import annotations

import os.path
from typing import Any

from train.data.formats import BadRecord, Record, check_chat, to_chat

_SIDES = ("chosen", "rejected")
_OUTPUTS = ("preferred_output", "non_preferred_output")
_INPUT_KEYS = {"messages", "tools", "parallel_tool_calls"}


def pair(record: Record) -> list[Record]:
    """[with the preferred output, with the other] as checked chats, of which only the output is learnt. Raises
    BadRecord with the reason."""
    if "conversations" in record:
        prompt, outputs, tools = _sharegpt(record)
    elif "preferred_output" in record:
        prompt, outputs, tools = _openai(record)
    else:
        prompt, outputs, tools = _trl(record)
    if not prompt:
        raise BadRecord("has no prompt: nothing that both outputs answer")
    for name, output in zip(_OUTPUTS if "preferred_output" in record else _SIDES, outputs, strict=True):
        _check_output(name, output)
    chats = [check_chat({"messages": [*prompt, *output], **tools}) for output in outputs]
    if chats[0]["messages"] == chats[1]["messages"]:
        raise BadRecord("both outputs are the same, so there is nothing to prefer")
    for chat in chats:
        if (last := chat["messages"][len(prompt) - 1])["role"] == "assistant":
            raise BadRecord(f"the prompt ends with a message from {last['role']!r}; expected the turn that is answered")
        for index, message in enumerate(chat["messages"]):
            if message["role"] == "assistant":
                message["weight"] = int(index >= len(prompt))
    return chats


def _openai(record: Record) -> tuple[list[Any], list[Any], Record]:
    given = record.get("input")
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise BadRecord("'input' must be an object with 'messages', a list")
    for where, unknown in (("input", given.keys() - _INPUT_KEYS), ("record", record.keys() - {"input", *_OUTPUTS})):
        if unknown:
            raise BadRecord(f"the {where} has the unknown key {sorted(map(str, unknown))[0]!r}")
    return given["messages"], [record.get(name) for name in _OUTPUTS], _tools(given)


def _trl(record: Record) -> tuple[list[Any], list[Any], Record]:
    sides = [record.get(name) for name in _SIDES]
    if not (all(isinstance(side, str) for side in sides) or all(isinstance(side, list) for side in sides)):
        raise BadRecord("'chosen' and 'rejected' must be both texts or both lists of messages")
    prompt = record.get("prompt")
    if prompt is not None and not isinstance(prompt, (str, list)):
        raise BadRecord("'prompt' must be a text or a list of messages")
    if isinstance(sides[0], str):
        if prompt is None:
            shared = len(os.path.commonprefix(sides).rstrip())
            prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
        outputs: list[Any] = [[{"role": "assistant", "content": side}] for side in sides]
    elif prompt is None or any(_role(message) not in ("assistant", "tool") for side in sides for message in side):
        # Whole conversations: a text or messages beside them only repeat their beginning.
        shared = next((n for n, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
        for name, side in zip(_SIDES, sides, strict=True):
            if any(_role(message) in ("user", "system", "developer") for message in side[shared:]):
                raise BadRecord(f"the prompts differ: {name}[{shared}:] has more than what the assistant answers")
        prompt, outputs = sides[0][:shared], [side[shared:] for side in sides]
    else:
        outputs = sides
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt.strip() else []
    return prompt, outputs, _tools(record)


def _sharegpt(record: Record) -> tuple[list[Any], list[Any], Record]:
    whole = []
    for name in _SIDES:
        side = record.get(name)
        turn = {"from": "gpt", "value": side} if isinstance(side, str) else side
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or not turn["value"].strip():
            raise BadRecord(f"{name!r} must be an answer: {{'from': 'gpt', 'value': text}} or a text")
        turns = record["conversations"]
        if not isinstance(turns, list):
            raise BadRecord("'conversations' must be a list with at least one turn")
        shared = {key: record[key] for key in ("system", "tools") if key in record}
        whole.append(to_chat({**shared, "conversations": [*turns, turn]}, "sharegpt"))
    return whole[0]["messages"][:-1], [chat["messages"][-1:] for chat in whole], _tools(whole[0])


def _check_output(name: str, output: Any) -> None:
    if not isinstance(output, list) or not output:
        raise BadRecord(f"{name!r} must be a list with at least one message")
    roles = [_role(message) for message in output]
    for index, role in enumerate(roles):
        if role not in ("assistant", "tool"):
            raise BadRecord(f"{name}[{index}] is from {role!r}; expected 'assistant' or 'tool'")
    if roles[0] != "assistant":
        raise BadRecord(f"{name}[0] is from {roles[0]!r}; expected 'assistant'")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _tools(given: Record) -> Record:
    return {key: given[key] for key in ("tools", "parallel_tool_calls") if given.get(key) is not None}
