"""Who did what: one row per change."""

from __future__ import annotations

from appliance.store.database import Database, Page
from appliance.store.rows import AuditRow
from appliance.store.table import Table

_TABLE = Table("audit", AuditRow)
insert = _TABLE.insert


def page(db: Database, *, after: str | None, limit: int) -> Page[AuditRow]:
    """Newest first."""
    return db.page(AuditRow, "audit", after=after, limit=limit)
