"""Space inside the database for the day the disk is full, so that keys can still be revoked and jobs cancelled.

The space is rows of zeros. When they are deleted, only SQLite can use their pages again. The pages of a file beside the
database would go back to the volume, and whatever filled it would take them too. The write-ahead log has its full
length from the start and is overwritten from its beginning after each checkpoint, so it needs no new pages either.
Pages that stand in the log alone have no place in the file: once the disk is full no checkpoint can carry them over,
and the log grows to its end, after some 200 revoked keys.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

MIB = 2**20
WAL_BYTES = 8 * MIB
_ROW_BYTES = MIB


class Statements(Protocol):
    """What the reserve needs of its database."""

    @property
    def path(self) -> Path: ...

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor: ...


class Reserve:
    """`want_bytes` of rows. It is released when the volume is nearly full, and made again row by row when there is
    room."""

    def __init__(self, db: Statements, want_bytes: int, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs):
        self._db, self._rows, self._statvfs = db, want_bytes // _ROW_BYTES, statvfs
        self._held = self._count()
        self._busy = False

    @property
    def held_bytes(self) -> int:
        return self._held * _ROW_BYTES

    @property
    def is_released(self) -> bool:
        """Whether the disk has no room for it now."""
        return self._rows > 0 and not self._held

    @property
    def in_log_bytes(self) -> int:
        """What the file is shorter than the database: pages that stand in the log alone."""
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        return max(0, pages * page_bytes - self._db.path.stat().st_size)

    def keep(self, *, rows: int = 1) -> None:
        """Make up to `rows` of the missing rows, if the disk has room for them. Deletes rows beyond a smaller
        setting."""
        free, low = self._free()
        if self._held > self._rows:
            self._db.execute("DELETE FROM reserve WHERE seq NOT IN (SELECT seq FROM reserve LIMIT ?)", [self._rows])
            self._held = self._count()
        for _ in range(min(rows, self._rows - self._held)):
            if free < 4 * low:
                break
            self._db.execute("INSERT INTO reserve (bytes) VALUES (zeroblob(?))", [_ROW_BYTES])
            self._held, free = self._held + 1, free - 2 * _ROW_BYTES
        if self._rows and free > 4 * low:
            self._lengthen_log()

    def tend(self) -> None:
        """Call it before each write, outside a transaction: it releases the reserve if the disk is nearly full. While
        there is still some room it carries over what stands in the log alone."""
        if self._held and not self._busy:
            free, low = self._free()
            if free < 4 * low and free < low + self.carry_over(at_most=free):
                self.release()

    def carry_over(self, *, at_most: int | None = None) -> int:
        """Blocks while the log is carried over, if the file lacks pages, and no more bytes of them than that. On a full
        disk it does nothing. Returns the bytes that the file lacked."""
        self._busy = True
        try:
            missing = self.in_log_bytes
            if missing and (at_most is None or missing <= at_most):
                with suppress(sqlite3.OperationalError):
                    self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            return missing
        finally:
            self._busy = False

    def release(self) -> None:
        self._busy = True
        # Some builds of SQLite overwrite what is deleted, which takes as much again in the log for zeros.
        overwrites = self._db.execute("PRAGMA secure_delete").fetchone()[0]
        self._db.execute("PRAGMA secure_delete = OFF")
        try:
            self._db.execute("DELETE FROM reserve")
            self._held = 0
        finally:
            self._db.execute(f"PRAGMA secure_delete = {overwrites}")
            self._busy = False

    def _free(self) -> tuple[int, int]:
        now = self._statvfs(self._db.path.parent)
        return now.f_bavail * now.f_frsize, min(2 * WAL_BYTES, now.f_blocks * now.f_frsize // 40)

    def _count(self) -> int:
        return self._db.execute("SELECT count(*) FROM reserve").fetchone()[0]

    def _lengthen_log(self) -> None:
        log = self._db.path.with_name(f"{self._db.path.name}-wal")
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # nothing has been written yet
        try:
            if os.fstat(handle).st_size < WAL_BYTES:
                os.posix_fallocate(handle, 0, WAL_BYTES)
        finally:
            os.close(handle)
