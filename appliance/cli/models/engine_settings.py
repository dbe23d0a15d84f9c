"""The settings of a model's engines on the command line: what is sent, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.cli import formats
from appliance.cli.errors import BadUsage

ENGINE = "Its engines"
_WHOLE = ("max_model_len", "kv_cache_bytes", "max_num_seqs", "top_k", "max_tokens", "draft_tokens")
_FRACTION = ("gpu_memory", "temperature", "top_p", "min_p", "repetition_penalty")
_OPTIONS = {"draft_tokens": "--draft"}
_LONGEST_SHOWN = 60


def change(
    texts: Mapping[str, str | None], sampling: Mapping[str, str | None], arguments: Sequence[str], number: int | None
) -> dict[str, Any]:
    """The body of a change, {} if nothing changes. Raises BadUsage."""
    found: dict[str, Any] = {name: _value(name, text) for name, text in texts.items() if text is not None}
    sampled = {name: _value(name, text) for name, text in sampling.items() if text is not None}
    given = dict(_argument(text) for text in arguments)
    if sampled:
        found["sampling"] = sampled
    if given:
        found["engine_args"] = given
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
        ("tool calls", f"parser {calls}" if calls else "where required or named, not by tool_choice auto: no parser"),
        ("reasoning", f"parser {thinks}" if thinks else "none by its template"),
    ]


def _short(value: object) -> str:
    text = " ".join(formats.or_dash(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text):,} characters)"


def _value(name: str, text: str) -> Any:
    option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
    if name in ("tool_parser", "reasoning_parser"):
        return None if text == "auto" else text
    if text == "none":
        return None
    if name == "chat_template":
        try:
            return Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadUsage(f"{option} {text!r} cannot be read: {error}") from None
    if name not in _WHOLE and name not in _FRACTION:
        return text
    try:
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise BadUsage(f"{option} is {text!r}; expected {kind}, or none") from None


def _argument(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadUsage(f"--engine-arg is {text!r}; expected KEY=VALUE, for instance block-size=64")
    return name, None if value == "none" else value
