"""Uploads in parts. A part is the file `uploads/<upload id>/<part id>`, without a row."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import UPLOADS, UploadRow

insert, find, update = UPLOADS.insert, UPLOADS.find_visible, UPLOADS.update


def overdue(db: Database, *, now_s: float) -> list[UploadRow]:
    return UPLOADS.list_all(db, "status = 'pending' AND expires_s <= ?", now_s)


def delete_ended(db: Database, before_s: float) -> None:
    """Delete uploads that have ended and were made before this moment."""
    db.delete("uploads", "status != 'pending' AND created_s < ?", [before_s])
