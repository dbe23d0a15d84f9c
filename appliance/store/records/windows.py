"""Mode windows, which are modes that come and go by the clock, in the order they were made."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.errors import RowNotFound
from appliance.store.rows import WindowRow
from appliance.store.table import Table

_TABLE = Table("windows", WindowRow)
insert, find = _TABLE.insert, _TABLE.find


def list_all(db: Database) -> list[WindowRow]:
    return db.all(WindowRow, "SELECT * FROM windows ORDER BY seq")


def delete(db: Database, window_id: str) -> None:
    """Raises RowNotFound."""
    if db.execute("DELETE FROM windows WHERE id = ?", [window_id]).rowcount == 0:
        raise RowNotFound("windows", window_id)
