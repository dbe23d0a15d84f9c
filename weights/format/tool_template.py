"""Adds tools to a chat template that does not mention tools.

A model whose template never mentions tools can still call tools: the system message lists them, calls are between
`<tool_call>` tags and results between `<tool_response>` tags, as in the training data of Hermes and Qwen
(https://github.com/NousResearch/Hermes-Function-Calling). Engines and trainers read a checkpoint's template through
`with_tools`, so that training and serving render the same prompts. Conversations without tools render as before.

show_tools.jinja runs inside the template, because vLLM and transformers render templates in their own sandboxes:
there, methods that change a list fail, and vLLM concludes from loops over a message's content whether a template
expects text or parts.
"""

from __future__ import annotations

from importlib import resources

_SHOW_TOOLS = (resources.files(__package__) / "show_tools.jinja").read_text()


def with_tools(template: str | None) -> str | None:
    """Return `template`, extended to render tools if it never mentions tools. None stays None."""
    if not template or "tool" in template:
        return template
    # In a template that refuses system messages (Gemma's), the tools come before the first user message.
    holder = "system" if "system" in template and "ystem role not supported" not in template else "user"
    return f"{{%- set holder = '{holder}' %}}\n{_SHOW_TOOLS}{template}"
