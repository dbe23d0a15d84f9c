"""Items of /v1/responses as engines read them: at once, and with all of their texts. Pure.

Clients send history without ids and status, thoughts that only OpenAI can read, and items of tools that only its server
has. vLLM takes the first part of an earlier answer alone, refuses encrypted thoughts, and knows no other items. A call
that has its result in the history becomes a call of a function; what has nothing for a model to read is left out and
named. An item that is malformed stays as it is: the check that follows says what is wrong with it.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors

Item = dict[str, Any]

_STATUS: Final = frozenset({"in_progress", "completed", "incomplete"})
_TEXTS: Final = frozenset({"output_text", "input_text", "text", "summary_text", "reasoning_text"})
NOTHING_TO_READ: Final = frozenset(
    (
        "web_search_call image_generation_call mcp_list_tools mcp_approval_request mcp_approval_response "
        "tool_search_call tool_search_output program program_output compaction compaction_summary "
        "context_compaction ghost_snapshot"
    ).split()
)
"""Types that are left out: what they did is on their maker's server, encrypted, or in the message that follows."""
_CALLS: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
}
"""Type of a call that the client ran -> name of the function, field with its arguments."""
_RESULTS: Final = frozenset(
    "local_shell_call_output shell_call_output apply_patch_call_output computer_call_output".split()
)
_ANSWERED: Final = {
    "file_search_call": ("file_search", "queries", "results"),
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "mcp_call": ("", "arguments", "output"),
}
"""Type of a call that has its own result -> name of the function (empty: the item has it), fields with both."""
_REFUSED: Final = {
    "item_reference": "send the item itself, or go on from its response with `previous_response_id`",
    "compaction_trigger": "no engine compacts; ask for a summary in a message",
}


def items_as_meant(items: list[Any], left_out: list[str]) -> list[Any]:
    """The items that an engine gets. left_out: gets the types of those that it does not. Raises HttpError 400 for a
    type that asks for what no engine does."""
    made: list[Any] = []
    calls = {item["id"]: item["call_id"] for item in items if _is_local_shell(item)}
    for place, item in enumerate(items):
        made += _one(item, place, calls, left_out) if isinstance(item, dict) else [item]
    return made


def with_settings_of_items(data: Item) -> Item:
    """The body with the tools and settings that its items add to it, each as if the request had it. data: a body whose
    `input` is a list."""
    kept: list[Any] = []
    made = dict(data)
    for item in data["input"]:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "additional_tools" and isinstance(item.get("tools"), list):
            before = made.get("tools")
            made["tools"] = [*(before if isinstance(before, list) else []), *item["tools"]]
        elif kind == "configuration_update":
            for name in ("reasoning", "text"):
                before, later = made.get(name), item.get(name)
                if isinstance(later, dict):
                    made[name] = {**(before if isinstance(before, dict) else {}), **later}
        else:
            kept.append(item)
    return made | {"input": kept} if len(kept) < len(data["input"]) else data


def _is_local_shell(item: Any) -> bool:
    names = ("id", "call_id")
    return isinstance(item, dict) and item.get("type") == "local_shell_call" and all(_is_text(item, n) for n in names)


def _one(item: Item, place: int, calls: dict[str, str], left_out: list[str]) -> list[Item]:
    kind = item.get("type")
    if kind is None or kind == "message":
        return _message(item, place)
    if not isinstance(kind, str):
        return [item]
    if kind == "reasoning":
        return _reasoning(item, place, left_out)
    if kind == "function_call":
        return [_call(item)]
    if kind == "function_call_output":
        return [_result(item, item.get("call_id"), item.get("output"))]
    if kind in _CALLS:
        name, field = _CALLS[kind]
        return [_called(item.get("call_id"), name, item.get(field))]
    if kind in _RESULTS:
        call_id = item.get("call_id") or calls.get(str(item.get("id")), item.get("id"))
        return [_result({"type": "function_call_output"}, call_id, item.get("output"))]
    if kind in _ANSWERED:
        return _answered(item, kind, left_out)
    if kind in NOTHING_TO_READ:
        left_out.append(kind)
        return []
    if kind in _REFUSED:
        raise errors.bad_request(
            f"`input[{place}]` is of the type '{kind}', which this server does not have: {_REFUSED[kind]}.",
            param=f"input[{place}]",
            code="unsupported_item",
        )
    return [item]


def _message(item: Item, place: int) -> list[Item]:
    content = item.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return [item]
    if item.get("role") != "assistant":
        return [{**item, "content": [_input_part(part) for part in content]}]
    texts = [_text(part) for part in content]
    if not all(isinstance(text, str) for text in texts):
        return [item]
    if not content:
        return []
    made = {
        "type": "message",
        "role": "assistant",
        "id": item["id"] if _is_text(item, "id") else f"msg_{place}",
        "status": item["status"] if _is_status(item.get("status")) else "completed",
        "content": [{"type": "output_text", "text": "".join(texts), "annotations": []}],  # type: ignore[arg-type]
    }
    return [made | {"phase": item["phase"]} if "phase" in item else made]


def _is_status(status: Any) -> bool:
    return isinstance(status, str) and status in _STATUS


def _text(part: Item) -> Any:
    """None for a part that is not a text."""
    kind = part.get("type")
    if kind == "refusal":
        return part.get("refusal")
    return part.get("text") if isinstance(kind, str) and kind in _TEXTS else None


def _input_part(part: Item) -> Item:
    text = _text(part)
    if isinstance(text, str) and (part.get("type") != "input_text" or len(part) > 2):
        return {"type": "input_text", "text": text}
    return part


def _reasoning(item: Item, place: int, left_out: list[str]) -> list[Item]:
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            return [item]
        texts = [text for part in parts if isinstance(text := _text(part), str) and text]
        if texts:
            made: Item = {
                "type": "reasoning",
                "id": item["id"] if _is_text(item, "id") else f"rs_{place}",
                "summary": [],
            }
            return [made | {"content": [{"type": "reasoning_text", "text": "\n\n".join(texts)}]}]
    if item.get("encrypted_content"):
        left_out.append("reasoning")
    return []


def _call(item: Item) -> Item:
    made = {name: value for name, value in item.items() if value is not None}
    if isinstance(made.get("arguments"), dict):
        made["arguments"] = orjson.dumps(made["arguments"]).decode()
    if "status" in made and not _is_status(made["status"]):
        del made["status"]
    for name in ("created_by", "caller"):
        made.pop(name, None)
    return made


def _called(call_id: Any, name: str, arguments: Any) -> Item:
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}


def _result(item: Item, call_id: Any, output: Any) -> Item:
    if output is None:
        output = ""
    elif isinstance(output, list) and all(isinstance(part, dict) and _is_part(part) for part in output):
        output = [_input_part(part) for part in output]
    elif isinstance(output, dict) and output.get("type") == "computer_screenshot" and output.get("image_url"):
        output = [{"type": "input_image", "image_url": output["image_url"], "detail": "auto"}]
    elif not isinstance(output, str):
        output = orjson.dumps(output).decode()
    return {"type": item["type"], "call_id": call_id, "output": output}


def _is_part(part: Item) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and (kind in _TEXTS or kind.startswith("input_"))


def _answered(item: Item, kind: str, left_out: list[str]) -> list[Item]:
    name, asked, answered = _ANSWERED[kind]
    result = item.get(answered)
    if result is None:
        result = item.get("error")
    call_id, called = item.get("id"), name or item.get("name")
    if result is None or not isinstance(call_id, str) or not isinstance(called, str):
        left_out.append(kind)
        return []
    given = item.get(asked)
    arguments = given if kind == "mcp_call" else {asked: given}
    return [_called(call_id, called, arguments), _result({"type": "function_call_output"}, call_id, _plain(result))]


def _plain(result: Any) -> Any:
    return result if isinstance(result, str) else orjson.dumps(result).decode()


def _is_text(item: Item, name: str) -> bool:
    return isinstance(item.get(name), str) and bool(item[name])
