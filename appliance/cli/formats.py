"""Numbers, times and texts as people read them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

REASON_CHARACTERS = 160
_KEYED_BY_NAMES = frozenset("bounds hyperparameters idle jobs metadata models standby waiting".split())


def _scaled(value: float | None, unit: str) -> str:
    """In decimal units, as disks and model files are sold: 1,234,567 "B" are "1.2 MB"."""
    if value is None:
        return "-"
    prefix = ""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    return f"{value:.{0 if not prefix or value >= 99.95 else 1}f} {prefix}{unit}"


def size(count_bytes: float | None) -> str:
    return _scaled(count_bytes, "B")


def count(number: float | None) -> str:
    """1,234 or 7.2 B (parameters)."""
    if number is None:
        return "-"
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def seconds_of(text: str) -> float | None:
    """9h, 90m, 1h30m, 2d or 45s in seconds; None for anything else."""
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text, re.ASCII):
        return None
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(.)", text)) or None


def moment(unix_s: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def printable(text: object) -> str:
    """The text without control characters: a terminal shows what others wrote and must not obey it."""
    return "".join(char for char in str(text) if char.isprintable() or char in "\n\t")


def short(reason: object) -> str:
    """A reason, cut so that a table can show it; what shows one thing alone has all of it."""
    text = " ".join(by_name("", reason).split())
    return text if len(text) <= REASON_CHARACTERS else f"{text[: REASON_CHARACTERS - 1]}…"


def by_name(name: str, value: Any) -> str:
    """A value in the unit that its name ends with; of a mapping or a list each in its own."""
    if isinstance(value, dict):
        if value.keys() == {"kind", "id"}:
            return f"{value['kind']} {value['id']}"
        unit = f"_{name}" if any(name.endswith(end) for end, _ in UNITS[:-1]) else ""  # of parts that have none
        parts = {part: one for part, one in value.items() if one not in ("", [], {})}
        shown = label_of_parts(name)
        return ", ".join(f"{shown(part)} {by_name(part + unit, one)}" for part, one in parts.items()) or "-"
    if isinstance(value, list):
        sentences = any(isinstance(one, str) and " " in one for one in value)
        return ("\n" if sentences else ", ").join(by_name(name, one) for one in value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value or "-"
    return next(shown for end, shown in UNITS if name.endswith(end))(value)


def label(name: str) -> str:
    """A field's name without its unit."""
    return re.sub(r"_(bytes(/s)?|s|at|w|c)$", "", re.sub("_per_s$", "/s", name)).replace("_", " ")


def label_of_parts(name: str) -> Callable[[str], str]:
    """How the keys of this field's mapping are shown: as they are where people named them or type them."""
    return str if name in _KEYED_BY_NAMES else label


def _time(value: float) -> str:
    return moment(value) if value > 1e9 else duration(value or None)


def number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"  # g has powers of ten from 10,000 on


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


UNITS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    *(("bytes_per_s", lambda value: f"{size(value)}/s"), ("bytes", size), ("bytes_read", size), ("per_s", number)),
    *((end, _time) for end in ("_s", "seconds", "_at", "created", "finish")),
    *(("share", _percent), ("busy", _percent), ("joules", lambda value: _scaled(value, "J"))),
    *(("loss", lambda value: f"{value:.4f}"), ("_w", lambda value: f"{value:.0f} W"), ("_c", lambda c: f"{c} °C")),
    *(("seed", str), ("", number)),
)
"""How numbers are shown, by the ends of their names; the first that fits counts."""
FORMATS: dict[str, Callable[[Any], str]] = {
    "count": count,
    "names": lambda rows: ", ".join(one["name"] for one in rows),
    "short": short,
    "total": lambda rows: str(len(rows)),
    "yes": lambda value: "yes" if value else "-",
}
"""By their names in a column (appliance.cli.output)."""
