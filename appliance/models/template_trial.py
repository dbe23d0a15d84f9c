"""Render an untrusted chat template with limits on CPU time and memory: `python -m appliance.models.template_trial`.

Jinja's sandbox keeps a template out of Python, but does not prevent endless loops or a string of 200 MB.
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

from runtime.processes.kernel import Bounds
from weights.checkpoint.turns import PROBES

CPU_S, MEMORY_BYTES, MAX_OUTPUT_CHARACTERS = 2, 1 << 30, 1_000_000


@dataclass(frozen=True)
class Tried:
    """A template's result. warning: its error for a plain conversation with two user turns. rendered: its probes."""

    warning: str | None = None
    rendered: Mapping[str, str | None] = field(default_factory=dict)


class _Refused(Exception):
    """The template must not be used; the text has the reason."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` of transformers, which marks assistant text: renders its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def try_here(template: str, special: Mapping[str, str]) -> dict[str, Any]:
    """Render the probes; return the fields of `Tried`, or {"refused": reason}."""
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
        tried = {name: _render(compiled, conversation, special) for name, conversation in PROBES.items()}
    except jinja2.TemplateSyntaxError as error:
        return {"refused": f"line {error.lineno}: {error.message}"}
    except _Refused as error:
        return {"refused": str(error)}
    return {"warning": tried["again"][1], "rendered": {name: text for name, (text, _) in tried.items()}}


def _render(
    compiled: jinja2.Template, conversation: dict[str, Any], special: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Return the rendered conversation and None, or None and the template's error. Raises _Refused."""
    common = {"add_generation_prompt": True, "bos_token": "", "eos_token": "", "tools": None, "documents": None}
    text = ""
    try:
        for piece in compiled.generate(**common | special | conversation):
            text += piece
            if len(text) > MAX_OUTPUT_CHARACTERS:
                raise _Refused(f"renders a short conversation to more than {MAX_OUTPUT_CHARACTERS} characters")
    except jinja2.sandbox.SecurityError as error:
        raise _Refused(f"accesses Python outside of the template: {error}") from error
    except MemoryError:
        raise _Refused(f"needs more than {MEMORY_BYTES >> 20} MB of memory for a short conversation") from None
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return None, f"the chat template fails on a plain conversation: {str(error)[:200]}"
    return text, None


def main() -> None:
    Bounds(CPU_S, MEMORY_BYTES).hold()
    print(json.dumps(try_here(**json.load(sys.stdin))))


if __name__ == "__main__":
    main()
