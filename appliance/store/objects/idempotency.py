"""Which request made which resource, so that a request that is sent twice makes one resource."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import IdempotencyRow
from appliance.store.table import Table

_TABLE = Table("idempotency", IdempotencyRow, "key_id", "route", "resource_id")


def remember(db: Database, row: IdempotencyRow) -> None:
    """A second use of an idempotency key replaces the first, whose resource is gone by then."""
    if row.idempotency_key is not None:
        db.execute(
            "DELETE FROM idempotency WHERE key_id = ? AND route = ? AND idempotency_key = ?",
            [row.key_id, row.route, row.idempotency_key],
        )
    _TABLE.insert(db, row)


def by_key(db: Database, key_id: str, route: str, idempotency_key: str) -> IdempotencyRow | None:
    return db.one(
        IdempotencyRow,
        "SELECT * FROM idempotency WHERE key_id = ? AND route = ? AND idempotency_key = ?",
        [key_id, route, idempotency_key],
    )


def last_by_body(db: Database, key_id: str, route: str, body_sha256: str, *, since_s: float) -> IdempotencyRow | None:
    """The newest request with this body from this key, if it is no older than `since_s`."""
    newest = db.one(
        IdempotencyRow,
        "SELECT * FROM idempotency WHERE key_id = ? AND route = ? AND body_sha256 = ? ORDER BY seq DESC LIMIT 1",
        [key_id, route, body_sha256],
    )
    return newest if newest is not None and newest.created_s >= since_s else None


def delete_before(db: Database, before_s: float, keyless_before_s: float) -> None:
    """Delete those made before these moments. keyless: without an Idempotency-Key, found by their body."""
    db.delete("idempotency", "created_s < ?", [before_s])
    db.delete("idempotency", "idempotency_key IS NULL AND created_s < ?", [keyless_before_s])
