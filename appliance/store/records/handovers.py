"""The journal of hand-overs. Each step is written before it runs and after it ran, so that a restart can read a
crash."""

from __future__ import annotations

from typing import Unpack

from appliance.store.database import Database, Page, Part
from appliance.store.rows import HandoverRow, HandoverStepRow, HandoverTotal
from appliance.store.table import Table

_TABLE, _STEPS = Table("handovers", HandoverRow), Table("handover_steps", HandoverStepRow, "handover_id", "position")
find, update = _TABLE.find, _TABLE.update


def insert(db: Database, row: HandoverRow, steps: list[HandoverStepRow]) -> None:
    """Writes the whole plan at once: half a plan could be neither finished nor undone."""
    with db.transaction():
        _TABLE.insert(db, row)
        for step in steps:
            _STEPS.insert(db, step)


def put_step(db: Database, row: HandoverStepRow) -> None:
    """Insert the step, or replace it: those of an undo are not in the plan."""
    with db.transaction():
        db.execute("DELETE FROM handover_steps WHERE handover_id = ? AND position = ?", [row.handover_id, row.position])
        _STEPS.insert(db, row)


def page(db: Database, **part: Unpack[Part]) -> Page[HandoverRow]:
    """Newest first. Raises UnknownCursor."""
    return db.page(HandoverRow, "handovers", **part)


def totals(db: Database) -> list[HandoverTotal]:
    """Hand-overs that have ended, by outcome, since the box was made, deleted ones too."""
    return db.all(
        HandoverTotal,
        "SELECT state, sum(number) AS count, sum(milliseconds) / 1000.0 AS seconds FROM"
        " (SELECT state, 1 AS number, CAST(round(1000 * (ended_s - started_s)) AS INTEGER) AS milliseconds"
        "  FROM handovers WHERE ended_s IS NOT NULL UNION ALL SELECT state, number, milliseconds FROM handovers_gone)"
        " GROUP BY state ORDER BY state",
    )


def list_open(db: Database) -> list[HandoverRow]:
    """Those without an end, oldest first, which a restart has to finish or undo."""
    return db.all(HandoverRow, "SELECT * FROM handovers WHERE ended_s IS NULL ORDER BY seq")


def steps(db: Database, handover_id: str) -> list[HandoverStepRow]:
    return db.all(
        HandoverStepRow, "SELECT * FROM handover_steps WHERE handover_id = ? ORDER BY position", [handover_id]
    )
