"""Numbers, times and texts as people read them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

REASON_CHARACTERS = 160


def size(count_bytes: float | None) -> str:
    """Decimal units, as disks and model files are sold: 1,234,567 bytes are "1.2 MB"."""
    if count_bytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count_bytes) < 999.5 or unit == "TB":
            break
        count_bytes /= 1000
    return f"{count_bytes:.0f} {unit}" if unit == "B" or count_bytes >= 99.95 else f"{count_bytes:.1f} {unit}"


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
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    total, digits = 0.0, ""
    for char in text.strip().lower():
        if char.isascii() and (char.isdigit() or char == "."):
            digits += char
        elif char in units and digits.strip(".") and digits.count(".") <= 1:
            total, digits = total + float(digits) * units[char], ""
        else:
            return None
    return total if total and not digits else None


def moment(unix_s: float | None) -> str:
    """Local date and time."""
    return "-" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def or_dash(value: object) -> str:
    """Text for a cell; a dash for nothing and for an empty list."""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "-"
    return "-" if value is None or value == "" else str(value)


def cells(row: Mapping[str, Any], names: str) -> list[str]:
    """`or_dash` of the fields with these names. names: separated by spaces."""
    return [or_dash(row[name]) for name in names.split()]


def printable(text: object) -> str:
    """The text without control characters: a terminal shows what others wrote and must not obey it."""
    return "".join(char for char in str(text) if char.isprintable() or char in "\n\t")


def short(reason: object) -> str:
    """A reason, cut so that a table can show it; what shows one thing alone has all of it."""
    text = or_dash(reason)
    return text if len(text) <= REASON_CHARACTERS else f"{text[: REASON_CHARACTERS - 1]}…"
