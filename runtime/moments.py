"""Writes a moment of the world's clock for people, and for names of files."""

from __future__ import annotations

import time

STAMP = "%Y-%m-%dT%H-%M-%SZ"


def minute(unix_s: float) -> str:
    """The same words on every box, wherever it stands: 2026-11-27 20:46 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def stamp(unix_s: float) -> str:
    """For the name of a file or a folder; names sort as their moments."""
    return time.strftime(STAMP, time.gmtime(unix_s))
