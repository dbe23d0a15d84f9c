"""Mode windows, which are modes that come and go by the clock, in the order they were made."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.errors import RowNotFound
from appliance.store.rows import WindowRow


def insert(db: Database, row: WindowRow) -> None:
    db.insert("windows", row, name=row.id)


def list_all(db: Database) -> list[WindowRow]:
    return db.all(WindowRow, "SELECT * FROM windows ORDER BY seq")


def find(db: Database, window_id: str) -> WindowRow | None:
    return db.one(WindowRow, "SELECT * FROM windows WHERE id = ?", [window_id])


def delete(db: Database, window_id: str) -> None:
    """Raises RowNotFound."""
    if db.execute("DELETE FROM windows WHERE id = ?", [window_id]).rowcount == 0:
        raise RowNotFound("windows", window_id)
