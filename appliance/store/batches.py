"""Batches: what was asked, how far they are, and which files they left."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database, Page
from appliance.store.rows import UNFINISHED_BATCH, BatchRow

_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED_BATCH)


def insert(db: Database, row: BatchRow) -> None:
    db.insert("batches", row, name=row.id)


def find(db: Database, batch_id: str) -> BatchRow | None:
    return db.one(BatchRow, "SELECT * FROM batches WHERE id = ?", [batch_id])


def update(db: Database, batch_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("batches", BatchRow, {"id": batch_id}, changes)


def page(db: Database, *, after: str | None, limit: int) -> Page[BatchRow]:
    """Newest first."""
    return db.page(BatchRow, "batches", after=after, limit=limit)


def list_unfinished(db: Database) -> list[BatchRow]:
    """Oldest first: the order in which they are worked off."""
    return db.all(BatchRow, f"SELECT * FROM batches WHERE status IN ({_UNFINISHED}) ORDER BY seq")


def using_file(db: Database, file_id: str) -> BatchRow | None:
    """An unfinished batch that reads this file."""
    return db.one(
        BatchRow,
        f"SELECT * FROM batches WHERE input_file_id = ? AND status IN ({_UNFINISHED}) ORDER BY seq LIMIT 1",
        [file_id],
    )
