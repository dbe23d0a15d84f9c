"""Who did what: one row per change."""

from __future__ import annotations

from typing import Unpack

from appliance.store.database import Database, Page, Part
from appliance.store.rows import AuditRow
from appliance.store.table import Table

_TABLE = Table("audit", AuditRow)
insert = _TABLE.insert


def page(db: Database, **part: Unpack[Part]) -> Page[AuditRow]:
    """Newest first."""
    return db.page(AuditRow, "audit", **part)
