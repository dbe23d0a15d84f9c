"""Where the tools of a request have their schemas. Pure."""

from __future__ import annotations

from typing import Any, Final

SCHEMA_FIELDS: Final = ("parameters", "input_schema")


def schema_holders(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a tool may have its schema: in `function` (chat), or in itself (Responses, Anthropic)."""
    function = tool.get("function")
    return [tool, function] if isinstance(function, dict) else [tool]


def each_tool(tools: list[Any]) -> list[tuple[str, Any]]:
    """All tools with their places, those of namespaces too."""
    found: list[tuple[str, Any]] = []
    for place, tool in enumerate(tools):
        found.append((f"tools[{place}]", tool))
        if isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            found += [(f"tools[{place}].tools[{inner}]", one) for inner, one in enumerate(tool["tools"])]
    return found
