"""One table, declared by the dataclass of its rows, and what every table does with one row. The modules of `objects`
and `records` take their `insert`, `find` and `update` from it, and write the SQL that is their own."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic

from appliance.store.database import PAGE_BYTES, TABLES, Database, Page, Row, columns_of, decode, encode, owned_by
from appliance.store.errors import DuplicateRow, RowNotFound, UnknownCursor


class Table(Generic[Row]):
    def __init__(
        self,
        name: str,
        kind: type[Row],
        *key: str,
        called: str = "",
        order: str = "seq",
        parents: Mapping[str, str] | None = None,
    ):
        """Declares the table, which a database has from its next opening on. Changed columns are another schema.

        Args:
            key: the columns that name a row; ("id",) if none is given.
            called: the column by which a DuplicateRow names it, if that is another.
            order: of `list_all`; "seq", the order of insertion, is a column of its own.
            parents: columns with the id of a row of another table, with which this one is deleted.
        """
        self._name, self._kind, self._key, self._order = name, kind, key or ("id",), order
        self._called = (called,) if called else self._key
        self._columns = columns_of(kind)
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
        """Returns the row. Raises DuplicateRow."""
        try:
            db.execute(f"INSERT {self._into}", self._values(row))
            return row
        except sqlite3.IntegrityError as error:
            if "UNIQUE" in str(error):
                raise DuplicateRow(self._name, "/".join(str(getattr(row, one)) for one in self._called)) from error
            raise

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
        """Whether there was one."""
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
        """Finds it whoever owns it: for the box's own work, or where the caller knows whose the row is."""
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

        A page ends before `limit` once its text is longer than PAGE_BYTES; it has one row at least. unread: columns
        that the list does not show, and that are None in its rows.
        """
        scope, places = scope or {}, (order_by, "seq") if order_by else ("seq",)
        owned = " AND ".join(["1", *(f"{column} = ?" for column in scope)])
        conditions, values = [owned, f"({where})"], [*scope.values(), *parameters]
        if after is not None:
            found = db.execute(
                f"SELECT {', '.join(places)} FROM {self._name} WHERE {owned} AND id = ?", [*scope.values(), after]
            ).fetchone()
            if found is None:
                raise UnknownCursor(after)
            marks = ", ".join("?" * len(places))
            conditions.append(f"({', '.join(places)}) {'<' if descending else '>'} ({marks})")
            values += list(found)
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
