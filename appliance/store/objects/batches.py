"""Batches: what they ask, how far they are, and which files they left.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database, Page, owned_by, sql_list
from appliance.store.rows import UNFINISHED_BATCH, BatchRow

_UNFINISHED = sql_list(UNFINISHED_BATCH)


def insert(db: Database, row: BatchRow) -> None:
    db.insert("batches", row, name=row.id)


def find(db: Database, batch_id: str, *, viewer: str | None) -> BatchRow | None:
    return db.one(BatchRow, "SELECT * FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", [batch_id, viewer])


def update(db: Database, batch_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("batches", BatchRow, {"id": batch_id}, changes)


def page(db: Database, *, viewer: str | None, after: str | None, limit: int) -> Page[BatchRow]:
    """Newest first."""
    return db.page(BatchRow, "batches", scope=owned_by(viewer), after=after, limit=limit)


def list_unfinished(db: Database, *, key_id: str | None = None) -> list[BatchRow]:
    """Oldest first, the order in which they are worked off. key_id: only those made with this key."""
    return db.all(
        BatchRow,
        f"SELECT * FROM batches WHERE status IN ({_UNFINISHED}) AND (?1 IS NULL OR key_id = ?1) ORDER BY seq",
        [key_id],
    )


def using_file(db: Database, file_id: str) -> BatchRow | None:
    """An unfinished batch that reads this file."""
    return db.one(
        BatchRow,
        f"SELECT * FROM batches WHERE input_file_id = ? AND status IN ({_UNFINISHED}) ORDER BY seq LIMIT 1",
        [file_id],
    )
