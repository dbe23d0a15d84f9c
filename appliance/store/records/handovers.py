"""The journal of hand-overs. Each step is written before it runs and after it ran, so that a restart can read a
crash."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import HANDOVER_STEPS, HANDOVERS, HandoverRow, HandoverStepRow

find, update, page = HANDOVERS.find, HANDOVERS.update, HANDOVERS.page
put_step = HANDOVER_STEPS.put  # those of an undo are not in the plan


def insert(db: Database, row: HandoverRow, steps: list[HandoverStepRow]) -> None:
    """Writes the whole plan at once: half a plan could be neither finished nor undone."""
    with db.transaction():
        HANDOVERS.insert(db, row)
        for step in steps:
            HANDOVER_STEPS.insert(db, step)


def totals(db: Database) -> dict[str, tuple[int, float]]:
    """How many hand-overs ended in each state, and their seconds together, since the box was made."""
    found = db.execute(
        "SELECT state, sum(number), sum(milliseconds) / 1000.0 FROM"
        " (SELECT state, 1 AS number, CAST(round(1000 * (ended_s - started_s)) AS INTEGER) AS milliseconds"
        "  FROM handovers WHERE ended_s IS NOT NULL UNION ALL SELECT state, number, milliseconds FROM handovers_gone)"
        " GROUP BY state"
    )
    return {state: (count, seconds) for state, count, seconds in found}


def list_open(db: Database) -> list[HandoverRow]:
    """Those without an end, oldest first, which a restart has to finish or undo."""
    return HANDOVERS.list_all(db, "ended_s IS NULL")


def steps(db: Database, handover_id: str) -> list[HandoverStepRow]:
    return HANDOVER_STEPS.list_all(db, "handover_id = ?", handover_id)
