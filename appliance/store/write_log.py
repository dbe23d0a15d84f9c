"""Empties the log of a database that is written in WAL mode.

What is deleted there stands in the log until later writes go over it, whatever is overwritten in the database itself:
of a person who was forgotten, a quarter of an hour of their texts.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

_TRY_S, _AGAIN_S = 0.02, 0.1


def emptied(path: Path, within_s: float) -> bool:
    """Carries the log of the database at `path` over and cuts it to nothing, beside its writer and readers; the writer
    waits for `_TRY_S` at a time. Blocks. False: somebody read what stands in it all the time, or the disk is full."""
    until_s = time.monotonic() + within_s
    with closing(sqlite3.connect(path, isolation_level=None, timeout=_TRY_S)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        while not _cut(connection):
            if time.monotonic() > until_s:
                return False
            time.sleep(_AGAIN_S)
    return True


def _cut(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # most of it without holding anybody up
        (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:
        return False
    return not is_busy
