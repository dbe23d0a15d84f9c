"""Sweeps over hyperparameters.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database, Page, owned_by
from appliance.store.rows import SweepRow

KEPT = 100
"""Of one owner that have ended."""


def insert(db: Database, row: SweepRow) -> None:
    db.insert("sweeps", row, name=row.id)


def find(db: Database, sweep_id: str, *, viewer: str | None = None) -> SweepRow | None:
    return db.one(SweepRow, "SELECT * FROM sweeps WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", [sweep_id, viewer])


def update(db: Database, sweep_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("sweeps", SweepRow, {"id": sweep_id}, changes)


def running(db: Database, owner: str | None = None) -> list[str]:
    """Their ids, oldest first."""
    found = db.execute(
        "SELECT id FROM sweeps WHERE state = 'running' AND (?1 IS NULL OR owner = ?1) ORDER BY seq", [owner]
    )
    return [row["id"] for row in found]


def page(db: Database, *, viewer: str | None, after: str | None, limit: int) -> Page[SweepRow]:
    """Newest first."""
    return db.page(SweepRow, "sweeps", scope=owned_by(viewer), after=after, limit=limit)


def forget_old(db: Database, owner: str) -> None:
    db.execute(
        "DELETE FROM sweeps WHERE owner = ?1 AND state != 'running' AND seq <= coalesce((SELECT seq FROM sweeps"
        " WHERE owner = ?1 AND state != 'running' ORDER BY seq DESC LIMIT 1 OFFSET ?2), 0)",
        [owner, KEPT],
    )
