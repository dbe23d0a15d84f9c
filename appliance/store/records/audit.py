"""Who did what: one row per change."""

from __future__ import annotations

from appliance.store.database import Database, Page
from appliance.store.rows import AuditRow


def insert(db: Database, row: AuditRow) -> None:
    db.insert("audit", row, name=row.id)


def page(db: Database, *, after: str | None, limit: int) -> Page[AuditRow]:
    """Newest first."""
    return db.page(AuditRow, "audit", after=after, limit=limit)
