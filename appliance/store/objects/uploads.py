"""Uploads in parts and their parts. The bytes of a part lie at `uploads/<upload id>/<part id>`."""

from __future__ import annotations

from typing import Any

from appliance.store import chunks
from appliance.store.database import Database
from appliance.store.rows import UploadPartRow, UploadRow


def insert(db: Database, row: UploadRow) -> None:
    db.insert("uploads", row, name=row.id)


def find(db: Database, upload_id: str, *, viewer: str | None) -> UploadRow | None:
    """viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself."""
    return db.one(UploadRow, "SELECT * FROM uploads WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", [upload_id, viewer])


def update(db: Database, upload_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("uploads", UploadRow, {"id": upload_id}, changes)


def pending_ids(db: Database) -> set[str]:
    return {row["id"] for row in db.execute("SELECT id FROM uploads WHERE status = 'pending'")}


def overdue(db: Database, *, now_s: float) -> list[UploadRow]:
    return db.all(UploadRow, "SELECT * FROM uploads WHERE status = 'pending' AND expires_s <= ?", [now_s])


def forget_some(db: Database, before_s: float) -> bool:
    """Delete a few of the parts of uploads that have ended and were made before this moment, then of these. False: none
    was left. An upload has up to 10,000 parts, which one statement would take along by their references."""
    ended = "status != 'pending' AND created_s < ?"
    return chunks.delete_few(
        db, "upload_parts", f"upload_id IN (SELECT id FROM uploads WHERE {ended})", [before_s]
    ) or chunks.delete_few(db, "uploads", ended, [before_s])


def insert_part(db: Database, row: UploadPartRow) -> None:
    db.insert("upload_parts", row, name=row.id)


def find_part(db: Database, upload_id: str, part_id: str) -> UploadPartRow | None:
    return db.one(UploadPartRow, "SELECT * FROM upload_parts WHERE id = ? AND upload_id = ?", [part_id, upload_id])


def delete_part(db: Database, part_id: str) -> None:
    db.execute("DELETE FROM upload_parts WHERE id = ?", [part_id])


def sizes(db: Database, upload_id: str) -> dict[str, int]:
    """Bytes of the parts that have arrived, by id."""
    return dict(db.execute("SELECT id, bytes FROM upload_parts WHERE upload_id = ?", [upload_id]).fetchall())


def stored(db: Database, upload_id: str) -> tuple[int, int]:
    """Number and bytes of the parts that have arrived."""
    found = db.execute("SELECT parts, parts_bytes FROM uploads WHERE id = ?", [upload_id]).fetchone()
    return (0, 0) if found is None else (found["parts"], found["parts_bytes"])
