"""Logins of the page: a key, exchanged for a token of two halves, of which only the SHA-256 of both is kept."""

from __future__ import annotations

import hashlib
import secrets

from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.rows import PAGE_SESSIONS, PageSessionRow

find, end = PAGE_SESSIONS.find, PAGE_SESSIONS.delete


def create(db: Database, key_id: str, *, agent: str, now_s: float, until_s: float) -> tuple[PageSessionRow, str, str]:
    """A new session of this key, with the halves of its token: the browser's cookie, and what the page keeps."""
    cookie, page = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    sha256 = hashlib.sha256(f"{cookie}.{page}".encode()).hexdigest()  # as the gateway computes it
    row = PageSessionRow(new_id("session_", 16), sha256, key_id, now_s, until_s, agent)
    return PAGE_SESSIONS.insert(db, row), cookie, page


def is_live(db: Database, session_id: str, key_id: str, now_s: float) -> bool:
    query = "SELECT 1 FROM page_sessions WHERE id = ? AND key_id = ? AND until_s > ?"
    return db.value(query, [session_id, key_id, now_s]) is not None


def list_live(db: Database, now_s: float, owner: str | None = None) -> list[PageSessionRow]:
    """Live logins with an owner's keys, None: with all; oldest first."""
    return db.all(
        PageSessionRow,
        "SELECT page_sessions.* FROM page_sessions JOIN keys ON keys.id = key_id"
        " WHERE until_s > ?1 AND revoked_s IS NULL AND (?2 IS NULL OR owner = ?2) ORDER BY page_sessions.seq",
        [now_s, owner],
    )


def end_of_key(db: Database, key_id: str) -> int:
    """Returns how many there were."""
    return db.execute("DELETE FROM page_sessions WHERE key_id = ?", [key_id]).rowcount


def forget_ended(db: Database, now_s: float) -> int:
    """Deletes those whose time is over; returns how many."""
    return db.execute("DELETE FROM page_sessions WHERE until_s <= ?", [now_s]).rowcount
