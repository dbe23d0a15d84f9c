"""The settings of a model's engines on the command line: what is sent, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats
from appliance.cli.errors import BadUsage

_LONGEST_SHOWN = 60

# By name in the request: how its option calls a value, what it says, and the value's type.
_SETTINGS: dict[str, tuple[str, str | None, type]] = {
    "max_model_len": ("TOKENS|none", None, int),
    "dtype": ("TYPE|none", "bfloat16, float16 or float32.", str),
    "kv_cache_dtype": ("TYPE|none", "auto, fp8, ...", str),
    "kv_cache_bytes": ("BYTES|none", "Per device.", int),
    "gpu_memory": ("FRACTION|none", "Of a GPU, for one engine.", float),
    "max_num_seqs": ("N|none", "Requests at once.", int),
    "tool_parser": ("NAME|auto|none", "vLLM's name; auto: by the model's family.", str),
    "reasoning_parser": ("NAME|auto|none", "As --tool-parser.", str),
    "chat_template": ("FILE|none", "A Jinja file.", str),
    "system_prompt": ("TEXT|none", "For conversations that bring none.", str),
    "draft_tokens": ("N|none", "Tokens guessed from the prompt and checked together.", int),
}
_SAMPLING: dict[str, tuple[str, str | None, type]] = {
    "temperature": ("X|none", "Of requests that name none; as the next five.", float),
    "top_p": ("X|none", None, float),
    "top_k": ("N|none", None, int),
    "min_p": ("X|none", None, float),
    "repetition_penalty": ("X|none", None, float),
    "max_tokens": ("N|none", None, int),
}


def _flag(name: str) -> str:
    return "--draft" if name == "draft_tokens" else "--" + name.replace("_", "-")


def _option(of_type: Any, flag: str, metavar: str, text: str | None, least: int | None = None) -> Any:
    return Annotated[
        of_type | None, typer.Option(flag, metavar=metavar, help=text, min=least, rich_help_panel="Its engines")
    ]


OPTIONS: dict[str, Any] = {
    **{name: _option(str, _flag(name), row[0], row[1]) for name, row in (_SETTINGS | _SAMPLING).items()},
    "engine_arg": _option(list[str], "--engine-arg", "KEY=VALUE|KEY=none", "One of vLLM's arguments; may be repeated."),
    "number": _option(int, "--settings", "N", "Go back to settings number N; 0: to none.", 0),
}
"""The options of a change, by their names in `change`."""


def change(engine_arg: list[str] | None = None, number: int | None = None, **texts: str | None) -> dict[str, Any]:
    """The body of a change, {} if nothing changes. Raises BadUsage."""
    values = {name: _value(name, text) for name, text in texts.items() if text is not None}
    found = {name: value for name, value in values.items() if name in _SETTINGS}
    if sampled := {name: value for name, value in values.items() if name in _SAMPLING}:
        found["sampling"] = sampled
    if engine_arg:
        found["engine_args"] = dict(_argument(text) for text in engine_arg)
    if number is not None and found:
        raise BadUsage("--settings takes over earlier settings as a whole; give the others in a command of their own")
    return {"number": number} if number is not None else {"set": found} if found else {}


def fields(settings: Mapping[str, Any], number: int) -> list[tuple[str, str]]:
    """Lines of name and value."""
    if not settings:
        return []
    flat = {**settings, **settings.get("sampling", {}), **settings.get("engine_args", {})}
    shown = [(name, value) for name, value in flat.items() if name not in ("sampling", "engine_args")]
    return [
        ("settings", f"number {number}"),
        *((f"  {name.replace('_', ' ')}", _short(value)) for name, value in shown),
    ]


def parsers(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which of vLLM's parsers the model's family and chat template ask for; settings may name others. Nothing of models
    that came in before this was noted, or that do not chat."""
    if not info.get("chat_template") or "tool_parser" not in info:
        return []
    calls, thinks = info["tool_parser"], info["reasoning_parser"]
    return [
        *([("chat template", _template(told))] if (told := info.get("template")) else []),
        ("tool calls", f"parser {calls}" if calls else "where required or named, not by tool_choice auto: no parser"),
        ("reasoning", f"parser {thinks}" if thinks else "none by its template"),
    ]


def _template(told: Mapping[str, Any]) -> str:
    """What the template does with each part of a conversation, and where it ends a turn of the model."""
    parts = (f"{part} {told[part]}" for part in ("system", "tools", "calls", "results"))
    return ", ".join([*parts, *([f"turns end with {' or '.join(told['ends'])}"] if told["ends"] else [])])


def _short(value: object) -> str:
    text = " ".join(formats.or_dash(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text):,} characters)"


def _value(name: str, text: str) -> Any:
    if name in ("tool_parser", "reasoning_parser"):
        return None if text == "auto" else text
    if text == "none":
        return None
    if name == "chat_template":
        try:
            return Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadUsage(f"--chat-template {text!r} cannot be read: {error}") from None
    _, _, of_type = (_SETTINGS | _SAMPLING)[name]
    try:
        return of_type(text)
    except ValueError:
        kind = "a whole number" if of_type is int else "a number"
        raise BadUsage(f"{_flag(name)} is {text!r}; expected {kind}, or none") from None


def _argument(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadUsage(f"--engine-arg is {text!r}; expected KEY=VALUE, for instance block-size=64")
    return name, None if value == "none" else value
