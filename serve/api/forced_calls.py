"""A call that a request forces has arguments of the tool's schema.

vLLM holds arguments to their schema only for tools with `strict: true`, or for all tools of all requests
(`--tool-strict-level parameter`). A small model that had to call `get_weather(city)` wrote a list of schemas. Where a
client forces the call ("required", or one function by name), the gateway has measured what the grammar costs
(appliance.gateway.payload.structure); where the model may choose, it has not, and `strict` decides as in vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.parser import abstract_parser
from vllm.tool_parsers import structural_tag_registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel


def apply() -> None:
    seen = structural_tag_registry.resolve_tool_strictness

    def resolve(tools: Any, tool_choice: Any, strict_level: ToolStrictLevel) -> Any:
        forced = tool_choice not in ("auto", "none", None)
        return seen(tools, tool_choice, ToolStrictLevel.PARAMETER if forced else strict_level)

    structural_tag_registry.resolve_tool_strictness = resolve
    abstract_parser.resolve_tool_strictness = resolve
