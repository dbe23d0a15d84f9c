"""SQLite with the durability the box promises: what was acknowledged survives kill -9.

Every thread has a connection of its own. WAL with synchronous=FULL syncs the log at every commit
(https://www.sqlite.org/wal.html); readers never wait, and writers take turns at one lock of this process.

`Table` is declared by the dataclass of its rows, and has what every table does with one row. The modules beside it
take their `insert`, `find` and `update` from it, and write the SQL that is their own.

StoreError
├── DatabaseUnusable    the file is not our database, is damaged, or cannot be opened
├── OtherSchema         another version of this software wrote the file
├── RowNotFound         no row has this id
├── UnknownCursor       `after` is the id of nothing in this list
└── IllegalTransition   a finished job, operation or hand-over was asked to change
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints

import orjson

Row = TypeVar("Row")
BUSY_TIMEOUT_MS = 5000
"""For other processes that read, such as a backup."""
WAL_BYTES = 8 << 20
PAGE_BYTES = 2 << 20
"""Text in the rows of one page."""
DELETED_AT_ONCE = 100
"""Rows of one transaction of `delete`."""
_READS = ("SELECT", "WITH", "PRAGMA", "EXPLAIN")


class StoreError(Exception):
    """Base of everything raised by `appliance.store`."""


class DatabaseUnusable(StoreError):
    def __init__(self, path: Path, reason: str):
        super().__init__(
            f"{path} cannot be used as the box's database: {reason}. Restore a backup into another data directory "
            "(`appliance restore`). Without one, keep this file and its -wal in another folder and start with an empty "
            "box: the files that people sent stay where they are, and are known again when the database returns."
        )


class OtherSchema(StoreError):
    def __init__(self, path: Path, table: str):
        super().__init__(
            f"{path} was written by another release: its table {table} has other columns, and there is no way from one "
            "to the other. Start the release that wrote it, or start with an empty data directory (`box.data_dir`)"
        )


class RowNotFound(StoreError, LookupError):
    """Also a LookupError, which the scheduler's loop expects for a job that is gone."""

    def __init__(self, table: str, row_id: str):
        super().__init__(f"no row {row_id!r} in {table}")


class UnknownCursor(StoreError):
    def __init__(self, after: str):
        super().__init__(
            f"No object with id {after!r} is in this list; 'after' is the id of the last object of the page before"
        )


class IllegalTransition(StoreError):
    def __init__(self, table: str, row_id: str, found: str, wanted: str):
        super().__init__(f"{row_id} in {table} is {found} and stays so; it cannot become {wanted}")
        self.found = found


@dataclasses.dataclass(frozen=True)
class Page(Generic[Row]):
    """One page of a list. `has_more` says whether more rows follow in the same order."""

    data: list[Row]
    has_more: bool


class Part(TypedDict, total=False):
    """Which part of a list, as `Table.page` takes it."""

    after: str | None
    limit: int
    descending: bool
    order_by: str


TABLES: dict[str, tuple[set[str], str]] = {}
"""Columns and SQL of each table, by its name."""


def sql_list(words: Iterable[str]) -> str:
    """SQL for `IN (...)` from words of the code, never of a request."""
    return ", ".join(f"'{word}'" for word in words)


class _OfThread(threading.local):
    connection: sqlite3.Connection | None = None


class Database(AbstractContextManager["Database"]):
    """Connections, transactions, and the mapping between rows and dataclasses. For all threads of one process."""

    def __init__(self, path: Path):
        """Open or create `path` (mode 0600). Raises DatabaseUnusable, OtherSchema."""
        self.path = path
        self._closed = False
        self._of_thread, self._writing = _OfThread(), threading.RLock()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._check_tables()
            schema = (resources.files("appliance.store") / "schema.sql").read_text()
            tables = "\n".join(sql for _, sql in TABLES.values())
            self._connection.executescript(f"BEGIN IMMEDIATE; {tables} {schema} COMMIT;")
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise DatabaseUnusable(path, str(error)) from error
        except OtherSchema:
            self.close()
            raise

    def _check_tables(self) -> None:
        """Raises OtherSchema if an existing table has other columns than declared."""
        columns = self.columns()
        for table, (declared, _) in TABLES.items():
            if columns.get(table, declared) != declared:
                raise OtherSchema(self.path, table)
        if columns and not columns.keys() & TABLES.keys():
            raise sqlite3.DatabaseError("it has the tables of another program")

    def columns(self) -> dict[str, set[str]]:
        """The columns of each table that the file has."""
        columns: dict[str, set[str]] = {}
        query = "SELECT m.name, c.name FROM sqlite_master AS m, pragma_table_info(m.name) AS c WHERE m.type = 'table'"
        for table, column in self.execute(query):
            columns.setdefault(table, set()).add(column)
        return columns

    @property
    def _connection(self) -> sqlite3.Connection:
        """This thread's."""
        if self._closed:
            raise sqlite3.ProgrammingError("the database is closed")
        if self._of_thread.connection is None:
            connection = sqlite3.connect(
                self.path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000, check_same_thread=False
            )
            self._of_thread.connection = connection
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            connection.execute("PRAGMA synchronous = FULL")
            # Some builds of SQLite leave deleted rows in free pages by default.
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA foreign_keys = ON")
        return self._of_thread.connection

    def close(self) -> None:
        """Close this thread's connection. Others close theirs as they end, and can't use them any more."""
        with self._writing:
            self._closed = True
            if self._of_thread.connection is not None:
                self._of_thread.connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. A transaction inside another joins it: only the outermost commits.

        Keep it short: other writers wait. Never await inside: other coroutines on this thread would join it.
        """
        connection = self._connection
        if connection.in_transaction:
            yield
            return
        with self._writing, connection:  # which commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            yield

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        connection = self._connection
        if connection.in_transaction or sql.lstrip().startswith(_READS):
            return connection.execute(sql, parameters)
        with self._writing:
            return connection.execute(sql, parameters)

    def delete(self, table: str, where: str, parameters: Sequence[Any] = ()) -> None:
        """Delete rows in short transactions, so that other writers get in between. Call it on a thread if there may be
        many."""
        chosen = f"SELECT rowid FROM {table} WHERE {where} LIMIT {DELETED_AT_ONCE}"
        while self.execute(f"DELETE FROM {table} WHERE rowid IN ({chosen})", parameters).rowcount == DELETED_AT_ONCE:
            time.sleep(0.001)  # a thread that waits for the lock gets it only if this one pauses

    def empty_log(self) -> bool:
        """Move the log into the database and truncate it, so that deleted rows are gone from the disk. False if other
        readers used it for longer than BUSY_TIMEOUT_MS."""
        with self._writing:
            (is_busy, _, _) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not is_busy

    def one(self, kind: type[Row], sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        row = self.execute(sql, parameters).fetchone()
        return None if row is None else decode(kind, row)

    def all(self, kind: type[Row], sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return [decode(kind, row) for row in self.execute(sql, parameters)]

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """The first column of the first row; None if there is no row."""
        row = self.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    def column(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The first column of all rows."""
        return [row[0] for row in self.execute(sql, parameters)]


def owned_by(viewer: str | None) -> dict[str, str]:
    """The `scope` of a list for this owner. With None, an admin or the box itself, it is every row."""
    return {} if viewer is None else {"owner": viewer}


_SQL = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}


class Column(NamedTuple):
    """is_json: stored as JSON text; NULL stays None."""

    sql: str
    is_json: bool


@cache
def columns_of(kind: Any) -> dict[str, Column]:
    """The columns of a dataclass, from the types of its fields: a Literal allows its words alone, and what SQLite has
    no type for is JSON."""
    return {name: _column(name, hint) for name, hint in get_type_hints(kind).items()}


def _column(name: str, hint: Any) -> Column:
    optional = isinstance(hint, UnionType)
    inner = next(one for one in get_args(hint) if one is not NoneType) if optional else hint
    words = get_args(inner) if get_origin(inner) is Literal else ()
    sql = f"{name} {_SQL.get(str if words else inner, 'TEXT')}" + ("" if optional else " NOT NULL")
    sql += f" CHECK ({name} IN ({sql_list(words)}))" if words else ""
    return Column(sql, inner not in _SQL and not words)


def encode(value: Any, column: Column) -> Any:
    """Convert a value for its column."""
    if column.is_json and value is not None:
        # `default` is for named tuples, and numbers of scipy are numpy's.
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps(value, default=list, option=options).decode()
    return value


def decode(kind: type[Row], row: sqlite3.Row) -> Row:
    stored = ((row[name], column.is_json) for name, column in columns_of(cast(Any, kind)).items())
    return kind(*(orjson.loads(value) if is_json and value is not None else value for value, is_json in stored))


class Table(Generic[Row]):
    def __init__(
        self, name: str, kind: type[Row], *key: str, order: str = "seq", parents: Mapping[str, str] | None = None
    ):
        """Declares the table, which a database has from its next opening on. Changed columns are another schema.

        Args:
            key: the columns that name a row; ("id",) if none is given.
            order: of `list_all`; "seq", the order of insertion, is a column of its own.
            parents: columns with the id of a row of another table, with which this one is deleted.
        """
        self._name, self._kind, self._key, self._order = name, kind, key or ("id",), order
        self._columns = columns_of(cast(Any, kind))
        self._where = " AND ".join(f"{column} = ?" for column in self._key)
        self._into = f"INTO {name} ({', '.join(self._columns)}) VALUES ({', '.join('?' * len(self._columns))})"
        lines = [column.sql for column in self._columns.values()]
        names, is_ordered = ", ".join(self._key), order == "seq"
        if is_ordered:  # AUTOINCREMENT: a cursor stays valid after deletions
            lines.insert(0, "seq INTEGER PRIMARY KEY AUTOINCREMENT")
        if names != "seq":
            lines.append(f"{'UNIQUE' if is_ordered else 'PRIMARY KEY'} ({names})")
        for column, parent in (parents or {}).items():
            lines.append(f"FOREIGN KEY ({column}) REFERENCES {parent} (id) ON DELETE CASCADE")
        sql = f"CREATE TABLE IF NOT EXISTS {name} ({', '.join(lines)});"
        TABLES[name] = {*self._columns} | ({"seq"} if is_ordered else set()), sql

    def insert(self, db: Database, row: Row) -> Row:
        """Returns the row. Raises sqlite3.IntegrityError where one has its key."""
        db.execute(f"INSERT {self._into}", self._values(row))
        return row

    def insert_or_merge(self, db: Database, row: Row) -> None:
        """Insert the row, or put what it has (not None) into the one with its key."""
        columns = (name for name in self._columns if name not in self._key)
        merged = ", ".join(f"{name} = coalesce(excluded.{name}, {self._name}.{name})" for name in columns)
        conflict = f"ON CONFLICT ({', '.join(self._key)}) DO UPDATE SET {merged}"
        db.execute(f"INSERT {self._into} {conflict}", self._values(row))

    def put(self, db: Database, row: Row) -> None:
        """Insert the row, in place of the one with its key if there is one."""
        db.execute(f"INSERT OR REPLACE {self._into}", self._values(row))

    def _values(self, row: Row) -> list[Any]:
        return [encode(getattr(row, name), column) for name, column in self._columns.items()]

    def delete(self, db: Database, *key: Any) -> bool:
        """Delete a row; whether it was there."""
        return db.execute(f"DELETE FROM {self._name} WHERE {self._where}", key).rowcount > 0

    def list_all(
        self, db: Database, where: str = "1", *parameters: Any, limit: int = -1, last: bool = False
    ) -> list[Row]:
        """limit: -1 for all. last: the last rows first."""
        order = f"{self._order} DESC" if last else self._order
        query = f"SELECT * FROM {self._name} WHERE {where} ORDER BY {order} LIMIT {limit}"
        return db.all(self._kind, query, parameters)

    def first(self, db: Database, where: str, *parameters: Any, last: bool = False) -> Row | None:
        """The first row of `list_all`."""
        return next(iter(self.list_all(db, where, *parameters, limit=1, last=last)), None)

    def find(self, db: Database, *key: Any) -> Row | None:
        """The row with this key, whoever owns it; None if there is none."""
        return db.one(self._kind, f"SELECT * FROM {self._name} WHERE {self._where}", key)

    def get(self, db: Database, *key: Any) -> Row:
        """As `find`. Raises RowNotFound."""
        row = self.find(db, *key)
        if row is None:
            raise RowNotFound(self._name, "/".join(map(str, key)))
        return row

    def find_visible(self, db: Database, row_id: str, *, viewer: str | None) -> Row | None:
        """viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself."""
        query = f"SELECT * FROM {self._name} WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)"
        return db.one(self._kind, query, [row_id, viewer])

    def page(
        self,
        db: Database,
        scope: Mapping[str, Any] | None = None,
        *,
        where: str = "1",
        parameters: Sequence[Any] = (),
        metadata: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
        order_by: str = "",
        unread: Collection[str] = (),
    ) -> Page[Row]:
        """Rows in the order of their creation (`seq`), from the one behind the row whose id is `after`.

        order_by: a column that comes before that order. scope: column values that say whose list it is. where,
        parameters, metadata (pairs of a row): filters on it. Raises UnknownCursor if `after` is not a row of the list;
        a filter may hide that row.

        A page ends before `limit` once its text is longer than PAGE_BYTES; it has one row at least. unread: columns
        that the list does not show, and that are None in its rows.
        """
        scope, places = scope or {}, (order_by, "seq") if order_by else ("seq",)
        owned = " AND ".join(["1", *(f"{column} = ?" for column in scope)])
        conditions, values = [owned, f"({where})"], [*scope.values(), *parameters]
        has_pair = "EXISTS (SELECT 1 FROM json_each(metadata) AS pair WHERE pair.key = ? AND pair.value = ?)"
        for pair in (metadata or {}).items():
            conditions.append(has_pair)
            values += pair
        if after is not None:
            position = db.execute(
                f"SELECT {', '.join(places)} FROM {self._name} WHERE {owned} AND id = ?", [*scope.values(), after]
            ).fetchone()
            if position is None:
                raise UnknownCursor(after)
            marks = ", ".join("?" * len(places))
            conditions.append(f"({', '.join(places)}) {'<' if descending else '>'} ({marks})")
            values += list(position)
        order = ", ".join(f"{place} {'DESC' if descending else 'ASC'}" for place in places)
        columns = ", ".join(f"NULL AS {name}" if name in unread else name for name in self._columns)
        cursor = db.execute(
            f"SELECT {columns} FROM {self._name} WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT ?",
            [*values, limit + 1],
        )
        rows, size, has_more = list[Row](), 0, False
        for row in cursor:
            size += sum(len(value) for value in row if isinstance(value, str))
            if has_more := len(rows) == limit or (bool(rows) and size > PAGE_BYTES):
                break
            rows.append(decode(self._kind, row))
        cursor.close()  # it may have more to give, and would keep its snapshot of the store
        return Page(rows, has_more)

    def page_visible(self, db: Database, *, viewer: str | None, **more: Any) -> Page[Row]:
        """As `page`; the viewer's alone, as with `find_visible`."""
        return self.page(db, owned_by(viewer), **more)

    def update(self, db: Database, *key: Any, **changes: Any) -> None:
        """Change columns of one row. Raises RowNotFound."""
        if not changes:
            return
        assignments = ", ".join(f"{name} = ?" for name in changes)
        values = [encode(value, self._columns[name]) for name, value in changes.items()]
        cursor = db.execute(f"UPDATE {self._name} SET {assignments} WHERE {self._where}", [*values, *key])
        if cursor.rowcount == 0:
            raise RowNotFound(self._name, "/".join(map(str, key)))
