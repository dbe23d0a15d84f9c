"""Tries a foreign chat template in a process that can be killed.

Jinja's sandbox keeps a template from reaching Python, but not from looping three thousand times three thousand or from
padding a string to 200 MB. The trial has limits of CPU seconds and memory; it accepts a template that stays within them
for a short conversation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from appliance.models.errors import TemplateRefused
from appliance.models.trial_process import TrialFailed, TrialProcess
from runtime.processes.bounds import Bounds
from weights.checkpoint.turns import PROBES

CPU_S, WALL_S, MEMORY_BYTES = 2, 30.0, 1 << 30
MAX_TEMPLATE_CHARACTERS, MAX_OUTPUT_CHARACTERS = 200_000, 1_000_000
CONVERSATION = (
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello, how can I help?"},
    {"role": "user", "content": "What is 2 + 3?"},
)
_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
# What a request may have, by what a template may tell apart: one that was quick with three messages and endless with
# eight took its engine off the air for everybody.
OTHERS: tuple[dict[str, Any], ...] = (
    {"messages": CONVERSATION[:1]},
    {"messages": ({"role": "system", "content": "Be brief."}, *CONVERSATION)},
    *({"messages": (*CONVERSATION[:2] * turns, CONVERSATION[0])} for turns in (2, 4, 8, 16, 64, 256)),
    {"messages": ({"role": "user", "content": "word " * 4000},)},
    {"messages": CONVERSATION, "tools": [_TOOL]},
    {"messages": CONVERSATION, "tools": [_TOOL] * 16},
    {
        "messages": (
            CONVERSATION[2],
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "call00000"},
        ),
        "tools": [_TOOL],
    },
    {"messages": CONVERSATION, "documents": [{"title": "a", "text": "b"}] * 4},
    {"messages": CONVERSATION, "add_generation_prompt": False},
    {"messages": CONVERSATION, "enable_thinking": False},
)


_MOST_SHOWN = 100_000


@dataclass(frozen=True)
class Tried:
    """warning: that the template raised an error for a plain conversation of two users' turns. rendered: the probes."""

    warning: str | None = None
    rendered: Mapping[str, str | None] = field(default_factory=dict)


def try_template(template: str, special: Mapping[str, str] | None = None) -> Tried:
    """Renders `template` in a child process. special: the texts of `bos_token`, `eos_token` and the like.

    Raises TemplateRefused if it does not compile, or exceeds time, memory or output limits.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateRefused(
            "chat template", f"{len(template)} characters long; at most {MAX_TEMPLATE_CHARACTERS} are accepted"
        )
    given = json.dumps({"template": template, "special": dict(special or {})})
    try:
        with TrialProcess("chat template", "appliance.models.template_trial") as trial:
            verdict = trial.result(given, limit_s=WALL_S)
    except TrialFailed as error:
        raise TemplateRefused(
            "chat template",
            f"rendering {1 + len(OTHERS)} short conversations took more than {CPU_S} s of CPU or "
            f"{MEMORY_BYTES >> 20} MB of memory",
        ) from error
    if verdict["kind"] == "refused":
        raise TemplateRefused("chat template", verdict["reason"])
    return Tried(verdict["reason"] if verdict["kind"] == "warning" else None, verdict["rendered"])


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` of transformers: marks assistant text, renders what it encloses."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _render(template: str, special: Mapping[str, str]) -> dict[str, Any]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda form: "2026-01-01"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "refused", "reason": f"line {error.lineno}: {error.message}"}
    verdict = _one(compiled, {"messages": CONVERSATION}, special)
    for given in OTHERS if verdict["kind"] != "refused" else ():
        other = _one(compiled, given, special)
        if other["kind"] == "refused":
            return other
    rendered = {}
    for name, given in PROBES.items() if verdict["kind"] != "refused" else ():
        probe = _one(compiled, given, special)
        rendered[name] = str(probe["text"])[:_MOST_SHOWN] if probe["kind"] == "fine" else None
    return {**verdict, "text": None, "rendered": rendered}


def _one(compiled: jinja2.Template, given: dict[str, Any], special: Mapping[str, str]) -> dict[str, str | None]:
    """One conversation; that a template raises an error is no more than a warning."""
    common = {"add_generation_prompt": True, "bos_token": "", "eos_token": "", "tools": None, "documents": None}
    try:
        length, pieces = 0, []
        for piece in compiled.generate(**common | special | given):
            length += len(piece)
            pieces.append(piece)
            if length > MAX_OUTPUT_CHARACTERS:
                return {"kind": "refused", "reason": f"makes more than {MAX_OUTPUT_CHARACTERS} characters of 20,000"}
    except jinja2.sandbox.SecurityError as error:
        return {"kind": "refused", "reason": f"reaches outside of the template: {error}"}
    except MemoryError:
        return {"kind": "refused", "reason": f"needs more than {MEMORY_BYTES >> 20} MB of memory for three messages"}
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return {"kind": "warning", "reason": f"the chat template fails on a plain conversation: {str(error)[:200]}"}
    return {"kind": "fine", "reason": None, "text": "".join(pieces)}


def main() -> None:
    Bounds(CPU_S, MEMORY_BYTES).hold()
    print(json.dumps(_render(**json.load(sys.stdin))))


if __name__ == "__main__":
    main()
