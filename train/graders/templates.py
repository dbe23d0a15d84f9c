"""Templates of graders, filled from the data: `{{ item.a.b }}` and `{{ sample.output_text }}` in a text.

Of Jinja's language, templates support only such paths and quoted texts: `{{ '{{' }}` becomes two braces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader

NAMESPACES = {"item", "sample"}
SAMPLE_FIELDS = ("output_text", "output_json", "output_tools", "choices")
MAX_TEXT = 1 << 20
"""The most characters of a filled template."""
_SHOWN = 200
_PLACE = re.compile(r"[0-9]{1,9}")
_QUOTED = r"""'[^'\\]*'|"[^"\\]*\""""
_STEP = re.compile(rf"\.(\w+)|\[(\d+)\]|\[({_QUOTED})\]")
_VARIABLE = re.compile(
    rf"\{{\{{\s*(?:(?P<quoted>{_QUOTED})|(?P<namespace>\w+)(?P<steps>(?:{_STEP.pattern}){{0,64}}))\s*\}}\}}"
)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

Path = tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """A model's answer: its text and its tool calls (a chat's `tool_calls`)."""

    output_text: str
    output_tools: list[Any] = field(default_factory=list)

    @classmethod
    def with_calls(cls, text: str) -> Sample:
        """Make a sample from an answer to a prompt with tools. A call is JSON between Hermes' tags, which Qwen and
        SmolLM use too, or JSON that is the whole answer, as Llama writes it. Everything else is text."""
        begin = _CALL.search(text)
        texts = _CALL.findall(text) if begin else [text]
        calls = [call for part in texts if (call := _call(part))]
        if not calls or len(calls) < len(texts):
            return cls(text)
        tools = [{"id": f"call_{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
        return cls(text[: begin.start()].strip() if begin else "", tools)

    @cached_property
    def output_json(self) -> Any:
        """The text parsed as JSON. Raises GradingFailed if it is not JSON."""
        try:
            return json.loads(self.output_text)
        except (ValueError, RecursionError) as error:
            raise GradingFailed(
                f"sample.output_json: the output is not JSON ({error})", GradingErrors(sample_parse_error=True)
            ) from None

    @property
    def choices(self) -> list[Any]:
        message = {"role": "assistant", "content": self.output_text, "tool_calls": self.output_tools or None}
        return [{"index": 0, "message": message}]

    def for_code(self) -> dict[str, Any]:
        """Return the sample for a python grader; `output_json` is None if the text is not JSON."""
        fields = dict[str, Any].fromkeys(SAMPLE_FIELDS)
        for name in fields:
            with suppress(GradingFailed):
                fields[name] = getattr(self, name)
        return fields


def _call(text: str) -> dict[str, str] | None:
    match _parsed(text):
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return None


def check(template: str, param: str = "") -> str:
    """Return the template unchanged. Raises InvalidGrader for a text that is not a template, and for a variable that
    neither items nor samples can have."""
    if "{{" in _VARIABLE.sub(" ", template):
        raise InvalidGrader(
            param,
            "cannot be read; write a variable as {{ item.a.b }}, or {{ item['a b'] }} for names with other characters, "
            "without filters, calls, escapes and expressions, and literal braces as {{ '{{' }}",
        )
    for namespace, *steps in variables(template):
        if namespace not in NAMESPACES:
            raise InvalidGrader(
                param,
                f"the variable {namespace[:_SHOWN]!r} begins with neither `item` nor `sample`: {{{{ item.answer }}}}; "
                "write literal braces as {{ '{{' }}",
            )
        if namespace == "sample" and (not steps or steps[0] not in SAMPLE_FIELDS):
            known, unknown = ", ".join(sorted(SAMPLE_FIELDS)), ".".join(steps)[:_SHOWN]
            raise InvalidGrader(param, f"the variable sample.{unknown} is not known; a sample has {known}")
    return template


def variables(template: str) -> list[Path]:
    """Return each variable of a checked template as its steps, such as ("item", "answer")."""
    return [piece for piece in _pieces(template) if isinstance(piece, tuple)]


def fill(template: str, sample: Sample, item: Any) -> str:
    """Replace the variables by their values: texts unchanged, other values as JSON. Raises GradingFailed if the data
    lacks a variable."""
    size, filled = 0, []
    for piece in _pieces(template):
        if isinstance(piece, tuple):
            filling = _value(piece, sample, item)
            piece = filling if isinstance(filling, str) else json.dumps(filling, ensure_ascii=False)
            size += len(piece)
            if size > MAX_TEXT:
                raise GradingFailed(
                    f"the text of a grader is longer than {MAX_TEXT} characters", GradingErrors(other_error=True)
                )
        filled.append(piece)
    return "".join(filled)


def value(path: str, sample: Sample, item: Any) -> Any:
    """Return the value at a checked path without braces, such as `item.a.b`. Raises GradingFailed if it is missing."""
    return _value(variables(f"{{{{{path}}}}}")[0], sample, item)


@lru_cache(maxsize=64)
def _pieces(template: str) -> tuple[str | Path, ...]:
    """Split a template into its texts and the paths of its variables."""
    pieces: list[str | Path] = []
    end = 0
    for match in _VARIABLE.finditer(template):
        pieces.append(template[end : match.start()])
        quoted, namespace, steps = match["quoted"], match["namespace"], _STEP.finditer(match["steps"] or "")
        pieces.append(quoted[1:-1] if quoted else (namespace, *(step[1] or step[2] or step[3][1:-1] for step in steps)))
        end = match.end()
    return (*pieces, template[end:])


@lru_cache(maxsize=16)  # a template may read the same text 2,000 times
def _parsed(text: str) -> Any:
    """Parse a text as JSON; if it is not JSON, return the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _value(path: Path, sample: Sample, item: Any) -> Any:
    namespace, *steps = path
    current: Any = item
    if namespace == "sample":
        current, steps = getattr(sample, steps[0]), steps[1:]
    for step in steps:
        if isinstance(current, str) and namespace == "sample":  # a call has its arguments as JSON text
            current = _parsed(current)
        if isinstance(current, Mapping) and step in current:
            current = current[step]
        elif isinstance(current, list) and _PLACE.fullmatch(step) and int(step) < len(current):
            current = current[int(step)]
        else:
            # The answer is at fault if it lacks a value, not the grader: the model has to learn to output the value.
            lacks = GradingErrors(**{"sample_parse_error" if namespace == "sample" else "invalid_variable_error": True})
            shown = ".".join(path)[:_SHOWN]
            raise GradingFailed(f"the variable {shown!r} has no value: {step[:_SHOWN]!r} is missing", lacks)
    return current
