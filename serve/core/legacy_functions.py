"""Converts OpenAI's older `functions` and `function_call` to `tools` and `tool_choice`. Pure.

https://platform.openai.com/docs/api-reference/chat/create describes both forms; chat templates and engines accept only
the newer form. The gateway converts requests to count tokens, engines convert requests to answer them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LegacyRefused(ValueError):
    """A request mixes both forms, or refers to a missing function. `param`: the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def is_legacy(request: Mapping[str, Any]) -> bool:
    """Return whether the request uses the older form; its answer must then use the older form too."""
    return request.get("functions") is not None or request.get("function_call") is not None


def as_tools(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls` for a legacy request whose `functions` are objects.
    Raises LegacyRefused."""
    functions, choice = request.get("functions"), request.get("function_call") or "auto"
    for newer in ("tools", "tool_choice"):
        if request.get(newer) is not None:
            raise LegacyRefused(newer, f"`{newer}` excludes the older `functions` and `function_call`: send only one.")
    if not functions:
        raise LegacyRefused("function_call", "`function_call` is only allowed when `functions` are specified.")
    if not all(isinstance(function.get("name"), str) for function in functions):
        raise LegacyRefused("functions", "Each of `functions` must be an object with a `name`.")
    if isinstance(choice, dict) and choice.get("name") in [function["name"] for function in functions]:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    elif choice not in ("none", "auto"):
        raise LegacyRefused(
            "function_call",
            f"Invalid value for `function_call`: {str(choice)[:80]}; expected 'none', 'auto' or an object with the "
            "`name` of one of `functions`.",
        )
    tools = [{"type": "function", "function": function} for function in functions]
    # an answer in the older form can hold only one call
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def with_tool_call(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert message number `index` of a conversation: `function_call` becomes `tool_calls`, role `function` becomes
    `tool`. A function's result belongs to the call in the previous message. Raises LegacyRefused."""
    kept = {key: value for key, value in message.items() if key != "function_call"}
    if kept.get("role") == "function":
        kept |= {"role": "tool", "tool_call_id": kept.get("tool_call_id", f"call_{index - 1}")}
        kept["content"] = kept.get("content") or ""
    call = message.get("function_call")
    if call is None:
        return kept
    if kept.get("tool_calls"):
        raise LegacyRefused("messages", f"messages[{index}] has both 'tool_calls' and 'function_call'")
    return kept | {"tool_calls": [{"id": f"call_{index}", "type": "function", "function": call}]}


def answer(choice: dict[str, Any]) -> None:
    """Rewrite a choice of an answer or of a stream chunk in place: its first tool call becomes `function_call`."""
    part = choice["delta" if "delta" in choice else "message"]
    part.pop("function_call", None)
    call_parts: dict[str, str] = {}
    for place, call in enumerate(part.pop("tool_calls", None) or ()):
        for name in ("name", "arguments") if call.get("index", place) == 0 else ():
            if (text := (call.get("function") or {}).get(name)) is not None:
                call_parts[name] = call_parts.get(name, "") + text
    if call_parts:
        part["function_call"] = call_parts
    if choice.get("finish_reason") == "tool_calls":
        choice["finish_reason"] = "function_call"
