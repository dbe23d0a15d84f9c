"""Answers of /v1/responses, each with its own input and the earlier one it goes on from."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database
from appliance.store.rows import UNFINISHED_RESPONSE, ResponseRow

_CHAIN = """
    WITH RECURSIVE chain (id, previous_id, depth) AS (
        SELECT id, previous_id, 0 FROM responses WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)
        UNION ALL
        SELECT earlier.id, earlier.previous_id, depth + 1
        FROM chain JOIN responses AS earlier ON earlier.id = chain.previous_id AND (?2 IS NULL OR earlier.owner = ?2)
        WHERE depth < ?3
    )
"""
_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED_RESPONSE)


def insert(db: Database, row: ResponseRow) -> bool:
    """False, and nothing done, if there is one with this id: a copy may arrive twice."""
    if db.execute("SELECT 1 FROM responses WHERE id = ?", [row.id]).fetchone() is not None:
        return False
    db.insert("responses", row, name=row.id)
    return True


def find(db: Database, response_id: str) -> ResponseRow | None:
    """For the box's own work; who asks for one sees it through `StoredResponses`, if it is his."""
    return db.one(ResponseRow, "SELECT * FROM responses WHERE id = ?", [response_id])


def update(db: Database, response_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("responses", ResponseRow, {"id": response_id}, changes)


def chain_bytes(db: Database, response_id: str, viewer: str | None, *, max_turns: int) -> int:
    """Of the responses of this owner (None: of all) that lead to this one, and of itself, as far back as max_turns."""
    parameters = [response_id, viewer, max_turns - 1]
    (size,) = db.execute(f"{_CHAIN} SELECT SUM(bytes) FROM chain JOIN responses USING (id)", parameters).fetchone()
    return size or 0


def chain_ids(db: Database, response_id: str, viewer: str | None, *, max_turns: int) -> list[str]:
    """Their ids, oldest first, itself the last; empty if it is not there. The first of them names another one if that
    is gone, or if there are more than max_turns."""
    parameters = [response_id, viewer, max_turns - 1]
    return [row["id"] for row in db.execute(f"{_CHAIN} SELECT id FROM chain ORDER BY depth DESC", parameters)]


def touch(
    db: Database, response_id: str, viewer: str | None, *, max_turns: int, now_s: float, older_than_s: float
) -> None:
    """It and what leads to it were gone on from: each is kept as long as the newest that needs it. Only those that were
    not touched for a while: a row's pages are written anew, its texts too."""
    db.execute(
        f"{_CHAIN} UPDATE responses SET used_s = ?4 WHERE used_s < ?5 AND id IN (SELECT id FROM chain)",
        [response_id, viewer, max_turns - 1, now_s, older_than_s],
    )


def delete(db: Database, response_id: str) -> None:
    db.execute("DELETE FROM responses WHERE id = ?", [response_id])


def list_unfinished(db: Database, *, key_id: str | None = None) -> list[ResponseRow]:
    """Oldest first: the order in which they are answered. key_id: only those that were asked with this key."""
    return db.all(
        ResponseRow,
        f"SELECT * FROM responses WHERE status IN ({_UNFINISHED}) AND (?1 IS NULL OR key_id = ?1) ORDER BY seq",
        [key_id],
    )


def totals(db: Database) -> tuple[int, int]:
    """How many there are, and their bytes."""
    row = db.execute("SELECT COUNT(*) AS number, COALESCE(SUM(bytes), 0) AS bytes FROM responses").fetchone()
    return row["number"], row["bytes"]


def delete_unused(db: Database, before_s: float) -> int:
    """Those neither made nor gone on from since; an unfinished one stays."""
    return db.execute(f"DELETE FROM responses WHERE used_s < ? AND status NOT IN ({_UNFINISHED})", [before_s]).rowcount


def delete_of_revoked_keys(db: Database) -> int:
    """Those whose owner has no live key left."""
    return db.execute(
        "DELETE FROM responses WHERE key_id IN (SELECT id FROM keys WHERE revoked_s IS NOT NULL)"
        " AND owner NOT IN (SELECT owner FROM keys WHERE revoked_s IS NULL)"
    ).rowcount


def shrink(db: Database, to_bytes: int) -> int:
    """Delete the longest unused of whichever key holds most until this many bytes are left; returns how many went."""
    deleted, (_, left) = 0, totals(db)
    while left > to_bytes:
        rows = db.execute(
            f"SELECT id, bytes FROM responses WHERE status NOT IN ({_UNFINISHED}) AND key_id = (SELECT key_id FROM "
            f"responses WHERE status NOT IN ({_UNFINISHED}) GROUP BY key_id ORDER BY SUM(bytes) DESC LIMIT 1) "
            "ORDER BY used_s, seq LIMIT 100"
        ).fetchall()
        if not rows:
            break  # what is left is being answered
        for row in rows:
            if left <= to_bytes:
                break
            delete(db, row["id"])
            left -= row["bytes"]
            deleted += 1
    return deleted
