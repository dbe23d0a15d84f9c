"""SQLite with the durability that the box promises: acknowledged writes survive kill -9.

Every thread has a connection of its own. WAL with synchronous=FULL syncs the log at every commit
(https://www.sqlite.org/wal.html); readers never wait, and writers take turns by a lock in this process.

A `Table` is declared with the dataclass of its rows and has the operations on one row. The other modules here take
`insert`, `find` and `update` from their tables and add SQL for further queries.

StoreError
├── DatabaseUnusable    the file is not a box's database, is damaged or unreadable
├── OtherSchema         another version of this software wrote the file
├── RowNotFound         no row has this id
├── UnknownCursor       `after` is not the id of a row in this list
└── IllegalTransition   a change was requested of a finished job, operation or hand-over
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
    """Base class of the errors that `appliance.store` raises."""


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
    """No row has this id. Also a LookupError, which the scheduler's loop expects for a deleted job."""

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
    """Arguments of `Table.page` that select a part of a list."""

    after: str | None
    limit: int
    descending: bool
    order_by: str


TABLES: dict[str, tuple[set[str], str]] = {}
"""Columns and SQL of each table, by its name."""


def sql_list(words: Iterable[str]) -> str:
    """Format words as SQL for `IN (...)`. They are not escaped, so never pass words from a request."""
    return ", ".join(f"'{word}'" for word in words)


class _OfThread(threading.local):
    connection: sqlite3.Connection | None = None


class Database(AbstractContextManager["Database"]):
    """Connections, transactions, and the mapping between rows and dataclasses, shared by all threads of a process."""

    def __init__(self, path: Path):
        """Open the database at `path`, or create it with mode 0600. Raises DatabaseUnusable, OtherSchema."""
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
        """Raise OtherSchema if an existing table's columns differ from the declared ones."""
        columns = self.columns()
        for table, (declared, _) in TABLES.items():
            if columns.get(table, declared) != declared:
                raise OtherSchema(self.path, table)
        if columns and not columns.keys() & TABLES.keys():
            raise sqlite3.DatabaseError("its tables are those of another program")

    def columns(self) -> dict[str, set[str]]:
        """Return the columns of each table in the file."""
        columns: dict[str, set[str]] = {}
        query = "SELECT m.name, c.name FROM sqlite_master AS m, pragma_table_info(m.name) AS c WHERE m.type = 'table'"
        for table, column in self.execute(query):
            columns.setdefault(table, set()).add(column)
        return columns

    @property
    def _connection(self) -> sqlite3.Connection:
        """This thread's connection, opened at the first use."""
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
            # Some builds of SQLite do not overwrite deleted rows by default.
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA foreign_keys = ON")
        return self._of_thread.connection

    def close(self) -> None:
        """Close this thread's connection and refuse the others, which close when their threads end."""
        with self._writing:
            self._closed = True
            if self._of_thread.connection is not None:
                self._of_thread.connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in one transaction. A transaction inside another joins it: only the outermost commits.

        Keep it short: other writers wait. Never await inside: other coroutines on this thread would join it.
        """
        connection = self._connection
        if connection.in_transaction:
            yield
            return
        with self._writing, connection:  # the connection's block commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            yield

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        connection = self._connection
        if connection.in_transaction or sql.lstrip().startswith(_READS):
            return connection.execute(sql, parameters)
        with self._writing:
            return connection.execute(sql, parameters)

    def delete(self, table: str, where: str, parameters: Sequence[Any] = ()) -> None:
        """Delete rows in short transactions, so that other writers get their turn. Many rows need a thread."""
        chosen = f"SELECT rowid FROM {table} WHERE {where} LIMIT {DELETED_AT_ONCE}"
        while self.execute(f"DELETE FROM {table} WHERE rowid IN ({chosen})", parameters).rowcount == DELETED_AT_ONCE:
            time.sleep(0.001)  # a waiting thread gets the lock only if this thread pauses

    def empty_log(self) -> bool:
        """Move the log into the database and truncate it, so that deleted rows are gone from the disk. Returns False if
        readers used the log for longer than BUSY_TIMEOUT_MS."""
        with self._writing:
            (is_busy, _, _) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not is_busy

    def one(self, kind: type[Row], sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        row = self.execute(sql, parameters).fetchone()
        return None if row is None else decode(kind, row)

    def all(self, kind: type[Row], sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return [decode(kind, row) for row in self.execute(sql, parameters)]

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Return the first column of the first row; None if there is no row."""
        row = self.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    def column(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self.execute(sql, parameters)]


def owned_by(viewer: str | None) -> dict[str, str]:
    """Return the `scope` of the viewer's own rows; of all rows for None (an admin or the box itself)."""
    return {} if viewer is None else {"owner": viewer}


_SQL = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}


class Column(NamedTuple):
    """A column of a table. is_json: its values are stored as JSON text, but None as NULL."""

    sql: str
    is_json: bool


@cache
def columns_of(kind: Any) -> dict[str, Column]:
    """Derive a table's columns from the types of a dataclass's fields. A Literal column accepts only the Literal's
    words; a type that SQLite lacks is stored as JSON."""
    return {name: _column(name, hint) for name, hint in get_type_hints(kind).items()}


def _column(name: str, hint: Any) -> Column:
    optional = isinstance(hint, UnionType)
    inner = next(one for one in get_args(hint) if one is not NoneType) if optional else hint
    words = get_args(inner) if get_origin(inner) is Literal else ()
    sql = f"{name} {_SQL.get(str if words else inner, 'TEXT')}" + ("" if optional else " NOT NULL")
    sql += f" CHECK ({name} IN ({sql_list(words)}))" if words else ""
    return Column(sql, inner not in _SQL and not words)


def encode(value: Any, column: Column) -> Any:
    """Convert a value of Python to the column's form in SQLite."""
    if column.is_json and value is not None:
        # `default` writes named tuples as lists; OPT_SERIALIZE_NUMPY is for numbers from scipy.
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps(value, default=list, option=options).decode()
    return value


@cache
def _places(kind: Any, names: tuple[str, ...]) -> list[tuple[int, bool]]:
    """Return for each field of `kind` its place in a row with these columns, and whether it is JSON."""
    return [(names.index(name), column.is_json) for name, column in columns_of(kind).items()]


def decode(kind: type[Row], row: sqlite3.Row) -> Row:
    values = tuple(row)  # by place: a lookup by name compares with every name before it
    stored = [(values[place], is_json) for place, is_json in _places(cast(Any, kind), tuple(row.keys()))]
    return kind(*[orjson.loads(value) if is_json and value is not None else value for value, is_json in stored])


class Table(Generic[Row]):
    def __init__(
        self, name: str, kind: type[Row], *key: str, order: str = "seq", parents: Mapping[str, str] | None = None
    ):
        """Declare a table, which the next opening of a database creates. Changed columns make another schema.

        Args:
            key: columns that identify a row, ("id",) by default.
            order: column that `list_all` sorts by; "seq", the order of insertion, is added as a column.
            parents: columns with the id of a row in another table; deleting that row deletes this one.
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
        """Insert the row and return it. Raises sqlite3.IntegrityError if a row has the same key."""
        db.execute(f"INSERT {self._into}", self._values(row))
        return row

    def insert_or_merge(self, db: Database, row: Row) -> None:
        """Insert the row; if a row has the same key, overwrite that row's columns with the values that are not None."""
        columns = (name for name in self._columns if name not in self._key)
        merged = ", ".join(f"{name} = coalesce(excluded.{name}, {self._name}.{name})" for name in columns)
        conflict = f"ON CONFLICT ({', '.join(self._key)}) DO UPDATE SET {merged}"
        db.execute(f"INSERT {self._into} {conflict}", self._values(row))

    def put(self, db: Database, row: Row) -> None:
        """Insert the row; it replaces an existing row with the same key."""
        db.execute(f"INSERT OR REPLACE {self._into}", self._values(row))

    def _values(self, row: Row) -> list[Any]:
        return [encode(getattr(row, name), column) for name, column in self._columns.items()]

    def delete(self, db: Database, *key: Any) -> bool:
        """Delete a row; return whether it existed."""
        return db.execute(f"DELETE FROM {self._name} WHERE {self._where}", key).rowcount > 0

    def list_all(
        self, db: Database, where: str = "1", *parameters: Any, limit: int = -1, last: bool = False
    ) -> list[Row]:
        """List matching rows in the table's order. limit: at most this many rows; -1: all. last: reverse the order."""
        order = f"{self._order} DESC" if last else self._order
        query = f"SELECT * FROM {self._name} WHERE {where} ORDER BY {order} LIMIT {limit}"
        return db.all(self._kind, query, parameters)

    def first(self, db: Database, where: str, *parameters: Any, last: bool = False) -> Row | None:
        """Return the first row that `list_all` would return; None if there is none."""
        return next(iter(self.list_all(db, where, *parameters, limit=1, last=last)), None)

    def find(self, db: Database, *key: Any) -> Row | None:
        """Return the row with this key, of any owner; None if there is none."""
        return db.one(self._kind, f"SELECT * FROM {self._name} WHERE {self._where}", key)

    def get(self, db: Database, *key: Any) -> Row:
        """Return the row with this key, of any owner. Raises RowNotFound."""
        row = self.find(db, *key)
        if row is None:
            raise RowNotFound(self._name, "/".join(map(str, key)))
        return row

    def find_visible(self, db: Database, row_id: str, *, viewer: str | None) -> Row | None:
        """Return the row with this id if `viewer` owns it; None (an admin or the box itself) sees all rows."""
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
        """Return rows in the order of their creation (`seq`), beginning after the row with the id `after`.

        order_by: column to sort by before `seq`. scope: {column: value} that all rows of the list share. where,
        parameters, metadata (key-value pairs that a row must have): filters on the list. Raises UnknownCursor if the
        list has no row `after`, where the filters do not count.

        A page ends before `limit` once its text is longer than PAGE_BYTES; it has at least one matching row. unread:
        columns that are not read; they are None in the rows.
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
            size += sum([len(value) for value in row if type(value) is str])
            if has_more := len(rows) == limit or (bool(rows) and size > PAGE_BYTES):
                break
            rows.append(decode(self._kind, row))
        cursor.close()  # unread rows would keep the cursor's snapshot of the store
        return Page(rows, has_more)

    def page_visible(self, db: Database, *, viewer: str | None, **more: Any) -> Page[Row]:
        """Return a page of the rows that `viewer` owns, or of all rows for None; `more` as for `page`."""
        return self.page(db, owned_by(viewer), **more)

    def update(self, db: Database, *key: Any, **changes: Any) -> None:
        """Change columns of a row. Raises RowNotFound."""
        if not changes:
            return
        assignments = ", ".join(f"{name} = ?" for name in changes)
        values = [encode(value, self._columns[name]) for name, value in changes.items()]
        cursor = db.execute(f"UPDATE {self._name} SET {assignments} WHERE {self._where}", [*values, *key])
        if cursor.rowcount == 0:
            raise RowNotFound(self._name, "/".join(map(str, key)))
