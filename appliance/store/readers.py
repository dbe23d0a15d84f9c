"""Connections that read beside the writer, each in a thread of its own.

In WAL mode any number of connections read while one writes, and what one of them reads is as of one moment
(https://www.sqlite.org/isolation.html). A reading begins after whatever was committed before it was asked for.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from appliance.store.errors import ReadingEnded, WriteWhileReading

LOG_BYTES, MOST_LOG_BYTES = 32 << 20, 256 << 20
"""A log begins again only when nobody reads what stands in it, so that readings without a gap between them would have
it grow until the disk is full. Where it is longer than the first, a new reading waits a moment for those at work to
end, and where it is longer than the second, until they have."""
_GAP_WAIT_S, _GAPS_EVERY_S = 0.2, 2.0
_QUIET_S, _WRITER_S, _BUSY_WRITER_S, _LOOK_S = 0.05, 0.2, 5.0, 0.005
_STEPS = 10_000
"""Steps of SQLite's virtual machine, about 0.2 ms, between two looks whether somebody still waits for what is read."""


Function = tuple[str, int, Callable[..., Any]]
"""Its name in SQL, how many arguments it takes, and what it calls."""


def reading_uri(database: Path) -> str:
    """For sqlite3.connect(…, uri=True) and ATTACH: only to be read. A folder's name may have any character."""
    return f"{database.absolute().as_uri()}?mode=ro"


class Stop:
    """Ends the reading that it is given to: at its next statement, or within the one that runs."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        self.asked = True


class Reader:
    """A connection while one thread reads through it. Raises ReadingEnded, WriteWhileReading."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        self._stop, self._defined = Stop(), 0
        connection.set_progress_handler(lambda: self._stop.asked, _STEPS)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if self._stop.asked:
            raise ReadingEnded
        try:
            cursor = self._connection.execute(sql, parameters)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_READONLY:
                raise WriteWhileReading(sql) from error
            raise
        self._cursors.add(cursor)
        return cursor

    def begin(self, stop: Stop) -> None:
        self._stop = stop
        self._connection.execute("BEGIN")

    def end(self) -> None:
        """A cursor that has more to give would keep its moment of the store, for the next reading too."""
        self._stop = Stop()
        for cursor in list(self._cursors):
            cursor.close()
        self._cursors.clear()
        self._connection.execute("ROLLBACK")

    @property
    def is_stuck(self) -> bool:
        """Whether its transaction could not be ended."""
        return self._connection.in_transaction

    def define(self, functions: list[Function]) -> None:
        """Those that it does not have."""
        for name, arguments, function in functions[self._defined :]:
            self._connection.create_function(name, arguments, function)
        self._defined = len(functions)

    def close(self) -> None:
        self._connection.close()


class Readers:
    """As many connections as ever read at once. timeout_s: that a reading waits for a lock, which it hardly ever has
    to. disk_is_short: whether the log has to do with the length that it has. writes: whether a transaction is open."""

    def __init__(self, path: Path, timeout_s: float, disk_is_short: Callable[[], bool], writes: Callable[[], bool]):
        self._path, self._timeout_s, self._disk_is_short, self._writes = path, timeout_s, disk_is_short, writes
        self._log = path.with_name(f"{path.name}-wal")
        self._functions: list[Function] = []
        self._changed = threading.Condition()
        self._idle: list[Reader] = []
        self._at_work: set[Stop] = set()
        self._shortening, self._closed = False, False
        self._next_gap_s, self._log_after_gap = 0.0, (0, 0)
        self._thread = threading.local()

    @property
    def here(self) -> Reader | None:
        """The connection through which this thread reads now."""
        return getattr(self._thread, "reader", None)

    def define(self, name: str, arguments: int, function: Callable[..., Any]) -> None:
        """Defines it for each reading that begins from now on."""
        with self._changed:
            self._functions.append((name, arguments, function))

    @contextmanager
    def reading(self, stop: Stop | None = None) -> Iterator[None]:
        """What this thread reads within is as of one moment, and through a connection that cannot write.

        Raises ReadingEnded when `stop` is asked, or the readers are closed."""
        assert self.here is None, "a reading within a reading"
        stop = stop or Stop()
        reader = self._take(stop)
        try:
            reader.begin(stop)
            self._thread.reader = reader
            try:
                yield
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                    raise ReadingEnded from error
                raise
            finally:
                self._thread.reader = None
                reader.end()
        finally:
            self._give(reader, stop)

    def close(self, within_s: float) -> bool:
        """Ends what is read. False: not all of it had ended in time; the rest closes its connections when it has."""
        with self._changed:
            self._closed = True
            for stop in self._at_work:
                stop.ask()
            for reader in self._idle:
                reader.close()
            self._idle.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._at_work, within_s)

    def _take(self, stop: Stop) -> Reader:
        with self._changed:
            self._changed.wait_for(lambda: not self._shortening)
            if time.monotonic() >= self._next_gap_s:
                length, _ = state = self._log_state()
                if length > (0 if self._disk_is_short() else LOG_BYTES) and state != self._log_after_gap:
                    self._make_gap(length > MOST_LOG_BYTES)
            if self._closed or stop.asked:
                raise ReadingEnded
            reader = self._idle.pop() if self._idle else self._open()
            reader.define(self._functions)
            self._at_work.add(stop)
            return reader

    def _make_gap(self, at_all_costs: bool) -> None:
        """Carries the log over while nobody reads, so that the writer begins it again. It never holds the writer up."""
        self._shortening = True
        begun = self._log_begun()
        try:
            wait_s = None if at_all_costs else _GAP_WAIT_S
            if self._changed.wait_for(lambda: not self._at_work, wait_s) and not self._closed:
                self.carry_over()
                self._await_writer(begun, _BUSY_WRITER_S if at_all_costs else _WRITER_S)
        finally:
            self._shortening = False
            self._next_gap_s, self._log_after_gap = time.monotonic() + _GAPS_EVERY_S, self._log_state()
            self._changed.notify_all()

    def _await_writer(self, begun: bytes, most_s: float) -> None:
        """Returns once the log, which began with `begun`, has been begun again, or nobody writes.

        A writer that is at it carries the rest over itself after its commit, while nobody reads, and begins the log
        again with its next transaction. When readers went on after 50 ms, one whose transactions or whose disk took
        longer never came to it, and the log grew by 60 MB a second."""
        now_s = time.monotonic()
        until_s, quiet_s, state = now_s + most_s, now_s + _QUIET_S, self._log_state()
        while not self._closed and now_s < until_s and self._log_begun() == begun:
            if self._writes() or self._log_state() != state:
                quiet_s, state = now_s + _QUIET_S, self._log_state()
            elif now_s >= quiet_s:
                return
            self._changed.wait_for(lambda: self._closed, _LOOK_S)
            now_s = time.monotonic()

    def carry_over(self) -> None:
        """Carries over the part of the log that no reading keeps. It never holds the writer up."""
        # On a full disk the writer says so; readers need no room.
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(self._path, isolation_level=None, timeout=self._timeout_s)) as connection,
        ):
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _give(self, reader: Reader, stop: Stop) -> None:
        with self._changed:
            self._at_work.discard(stop)
            if self._closed or reader.is_stuck:
                reader.close()
            else:
                self._idle.append(reader)
            self._changed.notify_all()

    def _open(self) -> Reader:
        connection = sqlite3.connect(
            reading_uri(self._path), uri=True, isolation_level=None, timeout=self._timeout_s, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA query_only = ON")
        return Reader(connection)

    def _log_begun(self) -> bytes:
        """What is another each time that the log is begun (https://www.sqlite.org/fileformat2.html#walformat)."""
        try:
            with open(self._log, "rb", buffering=0) as log:
                return log.read(24)[16:]
        except FileNotFoundError:
            return b""

    def _log_state(self) -> tuple[int, int]:
        """(bytes, time of the last write in ns)."""
        try:
            found = os.stat(self._log)
        except FileNotFoundError:
            return 0, 0  # nothing has been written yet
        return found.st_size, found.st_mtime_ns
