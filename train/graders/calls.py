"""Calls of tools in the text of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def calls_in(text: str) -> dict[str, Any]:
    """{"text": what an answer says before it calls a tool, "tools": its calls, as chat completions have them}, of an
    answer to a prompt with tools. A call is JSON between the tags of Hermes, which Qwen and SmolLM have too, or, as
    Llama's, the whole answer. Everything else is text."""
    begin = _CALL.search(text)
    found = _CALL.findall(text) if begin else [text]
    calls = [call for one in found if (call := _call(one))]
    if not calls or len(calls) < len(found):
        return {"text": text}
    return {
        "text": text[: begin.start()].strip() if begin else "",
        "tools": [{"id": f"call_{n}", "type": "function", "function": call} for n, call in enumerate(calls)],
    }


def _call(text: str) -> dict[str, str] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(name := read.get("name"), str):
        return None
    arguments = read.get("arguments", read.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
