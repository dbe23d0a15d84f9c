"""Tracks what keys may spend and have spent: writes the gateways' sums to the store, sends used-up quotas back."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from appliance.controller.bus.bus import Bus
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.records import keys, page_sessions, usage
from appliance.store.rows import KeyRow

USAGE_EVERY_S = 5.0
EXPIRED_TOLD_S = 90 * 86_400.0
"""How long gateways tell an expired key from one that never was."""
_NAMED_BY = ("key", "model", "version")


class Spending:
    """Handles the "usage" messages of the bus, and publishes the keys.

    The gateways restart their counts from zero after sending: sums that cannot be written now (a full disk) are kept
    here until they can."""

    def __init__(self, db: Database, bus: Bus):
        self._db, self._bus = db, bus
        self._unwritten: dict[tuple[str, ...], Counter[str]] = {}
        bus.on_usage = self.take

    def publish_keys(self) -> None:
        """Permissions or quotas of keys changed: the gateways get the keys of now."""
        self._bus.keys_changed(key_table(self._db, time.time()))

    def take(self, rows: list[dict[str, Any]]) -> None:
        """rows: {"key", "model", "version", "requests", "errors", "prompt_tokens", "completion_tokens"}, perhaps
        "refused". Raises sqlite3.Error when they cannot be written now; the next `write` then includes them."""
        for row in rows:
            counts = {what: count for what, count in row.items() if what not in _NAMED_BY}
            self._unwritten.setdefault(tuple(row[part] for part in _NAMED_BY), Counter()).update(counts)
        self.write()

    async def flush(self) -> None:
        """Write what an earlier `take` could not; called every `USAGE_EVERY_S`."""
        self.write()

    def write(self) -> None:
        """Write everything received that is not in the store yet. Raises sqlite3.Error."""
        rows = [dict(zip(_NAMED_BY, name, strict=True)) | counts for name, counts in self._unwritten.items()]
        now_s = time.time()
        named = [row for key in {row["key"] for row in rows} if (row := keys.find(self._db, key)) is not None]
        before = [spent_quota(self._db, row, now_s) for row in named]
        usage.add(self._db, rows, now_s)
        self._unwritten.clear()
        if [spent_quota(self._db, row, now_s) for row in named] != before:
            self.publish_keys()


def spent_quota(db: Database, row: KeyRow, now_s: float) -> tuple[float | None, str]:
    """Unix time at which the key's used-up quota is renewed, and which one that is, in words; (None, "") while some is
    left. Days and months are those of UTC."""
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    next_month = (month + datetime.timedelta(days=32)).replace(day=1)
    spent = [
        (end.timestamp(), over, f"{limit:,} tokens a {span}")
        for limit, span, begin, end in (
            (row.tokens_per_day, "day", day, day + datetime.timedelta(days=1)),
            (row.tokens_per_month, "month", month, next_month),
        )
        if limit is not None and (over := usage.tokens_since(db, row.id, begin.timestamp()) - limit) >= 0
    ]
    # On the last day of a month both are renewed at once: the one that is overdrawn most is named.
    end_s, _, words = max(spent, default=(None, 0, ""))
    return end_s, words


def key_table(db: Database, now_s: float) -> dict[str, dict[str, Any]]:
    """The live keys for the gateways' table, by SHA-256, without limits that do not apply, each with its logins of the
    page; and, of keys that have expired, when."""
    logins: dict[str, dict[str, Any]] = {}
    for login in page_sessions.list_live(db, now_s):
        logins.setdefault(login.key_id, {})[login.sha256] = {"id": login.id, "until_s": login.until_s}
    made = cache(partial(jobs.names_made_by, db))  # an owner may have many keys, each with a list
    rows = keys.list_ended(db, now_s - EXPIRED_TOLD_S)
    ended: dict[str, dict[str, Any]] = {row.sha256: {"id": row.id, "expires_s": row.expires_s} for row in rows}
    return ended | {row.sha256: _key(db, row, now_s, logins.get(row.id), made) for row in keys.list_live(db)}


def _key(
    db: Database, row: KeyRow, now_s: float, sessions: dict[str, Any] | None, made: Callable[[str], list[str]]
) -> dict[str, Any]:
    """made: names of what an owner's jobs made."""
    (spent_until_s, spent), owner = spent_quota(db, row, now_s), row.owner or row.id
    limits = {
        "models": None if row.models is None else sorted({*row.models, *made(owner)}),
        "requests_per_minute": row.requests_per_minute,
        "tokens_per_minute": row.tokens_per_minute,
        "spent_until_s": spent_until_s,
        "spent_quota": spent or None,
        "quota": min((one for one in (row.tokens_per_day, row.tokens_per_month) if one is not None), default=None),
        "expires_s": row.expires_s,
        "sessions": sessions,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return {"id": row.id, "owner": owner, "scopes": row.scopes} | given
