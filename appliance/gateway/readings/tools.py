"""Tools and `tool_choice`: leaves out tools that only their maker's own server runs, where functions remain. Pure.

An engine runs functions (of namespaces too), and under /v1/responses free-form custom tools. Other tools (a
search on the web, a sandbox, a tool of a grammar) are left out and named; the client's own go on working.
"""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

Object = dict[str, Any]

RESPONSES: Final = "responses"
MESSAGES: Final = "messages"
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Arguments of a tool that takes none: a call of it is `{}`, and ends there."""
_NO_ARGUMENTS: Final = frozenset({"type", "properties", "required", "additionalProperties", "title", "description"})
_FREE: Final = ("auto", "none")
_CHOICES: Final = frozenset({"auto", "any", "custom", "none", "tool"})
_SHOWN: Final = 64


def tools_as_meant(route: str, data: Object, left_out: list[str]) -> None:
    """Rewrites `tools` and `tool_choice` of a body in place, and names what it leaves out. Raises HttpError 400."""
    functions = data.get("functions")
    if functions == []:
        for name in ("functions", "function_call"):
            data.pop(name, None)
    elif isinstance(functions, list):
        data["functions"] = [_with_arguments(one, "parameters") if isinstance(one, dict) else one for one in functions]
    tools = data.get("tools")
    if not isinstance(tools, list):
        return
    if tools == []:
        _without_tools(data)
        return
    kept: list[Any] = []
    gone: dict[str, int] = {}
    for place, tool in enumerate(tools):
        made, names = _kept(route, tool)
        if made is not None:
            kept.append(made)
        for name in names:
            gone.setdefault(name, place)
    choice = data.get("tool_choice")
    _check_choice(choice, gone)
    if gone:
        if not kept and not _is_none(choice):
            name, place = next(iter(gone.items()))
            raise _cannot_run(name, place)
        left_out.extend(gone)
    data["tools"] = kept
    if not kept:
        _without_tools(data)
    elif (allowed := _allowed(choice)) is not None:
        _only_allowed(data, tools, *allowed)


def _without_tools(data: Object) -> None:
    """An empty list of tools is none, and nothing can be chosen from it."""
    del data["tools"]
    choice = data.get("tool_choice")
    if choice is None or choice in _FREE or (isinstance(choice, dict) and choice.get("type") in _FREE):
        data.pop("tool_choice", None)
        data.pop("parallel_tool_calls", None)


def _kept(route: str, tool: Any) -> tuple[Any, list[str]]:
    """The tool as an engine reads it, or None; and names of what is left out of it. A tool of the wrong type stays as
    it is: the check that follows says what is wrong with it."""
    if not isinstance(tool, dict):
        return tool, []
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        return tool, []
    if route == MESSAGES:
        if kind in (None, "custom"):
            return _with_arguments(tool, "input_schema"), []
    elif kind == "function" or (kind is None and route != RESPONSES):
        function = tool.get("function")
        if route != RESPONSES and isinstance(function, dict):
            made = _with_arguments(function, "parameters")
            return (tool if made is function else {**tool, "function": made}), []
        return _with_arguments(tool, "parameters"), []
    elif kind is None:
        return tool, []
    elif route == RESPONSES and kind == "namespace":
        return _namespace(tool)
    elif route == RESPONSES and kind == "custom" and not _has_grammar(tool):
        return tool, []
    return None, [_name(tool)]


def _namespace(tool: Object) -> tuple[Any, list[str]]:
    inner = tool.get("tools")
    if not isinstance(inner, list):
        return tool, []
    kept, names = [], []
    for one in inner:
        if isinstance(one, dict) and one.get("type") == "function":
            kept.append(_with_arguments(one, "parameters"))
        else:
            names.append(f"{tool.get('name')}.{_name(one) if isinstance(one, dict) else 'tool'}")
    return ({**tool, "tools": kept} if kept else None), names or ([] if kept else [_name(tool)])


def _has_grammar(tool: Object) -> bool:
    form = tool.get("format")
    return isinstance(form, dict) and form.get("type") != "text"


def _with_arguments(tool: Object, field: str) -> Object:
    """The same with a schema that says that it takes nothing, if its own says nothing else."""
    schema = tool.get(field)
    if schema is None or (isinstance(schema, dict) and _takes_nothing(schema)):
        return {**tool, field: _NOTHING}
    return tool


def _takes_nothing(schema: Object) -> bool:
    return (
        schema.get("type", "object") == "object"
        and not schema.get("properties")
        and not schema.get("required")
        and not schema.get("additionalProperties")
        and not schema.keys() - _NO_ARGUMENTS
    )


def _name(tool: Object) -> str:
    """Its type, with its own name where it has one: `custom:apply_patch`."""
    own = tool.get("name") or tool.get("server_label")
    if own is None and isinstance(tool.get("custom"), dict):
        own = tool["custom"].get("name")
    kind = str(tool.get("type"))[:_SHOWN]
    return f"{kind}:{str(own)[:_SHOWN]}" if isinstance(own, str) and own != kind else kind


def _is_none(choice: Any) -> bool:
    return choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")


def _check_choice(choice: Any, gone: dict[str, int]) -> None:
    """Raises HttpError 400 if the choice demands a tool that no engine runs."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str) or kind in ("function", "allowed_tools"):
        return
    inner = choice.get("custom")
    wanted = inner.get("name") if isinstance(inner, dict) else choice.get("server_label") or choice.get("name")
    for name, place in gone.items():
        own_kind, _, own = name.partition(":")
        if kind in (own_kind, "tool") and (wanted is None or wanted in (own, own_kind)):
            raise _cannot_run(name, place, chosen=True)
    if kind not in _CHOICES:
        raise _cannot_run(kind[:_SHOWN], 0, chosen=True)


def _allowed(choice: Any) -> tuple[Any, list[Any]] | None:
    """The mode and the tools of a choice of the type `allowed_tools`."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    inner = choice.get("allowed_tools", choice)
    tools = inner.get("tools") if isinstance(inner, dict) else None
    return (inner.get("mode", "auto"), tools) if isinstance(tools, list) else None


def _only_allowed(data: Object, given: list[Any], mode: Any, allowed: list[Any]) -> None:
    """The model sees the allowed tools alone. given: with those that are left out. Raises HttpError 400 for a name that
    is not among them."""
    names = [_own_name(one) for one in allowed if isinstance(one, dict)]
    known = [_own_name(tool) for tool in given if isinstance(tool, dict)]
    missing = [name for name in names if name not in known]
    kept = [tool for tool in data["tools"] if isinstance(tool, dict) and _own_name(tool) in names]
    if missing or not kept or mode not in ("auto", "required"):
        shown = f"'{str(missing[0])[:_SHOWN]}' is not in `tools`" if missing else "none of these tools is run here"
        raise errors.bad_request(
            f"Invalid value for `tool_choice`: {shown}, expected a mode ('auto' or 'required') and tools of `tools`.",
            param="tool_choice",
            code="invalid_value",
        )
    data["tools"], data["tool_choice"] = kept, mode


def _own_name(tool: Object) -> Any:
    inner = tool.get("function") or tool.get("custom")
    return inner.get("name") if isinstance(inner, dict) else tool.get("name")


def _cannot_run(name: str, place: int, *, chosen: bool = False) -> HttpError:
    where = "tool_choice" if chosen else f"tools[{place}]"
    asks = "`tool_choice` demands" if chosen else f"`tools[{place}]` is"
    return errors.bad_request(
        f"{asks} the tool '{name}', which only its maker's own server runs. This server calls functions that your "
        "program runs: turn this tool off in your client's settings, or add a function.",
        param=where,
        code="unsupported_tool",
    )
