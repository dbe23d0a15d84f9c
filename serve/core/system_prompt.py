"""Gives a chat template a system message of its own, for conversations that bring none."""

from __future__ import annotations


def with_system_prompt(template: str | None, prompt: str) -> str | None:
    """`template` with `prompt` in front of conversations without a system message; None stays None.

    It stands in the template because vLLM knows no such setting, and because counting tokens and every route that
    renders a conversation then agree.
    """
    if not template or not prompt:
        return template
    # A string literal of Jinja is read as Python reads its escapes.
    literal = prompt.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return (
        "{%- if messages and messages[0]['role'] not in ('system', 'developer') -%}"
        f"{{%- set messages = [{{'role': 'system', 'content': '{literal}'}}] + messages -%}}"
        "{%- endif -%}"
        f"{template}"
    )
