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
_CHOICES: Final = frozenset({"auto", "any", "custom", "none", "tool", "function", "allowed_tools"})
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a tool that takes none: a call of it is `{}`, and ends there."""
_SAYS_NOTHING: Final = frozenset({"type", "properties", "required", "additionalProperties", "title", "description"})
_FREE: Final = (None, "auto", "none")


def tools_as_meant(route: str, data: Object, left_out: list[str]) -> None:
    """Rewrites `tools` and `tool_choice` of a body in place, and names what it leaves out. Raises HttpError 400."""
    if data.get("functions") == []:
        data.pop("functions")
        data.pop("function_call", None)
    elif route == "chat.completions" and is_legacy(data):
        try:
            data |= as_tools(data)  # `functions` stay: the answer is to have their form
        except LegacyRefused as error:
            raise errors.bad_request(str(error), param=error.param, code="invalid_value") from None
    tools = data.get("tools")
    if not isinstance(tools, list):
        return
    kept: list[Any] = []
    gone: dict[str, Any] = {}  # label -> own name
    for tool in tools:
        if not isinstance(tool, dict):
            kept.append(tool)
        elif not _is_own(route, tool):
            gone[_label(tool)] = _own_name(tool)
        elif tool.get("type") == "namespace":
            kept.append(_functions_of(tool, gone))
        elif route == "responses" and tool.get("type") == "custom":
            kept.append(tool)
        else:
            kept.append(_with_parameters(route, tool))
    choice = data.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and isinstance(kind, str):
        named = choice.get("server_label", _own_name(choice))
        if kind not in _CHOICES or (named is not None and named in gone.values() and kind != "allowed_tools"):
            raise _cannot_run("tool_choice", "`tool_choice` demands", kind)
    if gone and not kept and kind != "none":
        place = next(place for place, tool in enumerate(tools) if isinstance(tool, dict))
        raise _cannot_run(f"tools[{place}]", f"`tools[{place}]` is", next(iter(gone)))
    left_out.extend(gone)
    data["tools"] = kept
    if kind == "allowed_tools" and isinstance(choice, dict):
        _only_allowed(data, choice)
    if not data["tools"]:  # none, so nothing can be chosen
        del data["tools"]
        if kind in _FREE:
            data.pop("tool_choice", None)
            data.pop("parallel_tool_calls", None)


def _is_own(route: str, tool: Object) -> bool:
    form = tool.get("format")
    has_grammar = isinstance(form, dict) and form.get("type") != "text"
    return tool.get("type") in _OWN.get(route, (None, "function")) and not has_grammar


def _functions_of(namespace: Object, gone: dict[str, Any]) -> Object:
    inner = namespace.get("tools")
    if not isinstance(inner, list):
        return namespace
    tools = [tool for tool in inner if isinstance(tool, dict)]
    functions = [_with_parameters("responses", tool) for tool in tools if tool.get("type") == "function"]
    gone |= {f"{namespace.get('name')}.{_label(tool)}": None for tool in tools if tool.get("type") != "function"}
    return {**namespace, "tools": functions}


def _with_parameters(route: str, tool: Object) -> Object:
    """The tool with a schema that takes nothing, if it has none or its own says nothing else."""
    inner, name = tool, "input_schema" if route == "messages" else "parameters"
    if route != "responses" and isinstance(tool.get("function"), dict):
        inner = tool["function"]
    schema = inner.get(name) or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object" or schema.keys() - _SAYS_NOTHING:
        return tool
    if any(schema.get(key) for key in ("properties", "required", "additionalProperties")):
        return tool
    made = {**inner, name: _NOTHING}
    return made if inner is tool else {**tool, "function": made}


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
