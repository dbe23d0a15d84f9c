"""SQLite with the durability the box promises: what was acknowledged survives kill -9.

WAL with synchronous=FULL syncs the log at every commit (https://www.sqlite.org/wal.html). All writers live on one
thread of one process, so there is no lock to wait for; `busy_timeout` is for a backup tool that reads meanwhile. What
reads much does so on a thread of its own (`read`), through a connection of its own, and the writer's thread is free.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar

import orjson

from appliance.store.errors import (
    DatabaseUnusable,
    NoRoomForCopy,
    OpenedByParent,
    SchemaTooNew,
    UnknownCursor,
    WriteWhileReading,
)
from appliance.store.migrator import migrate
from appliance.store.readers import Readers
from appliance.store.reading_threads import ReadingThreads
from appliance.store.reserve import WAL_BYTES, Reserve

P = ParamSpec("P")
T = TypeVar("T")
Row = TypeVar("Row")
BUSY_TIMEOUT_MS = 5000
_CLOSE_S = 5.0
_LOG_PAGES = 1000
"""SQLite's own number: a commit that makes the log longer carries it over."""
BOX = "(the box)"
"""The name under which the box's own work reads, which is no owner's name, so that no owner waits for it."""
PAGE_BYTES = 2 * 2**20
"""Text of the rows of one page. The reader of a page waits for all of it."""
PAGE_ROWS = 500
PAGE_WEIGHT = 1 << 16
"""The weight of the JSON in the rows of one page: a list or object counts as 12, a string as 4, any other value as
1."""


@dataclasses.dataclass(frozen=True)
class Page(Generic[Row]):
    """One page of a list. `has_more` says whether more rows follow in the same order."""

    data: list[Row]
    has_more: bool


class Part(TypedDict, total=False):
    """Which part of a list, as `Database.page` takes it."""

    after: str | None
    limit: int
    descending: bool


class PageBudget:
    """What one page may still take: bytes of text, and weight of the JSON among it."""

    def __init__(self) -> None:
        self._bytes, self._weight = PAGE_BYTES, PAGE_WEIGHT

    def take(self, texts: Iterable[str], written: Iterable[str | None]) -> bool:
        """Whether there was enough. written: those that are JSON."""
        self._bytes -= sum(map(len, texts))
        self._weight -= sum(map(_weight, written))
        return self._bytes >= 0 and self._weight >= 0


@dataclasses.dataclass
class Changes:
    """How many rows were changed and kept; those of a transaction that was rolled back are not counted."""

    rows: int = 0


_COLUMNS: dict[Any, tuple[tuple[str, bool], ...]] = {}
_CHANGES: ContextVar[Changes | None] = ContextVar("changes", default=None)


@contextmanager
def counting_changes() -> Iterator[Changes]:
    """Counts the rows that the current task changes, and not those that other tasks change while it waits."""
    changes = Changes()
    token = _CHANGES.set(changes)
    try:
        yield changes
    finally:
        _CHANGES.reset(token)


def sql_list(words: Iterable[str]) -> str:
    """Words of the code itself, never of a request, for `IN (...)`."""
    return ", ".join(f"'{word}'" for word in words)


def json_column(*, of_a_body: bool = False, **kwargs: Any) -> Any:
    """A dataclass field that is stored as JSON text (NULL stays None). of_a_body: it is of a request's body and may be
    as long, so that it is stored as it came: with \\u00e9 for é three times as much was written."""
    return dataclasses.field(metadata={"json": True, "of_a_body": of_a_body}, **kwargs)


class Database:
    """A connection, its transactions, and the mapping between rows and dataclasses.

    It writes on the opener's thread alone. Within `reading`, on any thread, the same methods read through a connection
    of that thread's. Elsewhere sqlite3 raises ProgrammingError, and in a forked child all raise OpenedByParent.
    """

    def __init__(self, path: Path):
        """Open or create `path` (mode 0600) and bring its schema up to date.

        Raises DatabaseUnusable, SchemaTooNew, NoRoomForCopy.
        """
        self.path = path
        self._depth = 0
        self._thread = threading.get_ident()
        self.reserve: Reserve | None = None
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
        except (OSError, sqlite3.Error) as error:
            raise DatabaseUnusable(path, str(error)) from error
        try:
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            self._connection.execute("PRAGMA synchronous = FULL")
            # Builds of SQLite differ: without this, deleted rows, such as a forgotten person's texts, would stay in
            # free pages.
            self._connection.execute("PRAGMA secure_delete = ON")
            self._connection.execute("PRAGMA foreign_keys = ON")
            migrate(self._connection, path)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise DatabaseUnusable(path, str(error)) from error
        except (SchemaTooNew, NoRoomForCopy, OSError):
            self._connection.close()
            raise
        self._readers = Readers(
            path,
            BUSY_TIMEOUT_MS / 1000,
            lambda: self.reserve is not None and self.reserve.is_released,
            lambda: self._depth > 0,
        )
        self._threads = ReadingThreads(self._readers)
        _OPEN.add(self)

    def close(self) -> None:
        """Ends what is being read."""
        if isinstance(self._threads, _OfParent):
            return  # it is for the parent to close
        self._threads.close()
        self._readers.close(_CLOSE_S)
        self._connection.close()

    async def read(self, whose: str | None, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """What `work` returns or raises, called within `reading` on a thread of its own; the loop is free meanwhile.

        It reads what is committed when it begins. It writes nothing and touches no state of the loop's: a caller that
        decides by what it found writes afterwards, in a transaction that checks again what may have changed. whose: the
        owner for whom it reads, who has at most two threads; None: an administrator; BOX: the box's own work.

        Raises ReadingEnded once the database is being closed. If the task is cancelled the reading ends soon.
        """
        return await self._threads.run(whose, partial(work, *args, **named))

    def reading(self) -> AbstractContextManager[None]:
        """Within it, this thread reads the state of one moment, and a write raises WriteWhileReading."""
        assert self._depth == 0 or threading.get_ident() != self._thread, "it would not see what the transaction wrote"
        return self._readers.reading()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. A transaction inside another joins it: only the outermost commits.

        Never await inside: another coroutine's writes would join this transaction and share its fate.
        """
        if self._readers.here is not None:
            raise WriteWhileReading("BEGIN IMMEDIATE")
        if self._depth == 0:
            if self.reserve is not None:
                self.reserve.tend()
            self._connection.execute("BEGIN IMMEDIATE")
        self._depth += 1
        before = self._connection.total_changes
        try:
            yield
            if self._depth == 1:
                self._connection.execute("COMMIT")
                self._count_since(before)
        except BaseException:
            # On a full disk SQLite itself has rolled back; a transaction that could not be committed is still open.
            if self._depth == 1 and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._depth -= 1

    @contextmanager
    def log_is_left(self) -> Iterator[None]:
        """Commits within leave their pages in the log; call `carry_over` afterwards. In SQLite's own way the commit
        that makes the log long carries all of it over, and a row of 12 MiB cost the loop twice as much."""
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        try:
            yield
        finally:
            self._connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")

    async def carry_over(self) -> None:
        """Carries the log over into the database, on a thread."""
        await asyncio.to_thread(self._readers.carry_over)

    @property
    def is_in_transaction(self) -> bool:
        return self._depth > 0

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if (reader := self._readers.here) is not None:
            return reader.execute(sql, parameters)
        if self._depth == 0 and self.reserve is not None and not sql.startswith("SELECT"):
            self.reserve.tend()
        before = self._connection.total_changes
        cursor = self._connection.execute(sql, parameters)
        if self._depth == 0:
            self._count_since(before)
        return cursor

    def _count_since(self, before: int) -> None:
        if (changes := _CHANGES.get()) is not None:
            changes.rows += self._connection.total_changes - before

    def keep_reserve(self, size: int) -> None:
        """Keep `size` bytes in reserve for a full disk from now on."""
        self.reserve = Reserve(self, size)
        self.reserve.keep(rows=size)
        self.reserve.carry_over()

    def define(self, name: str, arguments: int, function: Callable[..., Any]) -> None:
        """A function for SQL, on threads that read too; an exception in it fails the statement."""
        self._readers.define(name, arguments, function)
        self._connection.create_function(name, arguments, function)

    def many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Run the statement once for each of the parameters, in one transaction."""
        with self.transaction():
            self._connection.executemany(sql, parameters)

    def one(self, kind: type[Row], sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        row = self.execute(sql, parameters).fetchone()
        return None if row is None else _decode(kind, row)

    def all(self, kind: type[Row], sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return [_decode(kind, row) for row in self.execute(sql, parameters)]

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """The first column of the first row; None if there is no row."""
        row = self.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    def column(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The first column of what the statement finds."""
        return [row[0] for row in self.execute(sql, parameters)]

    def page(
        self,
        kind: type[Row],
        table: str,
        *,
        scope: Mapping[str, Any] | None = None,
        where: str = "1",
        parameters: Sequence[Any] = (),
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
        order_by: str = "",
        unread: Collection[str] = (),
    ) -> Page[Row]:
        """Rows in the order of their creation (`seq`), from the one behind the row whose id is `after`.

        order_by: a column that comes before that order. scope: column values that say whose list it is. where,
        parameters: a filter on it. Raises UnknownCursor if `after` is not a row of the list. The filter may hide that
        row: a cursor is only a position.

        A page ends before `limit` after PAGE_ROWS rows, or once its text is longer than PAGE_BYTES or weighs more than
        PAGE_WEIGHT; it has one row at least. unread: columns that the list does not show, and that are None in its
        rows.
        """
        limit = min(limit, PAGE_ROWS)
        scope, places = scope or {}, (order_by, "seq") if order_by else ("seq",)
        owned = " AND ".join(["1", *(f"{column} = ?" for column in scope)])
        conditions, values = [owned, f"({where})"], [*scope.values(), *parameters]
        if after is not None:
            found = self.execute(
                f"SELECT {', '.join(places)} FROM {table} WHERE {owned} AND id = ?", [*scope.values(), after]
            ).fetchone()
            if found is None:
                raise UnknownCursor(after)
            marks = ", ".join("?" * len(places))
            conditions.append(f"({', '.join(places)}) {'<' if descending else '>'} ({marks})")
            values += list(found)
        order = ", ".join(f"{place} {'DESC' if descending else 'ASC'}" for place in places)
        columns = ", ".join(f"NULL AS {name}" if name in unread else name for name, _ in _columns(kind))
        cursor = self.execute(
            f"SELECT {columns} FROM {table} WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT ?",
            [*values, limit + 1],
        )
        rows: list[Row] = []
        written = [name for name, is_json in _columns(kind) if is_json]
        budget, has_more = PageBudget(), False
        for row in cursor:
            fits = budget.take((value for value in row if isinstance(value, str)), (row[name] for name in written))
            if has_more := len(rows) == limit or (bool(rows) and not fits):
                break
            rows.append(_decode(kind, row))
        cursor.close()  # it may have more to give, and would keep its snapshot of the store
        return Page(rows, has_more)


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


class _OfParent:
    """Replaces the parent's connection in a forked child: two processes through one connection would damage the file,
    and threads are not forked."""

    def __init__(self, opened: object):
        self._opened = opened  # not closed here, for that ends locks of the parent's

    def __getattr__(self, name: str) -> Any:
        raise OpenedByParent


def _forked() -> None:
    for db in _OPEN:
        db._connection, db._readers, db._threads = map(_OfParent, (db._connection, db._readers, db._threads))  # type: ignore[assignment]


os.register_at_fork(after_in_child=_forked)


def owned_by(viewer: str | None) -> dict[str, str]:
    """The `scope` of a list for this owner. With None, an admin or the box itself, it is every row."""
    return {} if viewer is None else {"owner": viewer}


def encode(field: dataclasses.Field[Any], value: Any) -> Any:
    """A value as its column has it."""
    if field.metadata.get("json") and value is not None:
        if field.metadata["of_a_body"]:
            return orjson.dumps(value).decode()
        return json.dumps(value, separators=(",", ":"))
    return value


def _decode(kind: type[Row], row: sqlite3.Row) -> Row:
    values = {}
    for name, is_json in _columns(kind):
        value = row[name]
        values[name] = json.loads(value) if is_json and value is not None else value
    return kind(**values)


def _columns(kind: Any) -> tuple[tuple[str, bool], ...]:
    """Names, and whether JSON stands in them."""
    if kind not in _COLUMNS:
        _COLUMNS[kind] = tuple((field.name, bool(field.metadata.get("json"))) for field in dataclasses.fields(kind))
    return _COLUMNS[kind]


def _weight(text: str | None) -> int:
    """An upper bound of a JSON text's weight: signs within its strings count too."""
    if text is None:
        return 0
    return 12 * (text.count("[") + text.count("{")) + 2 * text.count('"') + text.count(",")
