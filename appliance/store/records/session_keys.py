"""Keys of single commands on the box itself. They go, and what they spent stays."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.records import usage

OWNER = "the box itself"
FORGET_AT_ONCE = 200


def count_live(db: Database) -> int:
    return int(db.value("SELECT count(*) FROM keys WHERE session AND revoked_s IS NULL"))


def delete_responses(db: Database, before_s: float) -> None:
    """Delete the responses of keys that were revoked before this moment."""
    db.delete("responses", "key_id IN (SELECT id FROM keys WHERE session AND revoked_s < ?)", [before_s])


def forget(db: Database, before_s: float) -> int:
    """Delete up to FORGET_AT_ONCE of those revoked before this moment, whose responses have gone; returns how many.
    Usage keeps their requests under no key, like those of the box itself."""
    with db.transaction():
        ids = db.column(
            "SELECT id FROM keys WHERE session AND revoked_s < ? ORDER BY revoked_s LIMIT ?", [before_s, FORGET_AT_ONCE]
        )
        for key_id in ids:
            usage.move(db, key_id, "")
            db.execute("DELETE FROM keys WHERE id = ?", [key_id])
    return len(ids)
