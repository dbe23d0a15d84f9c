"""OpenAI's older form of tools, `functions` and `function_call`, as `tools` and `tool_choice`. Pure.

https://platform.openai.com/docs/api-reference/chat/create has both; chat templates and engines know the newer one
alone. The gateway measures requests through it, and engines answer through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHOICES = ("none", "auto")


class LegacyRefused(ValueError):
    """A request mixes both forms, or names what is not there. `param`: the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def tools_of(functions: Any) -> Any:
    """`functions` as `tools`; what is not a list stays as it is."""
    if not isinstance(functions, list):
        return functions
    return [{"type": "function", "function": function} for function in functions]


def is_legacy(request: Mapping[str, Any]) -> bool:
    """Whether the request names functions in the older form, so that its answer has that form too."""
    return request.get("functions") is not None or request.get("function_call") is not None


def as_tools(request: Mapping[str, Any]) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a request for which `is_legacy`. Raises LegacyRefused."""
    functions, wanted = request.get("functions"), request.get("function_call")
    for newer in ("tools", "tool_choice"):
        if request.get(newer) is not None:
            raise LegacyRefused(newer, f"`{newer}` and the older `functions` and `function_call`: send one of the two.")
    if functions is None:
        raise LegacyRefused("function_call", "`function_call` is only allowed when `functions` are specified.")
    if not isinstance(functions, list) or not functions:
        raise LegacyRefused("functions", "Invalid value for `functions`; expected a non-empty array of functions.")
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if len(names) < len(functions) or not all(isinstance(name, str) and name for name in names):
        raise LegacyRefused("functions", "Each of `functions` must be an object with a `name`.")
    choice: Any = "auto" if wanted is None else wanted
    if isinstance(choice, dict):
        name = choice.get("name")
        if name not in names:
            given = repr(name)[:80]
            raise LegacyRefused("function_call", f"`function_call.name` is {given}, which is not one of `functions`.")
        choice = {"type": "function", "function": {"name": name}}
    elif choice not in CHOICES:
        raise LegacyRefused(
            "function_call", "Invalid value for `function_call`; expected 'none', 'auto' or an object with a `name`."
        )
    # The older form has room for one call.
    return {"tools": tools_of(functions), "tool_choice": choice, "parallel_tool_calls": False}


def has_call(message: Any) -> bool:
    """Whether a message has the older form: a `function_call`, or the role of a function's result."""
    return isinstance(message, dict) and (message.get("role") == "function" or message.get("function_call") is not None)


def with_tool_call(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Message number `index` of a conversation, `function_call` as `tool_calls` and role `function` as `tool`. A result
    belongs to the call in the message before it. Raises LegacyRefused."""
    kept = {key: value for key, value in message.items() if key != "function_call"}
    if kept.get("role") == "function":
        kept |= {"role": "tool", "tool_call_id": kept.get("tool_call_id", f"call_{index - 1}")}
        if kept.get("content") is None:
            kept["content"] = ""
    call = message.get("function_call")
    if call is None:
        return kept
    if kept.get("tool_calls"):
        raise LegacyRefused("messages", f"messages[{index}] has both 'tool_calls' and 'function_call'")
    return kept | {"tool_calls": [{"id": f"call_{index}", "type": "function", "function": call}]}


def answer_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of an answer with its first tool call as `function_call`."""
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    calls = message.get("tool_calls")
    if calls:
        kept["function_call"] = {name: calls[0]["function"].get(name) or "" for name in ("name", "arguments")}
    return kept


def answer_delta(delta: dict[str, Any]) -> dict[str, Any]:
    """A piece of a streamed message, pieces of its first tool call as pieces of `function_call`."""
    kept = {key: value for key, value in delta.items() if key != "tool_calls"}
    piece: dict[str, str] = {}
    for call in delta.get("tool_calls") or ():
        if call.get("index", 0) == 0:
            for name, text in (call.get("function") or {}).items():
                if name in ("name", "arguments") and text is not None:
                    piece[name] = piece.get(name, "") + text
    return kept | {"function_call": piece} if piece else kept


def finish_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
