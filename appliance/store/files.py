"""Rows of uploaded and produced files, the caller stores their bytes under the same id. viewer: the requesting owner,
who sees only their own files; None: an admin or the box itself, who see all."""

from __future__ import annotations

import time
from typing import Unpack

from appliance.store.database import Database, Page, Part
from appliance.store.rows import FILES, FileRow

insert, update, delete = FILES.insert, FILES.update, FILES.delete


def find(db: Database, file_id: str, *, viewer: str | None, now_s: float | None = None) -> FileRow | None:
    """Return the file's row; None if it does not exist or has expired by `now_s` (Unix time; None: now)."""
    row, now_s = FILES.find_visible(db, file_id, viewer=viewer), time.time() if now_s is None else now_s
    return None if row is None or (row.expires_s is not None and row.expires_s <= now_s) else row


def page(db: Database, *, viewer: str | None, purpose: str | None, **part: Unpack[Part]) -> Page[FileRow]:
    """Return a page of rows without their reports, which are long and which no list shows."""
    where, parameters = "(expires_s IS NULL OR expires_s > ?)", list[object]([time.time()])
    if purpose is not None:
        where, parameters = where + " AND purpose = ?", [*parameters, purpose]
    return FILES.page_visible(db, viewer=viewer, where=where, parameters=parameters, unread=("report",), **part)
