"""Shows tools through a chat template that does not know them.

A model whose template never mentions tools can still call them: the tools are listed in the system message, calls are
written between `<tool_call>` tags and results between `<tool_response>` tags, the form that Hermes and Qwen are trained
on (https://github.com/NousResearch/Hermes-Function-Calling). Engines and trainers read a checkpoint's template through
`with_tools`, so that a model is trained on what it is asked with. Conversations without tools render as before.

show_tools.jinja does it inside the template, because vLLM and transformers render templates in sandboxes of their own:
no method that changes a list works there, and vLLM tells by the loops over a message's content whether a template takes
text or parts.
"""

from __future__ import annotations

from importlib import resources

_SHOW_TOOLS = (resources.files(__package__) / "show_tools.jinja").read_text()


def with_tools(template: str | None) -> str | None:
    """`template`, or, if it never mentions tools, the same with a way to show them. None stays None."""
    if not template or "tool" in template:
        return template
    # A template that refuses system messages (Gemma's) gets the list in front of what the user says first.
    holder = "system" if "system" in template and "ystem role not supported" not in template else "user"
    return f"{{%- set holder = '{holder}' %}}\n{_SHOW_TOOLS}{template}"
