"""Sweeps over hyperparameters.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import SweepRow
from appliance.store.table import Table

KEPT = 100
"""Ended sweeps that are kept of one owner."""
_TABLE = Table("sweeps", SweepRow)
insert, find, update = _TABLE.insert, _TABLE.find, _TABLE.update
find_visible, page = _TABLE.find_visible, _TABLE.page_visible


def running(db: Database, owner: str | None = None) -> list[str]:
    """Their ids, oldest first."""
    return db.column(
        "SELECT id FROM sweeps WHERE state = 'running' AND (?1 IS NULL OR owner = ?1) ORDER BY seq", [owner]
    )


def forget_old(db: Database, owner: str) -> None:
    db.execute(
        "DELETE FROM sweeps WHERE owner = ?1 AND state != 'running' AND seq <= coalesce((SELECT seq FROM sweeps"
        " WHERE owner = ?1 AND state != 'running' ORDER BY seq DESC LIMIT 1 OFFSET ?2), 0)",
        [owner, KEPT],
    )
