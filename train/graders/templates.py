"""Templates of graders: `{{ item.a.b }}` and `{{ sample.output_text }}` in a text, filled from the data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader

NAMESPACES = {"item", "sample"}
SAMPLE_FIELDS = {"output_text", "output_json", "output_tools", "choices"}
MAX_TEXT = 1 << 20
"""Characters of what a template becomes."""
_SHOWN = 200
_PLACE = re.compile(r"[0-9]{1,9}")
_NAME = r"""[^\s.\[\]{}'"|(),:;=<>!?~+*/%^&`\\]+"""
_STEP = rf"""\s*(?:\.\s*({_NAME})|\[\s*(?:(\d+)|'([^']*)'|"([^"]*)")\s*\])"""
_PATH = re.compile(rf"\s*({_NAME})((?:{_STEP})*)\s*")
_BRACES = ("'{{'", '"{{"')
"""Two literal braces, as Jinja writes them: `{{ '{{' }}`."""
_UNENDED = re.compile(r"\{\{\s*(?:item|sample)\s*[.\[]")
# Linear in the text: a beginning ends at the next brace, unless it is the text of two literal ones.
_VARIABLE = re.compile(r"""(\{\{\s*(?:'\{\{'|"\{\{")\s*\}\}|\{\{[^{}]*\}\})""")


@dataclass(frozen=True)
class Sample:
    """An answer of a model: its text, and the calls of tools that it made (chat's `tool_calls`)."""

    output_text: str
    output_tools: list[Any] = field(default_factory=list)

    @cached_property
    def output_json(self) -> Any:
        """Raises GradingFailed when the text is not JSON."""
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
        """What a python grader gets; `output_json` is None when the text is not JSON."""
        try:
            parsed = self.output_json
        except GradingFailed:
            parsed = None
        return {
            "output_text": self.output_text,
            "output_json": parsed,
            "output_tools": self.output_tools,
            "choices": self.choices,
        }


def check(template: str, param: str) -> None:
    """Raises InvalidGrader for a variable that no item or sample can have."""
    for text, path in _pieces(template):
        if path is None:
            if _UNENDED.search(text):
                raise InvalidGrader(param, "begins a variable with '{{' and does not end it with '}}'")
            continue
        steps = _steps(path, param)
        if steps[0] not in NAMESPACES:
            raise InvalidGrader(
                param,
                f"the variable {_shown(path)} begins with neither `item` nor `sample`: {{{{ item.answer }}}}; "
                "braces that are to stay are written {{ '{{' }}",
            )
        if steps[0] == "sample" and (len(steps) < 2 or steps[1] not in SAMPLE_FIELDS):
            raise InvalidGrader(
                param, f"the variable {_shown(path)} is not known; a sample has {', '.join(sorted(SAMPLE_FIELDS))}"
            )


def variables(template: str) -> Iterator[list[str]]:
    """The steps of each variable of a template that `check` has taken: `item`, `answer`."""
    yield from (_steps(path, "") for _, path in _pieces(template) if path is not None)


def fill(template: str, sample: Sample, item: Any) -> str:
    """The text with its variables filled in: texts as they are, all else as JSON. Raises GradingFailed when the data
    lacks one."""
    size, filled = 0, []
    for text, path in _pieces(template):
        filled.append(text)
        if path is not None:
            filled.append(found := _text(value(path, sample, item)))
            size += len(found)
            if size > MAX_TEXT:
                raise GradingFailed(
                    f"the text of a grader is longer than {MAX_TEXT} characters", GradingErrors(other_error=True)
                )
    return "".join(filled)


def _pieces(template: str) -> Iterator[tuple[str, str | None]]:
    """Its texts, each with the variable that follows it between `{{` and `}}`; literal braces are a text."""
    parts = _VARIABLE.split(template)
    for place in range(0, len(parts), 2):
        path = parts[place + 1][2:-2] if place + 1 < len(parts) else None
        literal = path is not None and path.strip() in _BRACES
        yield parts[place] + ("{{" if literal else ""), None if literal else path


@lru_cache(maxsize=16)  # a template may ask 2,000 times
def _parsed(text: str) -> Any:
    """The value of a text of the answer if it is JSON, otherwise the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _shown(path: str) -> str:
    return repr(f"{{{{{path[:_SHOWN]}}}}}")


def value(path: str, sample: Sample, item: Any) -> Any:
    """The value at `item.a.b`. Raises GradingFailed if it is missing, InvalidGrader for what is not a path."""
    namespace, *steps = _steps(path, "")
    found: Any = item
    if namespace == "sample":
        found, steps = getattr(sample, steps[0]), steps[1:]
    for step in steps:
        if isinstance(found, str) and namespace == "sample":  # a call of a tool has its arguments as JSON
            found = _parsed(found)
        if isinstance(found, Mapping) and step in found:
            found = found[step]
        elif isinstance(found, list) and _PLACE.fullmatch(step) and int(step) < len(found):
            found = found[int(step)]
        else:
            # If an answer lacks it, the answer is at fault, not the grader, and a model has to learn to avoid that.
            lacks = GradingErrors(**{"sample_parse_error" if namespace == "sample" else "invalid_variable_error": True})
            raise GradingFailed(f"the variable {_shown(path)} has no value: {step[:_SHOWN]!r} is not there", lacks)
    return found


def _steps(path: str, param: str) -> list[str]:
    if (match := _PATH.fullmatch(path)) is None:
        raise InvalidGrader(
            param,
            f"the variable {_shown(path)} cannot be read: write it as {{{{ item.a.b }}}}, or {{{{ item['a b'] }}}} for "
            "a name with other signs; filters, calls and expressions are not taken, and braces that are to stay are "
            "written {{ '{{' }}",
        )
    return [match[1], *("".join(names) for names in re.findall(_STEP, match[2]))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
