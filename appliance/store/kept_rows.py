"""Caches rows that are read often and change seldom: only rows that were written since are read again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from appliance.store.database import Database
from appliance.store.row_changes import Watched, watch

Row = TypeVar("Row")
Read = Callable[[Database, Sequence[str] | None], Iterable[tuple[str, Row]]]
MOST_AT_ONCE = 200
"""Keys whose rows are read one by one; where more were written, all rows are read."""
_NUMBERS = itertools.count()


class KeptRows(Generic[Row]):
    """For the loop's own thread.

    tables: by name, SQL for the key whose rows a written row may change; in it ROW is the written row. read: the rows
    of these keys, or of all, each with its key, in the order to keep; a key's rows stay together and keep the key's
    place."""

    def __init__(self, db: Database, tables: Mapping[str, str], read: Read[Row]) -> None:
        self._db, self._read = db, read
        self._rows: dict[str, list[Row]] = {}
        self._written: set[str] | None = None  # None: any
        watched = {table: Watched(key) for table, key in tables.items()}
        watch(db, watched, self._told, f"kept{next(_NUMBERS)}")

    def _told(self, _: str, key: str | None, __: str | None) -> None:
        if self._written is not None and key is not None:
            self._written.add(key)

    def by_key(self) -> Mapping[str, list[Row]]:
        """Its result must not be changed."""
        written = self._written
        if written is None or len(written) > MOST_AT_ONCE:
            written = None
            self._rows = {}
        if written is None or written:
            self._take(written)
        # Rows that are read within a transaction may be rolled back with it, and are read again.
        if not self._db.is_in_transaction:
            self._written = set()
        return self._rows

    def all(self) -> list[Row]:
        return [row for rows in self.by_key().values() for row in rows]

    def forget(self, keys: Iterable[str]) -> None:
        """What else has changed: their rows are read again."""
        if self._written is not None:
            self._written.update(keys)

    def _take(self, keys: set[str] | None) -> None:
        found: dict[str, list[Row]] = {}
        for key, row in self._read(self._db, None if keys is None else sorted(keys)):
            found.setdefault(key, []).append(row)
        for key in keys or ():
            if key not in found:
                self._rows.pop(key, None)
        self._rows.update(found)
