"""Tells of each row that this connection writes, by triggers that live as long as it does: nobody who writes has to
remember to say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.store.database import Database

Listener = Callable[[str, str | None, str | None], None]
_EVENTS = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD"))


@dataclass(frozen=True, slots=True)
class Watched:
    """What a listener gets of a row of a table. id, owner: SQL in which ROW is the row; NULL where there is none."""

    id: str = "NULL"
    owner: str = "NULL"


def watch(db: Database, tables: Mapping[str, Watched], listener: Listener, name: str = "listener") -> None:
    """From now on `listener(table, id, owner)` is called within each statement that writes rows of these tables, also
    one whose transaction is rolled back after. It must not raise, nor use the database: a later turn of the loop may.
    name: of who watches, one at a time."""

    def tell(table: str, row_id: str | None, owner: str | None) -> int:
        listener(table, row_id, owner)
        return 0

    unwatch(db, tables, name)  # of an app that had this connection before
    db.define(f"{name}_of_row", 3, tell)
    for table, watched in tables.items():
        for event, row in _EVENTS:
            values = ", ".join(expression.replace("ROW.", f"{row}.") for expression in (watched.id, watched.owner))
            db.execute(
                f"CREATE TEMP TRIGGER {name}_{table}_{event} AFTER {event} ON main.{table}"
                f" BEGIN SELECT {name}_of_row('{table}', {values}); END"
            )


def unwatch(db: Database, tables: Mapping[str, Watched], name: str = "listener") -> None:
    for table in tables:
        for event, _ in _EVENTS:
            db.execute(f"DROP TRIGGER IF EXISTS temp.{name}_{table}_{event}")
