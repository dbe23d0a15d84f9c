"""Versions that were deleted and are still to be taken out of a tier."""

from __future__ import annotations

import time

from appliance.store.database import Database
from appliance.store.rows import TierRemovalRow


def insert(db: Database, tier: str, kind: str, model: str, version: str) -> None:
    """Idempotent."""
    db.execute(
        "INSERT OR IGNORE INTO tier_removals (tier, kind, model, version, created_s) VALUES (?, ?, ?, ?, ?)",
        [tier, kind, model, version, time.time()],
    )


def list_of(db: Database, tier: str) -> list[TierRemovalRow]:
    return db.all(TierRemovalRow, "SELECT * FROM tier_removals WHERE tier = ? ORDER BY created_s", [tier])


def delete(db: Database, row: TierRemovalRow) -> None:
    db.execute(
        "DELETE FROM tier_removals WHERE tier = ? AND kind = ? AND model = ? AND version = ?",
        [row.tier, row.kind, row.model, row.version],
    )
