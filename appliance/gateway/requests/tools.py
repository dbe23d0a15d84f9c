"""Tools and `tool_choice` as engines read them: those that only their maker's own server runs are left out. Pure.

An engine runs functions, and under /v1/responses those of namespaces and free-form custom tools. Others (a search on
the web, a sandbox, a tool of a grammar) are left out and named, where functions remain.
"""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from weights.format.legacy_functions import LegacyRefused, as_tools, is_legacy

Object = dict[str, Any]

_OWN: Final = {"responses": ("function", "namespace", "custom"), "messages": (None, "custom")}
"""Types of tools that engines take, by route."""
_CHOICES: Final = ("auto", "any", "custom", "none", "tool", "function", "allowed_tools")
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a tool that takes none: a call of it is `{}`, and ends there."""
_SAYS_NOTHING: Final = frozenset({"type", "properties", "required", "additionalProperties", "title", "description"})


def tools_as_meant(route: str, data: Object) -> list[str]:
    """Rewrites `tools` and `tool_choice` of a body in place. Returns the names of tools that are left out. Raises
    HttpError 400."""
    if data.get("functions") == []:
        data.pop("functions")
        data.pop("function_call", None)
    elif route == "chat.completions" and is_legacy(data):
        try:
            data |= as_tools(data)  # `functions` stay: the answer is to have their form
        except LegacyRefused as error:
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
