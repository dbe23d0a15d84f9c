"""Limits an owner's stored objects and unfinished work, and how full the disk gets, by counting before more is
admitted. Tracks quotas and usage of keys: writes the gateways' sums to the store and sends used-up quotas back.

Limits apply to the owner, not to the key: ten keys do not allow ten times as much. Admins and the box itself are not
limited. A file is checked once it has arrived, in the transaction that stores it; an upload is checked when it is
announced.

A full disk also stops work that would free space: SQLite cannot revoke a key, a job cannot save its state. So the last
bytes are reserved for the box itself.
"""

from __future__ import annotations

import datetime
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from appliance.controller.bus.bus import Bus
from appliance.controller.interfaces.config import GIB, ControllerConfig, OwnerBounds
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.store import jobs, keys, usage
from appliance.store.database import Database
from appliance.store.rows import UNFINISHED, KeyRow

ANSWERS_PER_INPUT = 3
"""Answers of a batch are longer than its lines: an error is three times as long as a short one."""
# A key without a row, as tests use, counts as its own owner.
_OF = "key_id IN (SELECT ?1 UNION SELECT id FROM keys WHERE owner = (SELECT owner FROM keys WHERE id = ?1))"
_TUNED = "models WHERE kind = 'fine-tuned' AND owner IN (SELECT owner FROM keys WHERE id = ?1)"
_UNFINISHED = {table: f"{table} WHERE {where} AND {_OF}" for table, where in UNFINISHED.items()}
# An upload in progress counts twice its announced size (the disk holds its parts and the file); an unfinished batch
# counts its expected answers.
_STORED = (
    *((1, f"{table} WHERE {_OF}") for table in ("files", "evals", "eval_runs")),
    (1, f"versions WHERE model IN (SELECT id FROM {_TUNED})"),
    (2, _UNFINISHED["uploads"]),
    (ANSWERS_PER_INPUT, f"files JOIN (SELECT input_file_id FROM {_UNFINISHED['batches']}) ON input_file_id = files.id"),
)


class Disk:
    """The volume of `path`. floor_bytes: reserve of the box; None: 2 % of the volume, 2 to 20 GiB, at most a tenth."""

    def __init__(self, path: Path, floor_bytes: int | None, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs):
        self._path, self._floor_bytes, self._statvfs = path, floor_bytes, statvfs

    def room_bytes(self) -> int:
        """Return the free bytes above the floor; negative if the disk is fuller."""
        now = self._statvfs(self._path)
        total, floor = now.f_blocks * now.f_frsize, self._floor_bytes
        floor = min(max(2 * GIB, total // 50), 20 * GIB, total // 10) if floor is None else floor
        return now.f_bavail * now.f_frsize - floor

    def check(self, more_bytes: int = 0) -> None:
        """Raise ApiError 507 if writing this many bytes would leave less than the floor free."""
        room = self.room_bytes()
        if more_bytes > room or room <= 0:
            more = f"; {more_bytes} more are needed" if more_bytes else ""
            raise _no_room(f"has {max(room, 0)} bytes free besides its own reserve{more}")


@contextmanager
def disk_may_be_full() -> Iterator[None]:
    """Turn an OSError for a full disk in the block into ApiError 507."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room("is full") from error
        raise


def _no_room(why: str) -> ApiError:
    message = (
        f"The disk of the box {why}. Delete files, models or stored responses first, or ask an admin to make room "
        "([controller] disk_floor_bytes is what stays free)."
    )
    return ApiError(507, message, code="insufficient_storage", kind="server_error", headers=NEVER_RETRY)


class Quotas:
    """Checks limits. Raises ApiError: 429 for too many objects, 413 for too many bytes, 507 to all on a short disk."""

    def __init__(self, db: Database, config: ControllerConfig, disk: Disk):
        self._db, self._config, self.disk = db, config, disk

    def bounds(self, key_id: str) -> OwnerBounds:
        """Return the limits of this key: the box's own, unless the key overrides them."""
        row = keys.find(self._db, key_id)
        return self._config.bounds.model_copy(update=row.bounds) if row and row.bounds else self._config.bounds

    def check(self, caller: Principal, more_bytes: int = 0, *, begins: bool = False) -> None:
        """Check that the caller may store this many more bytes.

        Args:
            begins: the bytes belong to new work: a job, batch, evaluation run, background response or upload.
        """
        self.disk.check(more_bytes)
        if caller.is_admin or caller.key_id is None:
            return
        bounds = self.bounds(caller.key_id)

        def total(expression: str, *tables: str) -> int:
            """Sum an SQL expression over the rows that all keys of this key's owner have in these tables."""
            select = f"SELECT coalesce({expression}, 0) FROM"
            return sum(int(self._db.value(f"{select} {table}", [caller.key_id])) for table in tables)

        if begins and (number := total("count(*)", *_UNFINISHED.values())) >= bounds.unfinished:
            text = (
                f"Your keys have {number} jobs, batches, runs of evals, responses in background and uploads under way, "
                f"of at most {bounds.unfinished}. Wait for one to end or cancel one."
            )
            raise _over(429, text, "unfinished", {"retry-after": "30"})
        size = sum(times * total("sum(bytes)", where) for times, where in _STORED)
        if size + max(more_bytes, 1) > bounds.bytes:
            more = f"; {more_bytes} more do not fit" if more_bytes else ""
            text = f"Your files, models and evals hold {size} of at most {bounds.bytes} bytes{more}. Delete some first."
            raise _over(413, text, "bytes")


def _over(status: int, text: str, bound: str, headers: dict[str, str] = NEVER_RETRY) -> ApiError:
    kind = "insufficient_quota" if status == 429 else "invalid_request_error"
    text = f"{text} An admin can give a key a higher bound `{bound}`."
    return ApiError(status, text, bound, "limit_reached", kind=kind, headers=headers)


# --- what keys spend


USAGE_EVERY_S = 5.0
EXPIRED_KEPT_S = 90 * 86_400.0
"""How long gateways know an expired key, and do not call it unknown."""
_NAMED_BY = ("key", "model", "version")


class Spending:
    """Adds up the "usage" messages of the bus, and publishes the keys.

    Gateways reset their counts after sending them, so sums that cannot be written yet (full disk) are held here."""

    def __init__(self, db: Database, bus: Bus):
        self._db, self._bus = db, bus
        self._unwritten: dict[tuple[str, ...], Counter[str]] = {}
        bus.on_usage = self.take

    def publish_keys(self) -> None:
        """Send the current keys to the gateways; call it after a change of permissions, quotas or logins."""
        self._bus.publish(keys=key_table(self._db, time.time()))

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Write these rows and earlier rows that could not be written. rows: {"key", "model", "version", "requests",
        "errors", "prompt_tokens", "completion_tokens"}, "refused" optional. Raises sqlite3.Error."""
        for row in rows:
            counts = {name: count for name, count in row.items() if name not in _NAMED_BY}
            self._unwritten.setdefault(tuple(row[part] for part in _NAMED_BY), Counter()).update(counts)
        rows = [dict(zip(_NAMED_BY, name, strict=True)) | counts for name, counts in self._unwritten.items()]
        now_s = time.time()
        named = [row for key in {row["key"] for row in rows} if (row := keys.find(self._db, key)) is not None]
        before = [spent_quota(self._db, row, now_s) for row in named]
        usage.add(self._db, rows, now_s)
        self._unwritten.clear()
        if [spent_quota(self._db, row, now_s) for row in named] != before:
            self.publish_keys()

    async def flush(self) -> None:
        """Write rows that an earlier `take` could not write; called every `USAGE_EVERY_S`."""
        self.take([])


def spent_quota(db: Database, row: KeyRow, now_s: float) -> tuple[float | None, str]:
    """Return when the key's used-up quota is renewed (Unix time), and a phrase naming the quota; (None, "") if none is
    used up. Days and months are those of UTC."""
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
    # On the last day of a month both quotas are renewed at once: name the more exceeded one.
    end_s, _, words = max(spent, default=(None, 0, ""))
    return end_s, words


def key_table(db: Database, now_s: float) -> dict[str, dict[str, Any]]:
    """Return the gateways' table of keys by SHA-256: live keys with their page logins and the limits that apply, and
    expired keys with their time of expiry."""
    logins: dict[str, dict[str, Any]] = {}
    for login in keys.list_sessions(db, now_s):
        logins.setdefault(login.key_id, {})[login.sha256] = {"id": login.id, "until_s": login.until_s}
    trained = cache(partial(jobs.names_made_by, db))  # read once: an owner may have many keys, each with a list
    where = "expires_s >= ? AND revoked_s IS NOT NULL AND revoked_s >= expires_s"
    expired = keys.list_all(db, where, now_s - EXPIRED_KEPT_S)
    table: dict[str, dict[str, Any]] = {row.sha256: {"id": row.id, "expires_s": row.expires_s} for row in expired}
    for row in keys.list_all(db, "revoked_s IS NULL"):
        (spent_until_s, spent), owner = spent_quota(db, row, now_s), row.owner or row.id
        limits = {
            "models": None if row.models is None else sorted({*row.models, *trained(owner)}),
            "requests_per_minute": row.requests_per_minute,
            "tokens_per_minute": row.tokens_per_minute,
            "spent_until_s": spent_until_s,
            "spent_quota": spent or None,
            "quota": min(filter(None, (row.tokens_per_day, row.tokens_per_month)), default=None),
            "expires_s": row.expires_s,
            "sessions": logins.get(row.id),
        }
        applied = {name: value for name, value in limits.items() if value is not None}
        table[row.sha256] = {"id": row.id, "owner": owner, "scopes": row.scopes} | applied
    return table
