"""Batches: what they ask, how far they are, and which files they left.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

import time
from typing import Any

from appliance.store.database import Database
from appliance.store.rows import BATCHES, UNFINISHED, BatchRow, BatchStatus

insert, find, update, page = BATCHES.insert, BATCHES.find_visible, BATCHES.update, BATCHES.page_visible


def using_file(db: Database, file_id: str) -> BatchRow | None:
    """An unfinished batch that reads this file."""
    return BATCHES.first(db, f"input_file_id = ? AND {UNFINISHED['batches']}", file_id)


def set_status(db: Database, batch_id: str, status: BatchStatus, **changes: Any) -> None:
    """Raises RowNotFound."""
    with db.transaction():
        row = BATCHES.find(db, batch_id)
        moments = {status: time.time(), **(row.moments if row else {})}
        update(db, batch_id, status=status, moments=moments, **changes)
