"""Uploads in parts and their parts. The bytes of a part lie at `uploads/<upload id>/<part id>`."""

from __future__ import annotations

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


def delete_ended(db: Database, before_s: float) -> None:
    """Delete uploads that have ended and were made before this moment, with their parts: up to 10,000 each."""
    ended = "status != 'pending' AND created_s < ?"
    db.delete("upload_parts", f"upload_id IN (SELECT id FROM uploads WHERE {ended})", [before_s])
    db.delete("uploads", ended, [before_s])


def sizes(db: Database, upload_id: str) -> dict[str, int]:
    """Bytes of the parts that have arrived, by id."""
    return dict(db.execute("SELECT id, bytes FROM upload_parts WHERE upload_id = ?", [upload_id]).fetchall())


def stored(db: Database, upload_id: str) -> tuple[int, int]:
    """Number and bytes of the parts that have arrived."""
    found = db.execute("SELECT parts, parts_bytes FROM uploads WHERE id = ?", [upload_id]).fetchone()
    return (0, 0) if found is None else (found["parts"], found["parts_bytes"])
