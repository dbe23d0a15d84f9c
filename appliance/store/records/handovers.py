"""The journal of hand-overs. Each step is written before it runs and after it ran, so that a restart can read a
crash."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database
from appliance.store.rows import HandoverRow, HandoverStepRow, HandoverTotal


def insert(db: Database, row: HandoverRow, steps: list[HandoverStepRow]) -> None:
    """Writes the whole plan at once: half a plan could be neither finished nor undone."""
    with db.transaction():
        db.insert("handovers", row, name=row.id)
        for step in steps:
            insert_step(db, step)


def insert_step(db: Database, step: HandoverStepRow) -> None:
    db.insert("handover_steps", step, name=f"{step.handover_id}/{step.position}")


def find(db: Database, handover_id: str) -> HandoverRow | None:
    return db.one(HandoverRow, "SELECT * FROM handovers WHERE id = ?", [handover_id])


def list_recent(db: Database, limit: int) -> list[HandoverRow]:
    """Newest first."""
    return db.all(HandoverRow, "SELECT * FROM handovers ORDER BY seq DESC LIMIT ?", [limit])


def totals(db: Database) -> list[HandoverTotal]:
    """Hand-overs that have ended, by outcome, since the box was made."""
    return db.all(
        HandoverTotal,
        "SELECT state, count(*) AS count, sum(ended_s - started_s) AS seconds FROM handovers "
        "WHERE ended_s IS NOT NULL GROUP BY state ORDER BY state",
    )


def list_open(db: Database) -> list[HandoverRow]:
    """Those without an end, oldest first, which a restart has to finish or undo."""
    return db.all(HandoverRow, "SELECT * FROM handovers WHERE ended_s IS NULL ORDER BY seq")


def steps(db: Database, handover_id: str) -> list[HandoverStepRow]:
    return db.all(
        HandoverStepRow, "SELECT * FROM handover_steps WHERE handover_id = ? ORDER BY position", [handover_id]
    )


def update(db: Database, handover_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("handovers", HandoverRow, {"id": handover_id}, changes)


def update_step(db: Database, handover_id: str, position: int, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("handover_steps", HandoverStepRow, {"handover_id": handover_id, "position": position}, changes)
