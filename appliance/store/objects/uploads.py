"""Uploads in parts and their parts. The bytes of a part lie at `uploads/<upload id>/<part id>`."""

from __future__ import annotations

from appliance.store import chunks
from appliance.store.database import Database
from appliance.store.rows import UploadPartRow, UploadRow
from appliance.store.table import Table

_TABLE, _PARTS = Table("uploads", UploadRow), Table("upload_parts", UploadPartRow, "upload_id", "id")
insert, find, update = _TABLE.insert, _TABLE.find_visible, _TABLE.update
insert_part, find_part = _PARTS.insert, _PARTS.find


def pending_ids(db: Database) -> set[str]:
    return set(db.column("SELECT id FROM uploads WHERE status = 'pending'"))


def overdue(db: Database, *, now_s: float) -> list[UploadRow]:
    return db.all(UploadRow, "SELECT * FROM uploads WHERE status = 'pending' AND expires_s <= ?", [now_s])


def forget_some(db: Database, before_s: float) -> bool:
    """Delete a few of the parts of uploads that have ended and were made before this moment, then of these. False: none
    was left. An upload has up to 10,000 parts, which one statement would take along by their references."""
    ended = "status != 'pending' AND created_s < ?"
    return chunks.delete_few(
        db, "upload_parts", f"upload_id IN (SELECT id FROM uploads WHERE {ended})", [before_s]
    ) or chunks.delete_few(db, "uploads", ended, [before_s])


def delete_part(db: Database, part_id: str) -> None:
    db.execute("DELETE FROM upload_parts WHERE id = ?", [part_id])


def sizes(db: Database, upload_id: str) -> dict[str, int]:
    """Bytes of the parts that have arrived, by id."""
    return dict(db.execute("SELECT id, bytes FROM upload_parts WHERE upload_id = ?", [upload_id]).fetchall())


def stored(db: Database, upload_id: str) -> tuple[int, int]:
    """Number and bytes of the parts that have arrived."""
    found = db.execute("SELECT parts, parts_bytes FROM uploads WHERE id = ?", [upload_id]).fetchone()
    return (0, 0) if found is None else (found["parts"], found["parts_bytes"])
