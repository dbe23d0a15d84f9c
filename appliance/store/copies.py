"""Copies of a database: made beside its writer, and kept from before each change of its schema, for the way back."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from appliance.store.errors import NoRoomForCopy
from appliance.store.readers import reading_uri
from runtime.moments import stamp

FOLDER = "before-upgrades"  # beside the database
KEPT = 3
_SPARE_BYTES = 64 << 20
_NAME = re.compile(r"schema-(\d+)-.*\.db")


@dataclass(frozen=True)
class Kept:
    """A database as it was before its schema moved on from the number `schema`."""

    path: Path
    schema: int

    @property
    def made_s(self) -> float:
        return self.path.stat().st_mtime


def copy_database(source: Path, target: Path) -> int:
    """Copies the database whole, as of one moment, beside its writer. Returns its schema's number.

    `sqlite3.Connection.backup` in one step: the writer of a WAL database goes on (https://www.sqlite.org/backup.html).
    Raises sqlite3.Error."""
    with closing(sqlite3.connect(reading_uri(source), uri=True)) as read:
        return _copied(read, target)


def keep_copy(connection: sqlite3.Connection, path: Path, schema: int) -> Path:
    """Copies the database at `path`, which `connection` is to change. Raises NoRoomForCopy, sqlite3.Error, OSError."""
    folder = path.parent / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for left in folder.glob("*.partial"):
        left.unlink()
    needed, free = path.stat().st_size + _SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoomForCopy(path, needed, free)
    kept = folder / f"schema-{schema:04d}-{stamp(time.time())}.db"
    partial = kept.with_name(f"{kept.name}.partial")
    _copied(connection, partial)
    partial.replace(kept)
    _sync(folder)
    for old in kept_copies(path)[:-KEPT]:
        old.path.unlink()
    return kept


def kept_copies(path: Path) -> list[Kept]:
    """The copies of the database at `path`, the oldest first."""
    paths = (path.parent / FOLDER).glob("*.db")
    found = [Kept(one, int(name[1])) for one in paths if (name := _NAME.fullmatch(one.name))]
    return sorted(found, key=lambda kept: (kept.made_s, kept.path.name))


def _copied(read: sqlite3.Connection, target: Path) -> int:
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(target)) as written:
        read.backup(written)
        written.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        (schema,) = written.execute("PRAGMA user_version").fetchone()
    _sync(target)
    return schema


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
