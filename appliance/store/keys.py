"""API keys: 256 random bits, shown once and stored as SHA-256 (1 µs to check; a slow hash protects only weak secrets).
Also logins of the web page: a key is exchanged for a token with two halves; only the token's SHA-256 is stored."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import replace
from typing import Any

from appliance.store.database import Database, RowNotFound
from appliance.store.rows import KEYS, PAGE_SESSIONS, KeyRow, PageSessionRow, new_id
from runtime.logs import minute

KEY_PREFIX = "sk-appl-"
SCOPES = ("inference", "fine_tuning", "read", "metrics", "admin")
_SHOWN_CHARACTERS = len(KEY_PREFIX) + 4
insert, update, first, list_all, page = KEYS.insert, KEYS.update, KEYS.first, KEYS.list_all, KEYS.page


def create(db: Database, name: str, scopes: list[str], owner: str | None = None, **limits: Any) -> tuple[KeyRow, str]:
    """Store a new key; return its row and the key, which cannot be read later. `owner` defaults to the name;
    `limits` are fields of KeyRow.

    Raises sqlite3.IntegrityError if a live key has this name; a revoked key's name may be reused.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    made: dict[str, Any] = {"sha256": fingerprint(key), "prefix": key[:_SHOWN_CHARACTERS], "created_s": time.time()}
    row = KeyRow(new_id("key_"), name, scopes=list(scopes), owner=name if owner is None else owner, **made, **limits)
    insert(db, row)
    return row, key


def renew(db: Database, key_id: str) -> tuple[KeyRow, str]:
    """Give a live key a new secret; the old secret and the page logins made with it end. Return the row and the secret.
    Raises RowNotFound."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    with db.transaction():
        update(db, key_id, sha256=fingerprint(key), prefix=key[:_SHOWN_CHARACTERS])
        end_sessions(db, key_id)
    return KEYS.get(db, key_id), key


def fingerprint(key: str) -> str:
    """Return the key's SHA-256 in hex, as the gateway computes it from the Authorization header."""
    return hashlib.sha256(key.encode()).hexdigest()


def find(db: Database, id_or_name: str) -> KeyRow | None:
    """Return the key with this id, else the live key with this name, else the last revoked key with this name."""
    # Two queries, each by an index: for one query on id or name, SQLite would read all keys.
    of_name = "SELECT * FROM keys WHERE name = ? ORDER BY revoked_s IS NULL DESC, seq DESC LIMIT 1"
    return KEYS.find(db, id_or_name) or db.one(KeyRow, of_name, [id_or_name])


def owner_of(db: Database, key_id: str) -> str:
    """Return the owner of objects made with this key; for an unknown key, its id."""
    return standing(db, key_id)[0]


def without_key(db: Database, owners: list[str]) -> list[str]:
    """Return those `owners` who have no live key."""
    live = "SELECT 1 FROM keys WHERE owner = ? AND revoked_s IS NULL"
    return [owner for owner in owners if db.value(live, [owner]) is None]


def standing(db: Database, key_id: str | None) -> tuple[str, str]:
    """Return the owner as `owner_of` does, and how the key ended ("was revoked"); "" if the key is live."""
    row = db.execute("SELECT id, owner, revoked_s, expires_s FROM keys WHERE id = ?", [key_id]).fetchone()
    if row is None:
        return key_id or "", ""
    ended, expires_s = "", row["expires_s"]
    if row["revoked_s"] is not None:
        expired = expires_s is not None and row["revoked_s"] >= expires_s
        ended = f"expired at {minute(expires_s)}" if expired else "was revoked"
    return row["owner"] or row["id"], ended


def how_ended(db: Database, key_id: str | None) -> str:
    """Return how the key ended, such as "was revoked"; "" if the key is live."""
    return standing(db, key_id)[1]


def revoke(db: Database, id_or_name: str) -> KeyRow:
    """Revoke a key and end its page logins. Idempotent: the first revocation's time stays. Raises RowNotFound."""
    row = find(db, id_or_name)
    if row is None:
        raise RowNotFound("keys", id_or_name)
    if row.revoked_s is None:
        row = replace(row, revoked_s=time.time())
        with db.transaction():
            update(db, row.id, revoked_s=row.revoked_s)
            end_sessions(db, row.id)
    return row


# --- logins of the web page


def create_session(
    db: Database, key_id: str, *, agent: str, now_s: float, until_s: float
) -> tuple[PageSessionRow, str, str]:
    """Start a login with this key; return its row and the token's halves: for the browser's cookie, for the page."""
    cookie, page = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    sha256 = hashlib.sha256(f"{cookie}.{page}".encode()).hexdigest()  # as the gateway computes it
    row = PageSessionRow(new_id("session_", 16), sha256, key_id, now_s, until_s, agent)
    return PAGE_SESSIONS.insert(db, row), cookie, page


def list_sessions(db: Database, now_s: float, owner: str | None = None) -> list[PageSessionRow]:
    """List live logins with this owner's keys, or with all keys for None; oldest first."""
    return db.all(
        PageSessionRow,
        "SELECT page_sessions.* FROM page_sessions JOIN keys ON keys.id = key_id"
        " WHERE until_s > ?1 AND revoked_s IS NULL AND (?2 IS NULL OR owner = ?2) ORDER BY page_sessions.seq",
        [now_s, owner],
    )


def end_sessions(db: Database, key_id: str) -> int:
    """Delete this key's logins and return their number."""
    return db.execute("DELETE FROM page_sessions WHERE key_id = ?", [key_id]).rowcount
