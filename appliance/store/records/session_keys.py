"""Keys of single commands on the box itself: what they spent stays, they do not."""

from __future__ import annotations

import time

from appliance.store.database import Database
from appliance.store.records import usage

OWNER = "the box itself"


def count_live(db: Database) -> int:
    return db.execute("SELECT count(*) FROM keys WHERE session AND revoked_s IS NULL").fetchone()[0]


def revoke_before(db: Database, before_s: float) -> int:
    """Those made before this moment; returns how many were live."""
    return db.execute(
        "UPDATE keys SET revoked_s = ? WHERE session AND revoked_s IS NULL AND created_s < ?", [time.time(), before_s]
    ).rowcount


def forget(db: Database, before_s: float, limit: int = 200) -> int:
    """Delete up to `limit` of those revoked before this moment; usage has their requests under no key, as it has what
    the box does by itself."""
    with db.transaction():
        ids = [row["id"] for row in db.execute(
            "SELECT id FROM keys WHERE session AND revoked_s < ? ORDER BY seq LIMIT ?", [before_s, limit]
        )]  # fmt: skip
        for key_id in ids:
            usage.move(db, key_id, "")
            db.execute("DELETE FROM responses WHERE key_id = ?", [key_id])
            db.execute("DELETE FROM keys WHERE id = ?", [key_id])
    return len(ids)
