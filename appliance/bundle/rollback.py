"""Leads a box back to the release before: its programs, and its database if the newer release changed the schema."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.backup import DATABASE
from appliance.bundle.carried.errors import Refused
from appliance.bundle.carried.releases import Releases
from appliance.store.copies import FOLDER, Kept, copy_database, kept_copies
from appliance.store.readers import reading_uri
from runtime.moments import stamp

# Table -> the column that identifies a row, and what people call the rows.
_COUNTED = {
    "keys": ("id", "API keys"),
    "files": ("id", "files"),
    "models": ("id", "models"),
    "versions": ("model || '/' || version", "versions of models"),
    "jobs": ("id", "jobs"),
    "batches": ("id", "batches"),
    "responses": ("id", "stored responses"),
    "evals": ("id", "evaluations"),
    "audit": ("seq", "rows of the audit log"),
}
# Rows that were deleted from these tables since stay deleted: all that they had is in the rows.
_ALL_IN_ROWS = ("responses", "evals", "eval_runs")
_MAY_USE = {"model_shares": "model, owner", "permissions": "checkpoint, project_id"}
# Columns of a key: somebody else may know a secret that was replaced since, and limits may have been lowered.
_AS_NOW = (
    *("sha256", "prefix", "models", "expires_s", "requests_per_minute", "tokens_per_minute", "tokens_per_day"),
    *("tokens_per_month", "max_priority", "max_non_preemptible", "max_deadlines", "max_held", "bounds"),
)
_OLDEST_SCOPES = frozenset({"admin", "inference", "fine_tuning"})


@contextmanager
def as_owner(data_dir: Path) -> Iterator[None]:
    """Acts as the user of the data directory: root upgrades, and what is made there, also by SQLite, must be that
    user's."""
    owner, user, group = data_dir.stat(), os.geteuid(), os.getegid()
    if user != 0 or owner.st_uid == 0:
        yield
        return
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)


@dataclass(frozen=True)
class WayBack:
    """copy: the database that comes back, or None if the present one stays and nothing is lost. lost: kinds and numbers
    of things that were made since and will be gone. back: the same for things that were deleted since and will be there
    again. revoked: ids of keys that stay revoked. forgotten: people who are named again. endless: names of keys whose
    end the older release does not know."""

    version: str
    copy: Kept | None
    lost: dict[str, int]
    back: dict[str, int]
    revoked: dict[str, float]
    forgotten: tuple[str, ...] = ()
    endless: tuple[str, ...] = ()

    def words(self) -> str:
        if self.copy is None:
            return f"release {self.version} opens the database as it is: nothing is lost"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.copy.made_s))
        lines = [f"release {self.version} gets the database of {when}, from before the upgrade changed its schema"]
        lines.append(f"  lost, because made since: {_listed(self.lost)}")
        lines.append("  lost too: every change since to what was there (settings, shares, progress of jobs)")
        lines.append("  keys keep the secrets, scopes and limits that they have by now")
        if self.back:
            lines.append(f"  named again, though deleted since (what they had is gone): {_listed(self.back)}")
        if self.revoked:
            lines.append(f"  {len(self.revoked)} keys revoked since stay revoked")
        if self.forgotten:
            lines.append(
                f"  named again, though forgotten since: {', '.join(self.forgotten)} (`appliance forget` again)"
            )
        if self.endless:
            lines.append(
                f"  last for ever, though given an end since: {', '.join(self.endless)}"
                " (`appliance key revoke` when it has come)"
            )
        return "\n".join(lines)


def way_back(releases: Releases, data_dir: Path, version: str | None = None) -> WayBack:
    """version: None is the release before. Raises Refused with the reason if there is no way back."""
    version = version or releases.before
    if version is None:
        raise Refused(f"{releases.current} is the first release in {releases.prefix}: there is none before it")
    if releases.find(version) is None:
        raise Refused(f"the release before, {version}, is not installed any more in {releases.prefix}")
    known, database = releases.known(version).schema, data_dir / DATABASE
    if not database.is_file():
        return WayBack(version, None, {}, {}, {})
    with as_owner(data_dir):
        return _way(version, known, database)


def _way(version: str, known: int, database: Path) -> WayBack:
    schema = _schema(database)
    if schema <= known:
        return WayBack(version, None, {}, {}, {})
    copies = [kept for kept in kept_copies(database) if kept.schema <= known]
    if not copies:
        raise Refused(
            f"the database has schema {schema}, release {version} knows it up to {known}, and there is no copy from "
            f"before in {database.parent / FOLDER}: `appliance restore` a backup with release {version}, or stay"
        )
    copy = copies[-1].path
    _check(copy)
    lost, back, revoked = _compared(database, copy)
    return WayBack(version, copies[-1], lost, back, revoked, _forgotten(database, copy), _endless(database, copy))


def restore(way: WayBack, data_dir: Path) -> Path | None:
    """Replaces the database of a stopped box by the copy from before. Returns the path of the replaced one. If it is
    interrupted, one of the two is there whole. Raises Refused, OSError."""
    if way.copy is None:
        return None
    with as_owner(data_dir):
        return _exchanged(way, way.copy.path, data_dir)


def _exchanged(way: WayBack, copy: Path, data_dir: Path) -> Path:
    database = data_dir / DATABASE
    for old in (data_dir / FOLDER).glob("of-the-newer-release-*"):
        old.unlink()
    aside = data_dir / FOLDER / f"of-the-newer-release-{stamp(time.time())}.sqlite"
    partial = data_dir / f".{DATABASE}.restoring"
    try:
        copy_database(database, aside)
        copy_database(copy, partial)
        there = {
            f"{kind}/{path.relative_to(data_dir / kind)}"
            for kind in ("files", "uploads")
            for path in (data_dir / kind).rglob("*")
        }
        _forget_gone(partial, there)
        _end_logins(partial)
        # Read again: the box went on while a person read what is lost, and until its last request had ended.
        revoked = {**way.revoked, **_compared(database, copy)[2]}
        with closing(sqlite3.connect(partial)) as connection, connection:
            for key_id, revoked_s in revoked.items():
                connection.execute("UPDATE keys SET revoked_s = ? WHERE id = ?", (revoked_s, key_id))
        _stays_so(partial, database)
        # The old database's log is folded in and deleted, so that nobody takes it for the log of the copy.
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise Refused(f"the database could not be exchanged, and is as it was: {error}") from error
    partial.replace(database)
    return aside


def _forget_gone(database: Path, there: Set[str]) -> None:
    """Deletes rows of files and of parts of uploads whose bytes are not among these names below the data directory."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, path in (("files", "'files/' || id"), ("upload_parts", "'uploads/' || upload_id || '/' || id")):
            for row_id, name in connection.execute(f"SELECT id, {path} FROM {table}").fetchall():
                if name not in there:
                    connection.execute(f"DELETE FROM {table} WHERE id = ?", [row_id])


def _end_logins(database: Path) -> None:
    """Deletes the logins of the page, because a login that ended since must not come back."""
    with closing(sqlite3.connect(database)) as connection, connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'page_sessions'").fetchone():
            connection.execute("DELETE FROM page_sessions")


def _schema(database: Path) -> int:
    with _read(database) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check(copy: Path) -> None:
    try:
        with _read(copy) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise Refused(f"the copy from before the upgrade, {copy}, is damaged ({verdict}): bring a backup back, or stay")


def _compared(database: Path, copy: Path) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    lost: dict[str, int] = {}
    back: dict[str, int] = {}
    with _read(database) as connection:
        connection.execute("ATTACH ? AS before", (reading_uri(copy),))
        for table, (key, words) in _COUNTED.items():
            if not connection.execute("SELECT 1 FROM before.sqlite_master WHERE name = ?", (table,)).fetchone():
                continue
            count = f"SELECT count(*) FROM {{}}.{table} WHERE {key} NOT IN (SELECT {key} FROM {{}}.{table})"
            (made,) = connection.execute(count.format("main", "before")).fetchone()
            (gone,) = connection.execute(count.format("before", "main")).fetchone()
            lost.update({words: made} if made else {})
            # The bytes of deleted files do not come back, so their rows must not either.
            back.update({words: gone} if gone and table not in ("files", *_ALL_IN_ROWS) else {})
        # Keys of commands are deleted a day after they were revoked.
        revoked = connection.execute(
            "SELECT id, coalesce(now.revoked_s, ?) FROM before.keys LEFT JOIN main.keys AS now USING (id) "
            "WHERE keys.revoked_s IS NULL AND (now.revoked_s IS NOT NULL OR now.sha256 IS NULL)",
            (time.time(),),
        )
        return lost, back, dict(revoked.fetchall())


def _forgotten(database: Path, copy: Path) -> tuple[str, ...]:
    """Returns the owners whom a pseudonym has replaced since."""
    with _read(database) as connection:
        connection.execute("ATTACH ? AS before", (reading_uri(copy),))
        if not all(_has(connection, of, "keys", "owner") for of in ("before", "main")):
            return ()
        found = connection.execute(
            "SELECT DISTINCT old.owner FROM before.keys AS old JOIN main.keys AS now USING (id)"
            " WHERE now.owner LIKE 'forgotten-%' AND old.owner != now.owner ORDER BY 1"
        )
        return tuple(owner for (owner,) in found.fetchall())


def _endless(database: Path, copy: Path) -> tuple[str, ...]:
    """Returns the names of keys whose end was set since and has no column in the copy."""
    with _read(database) as connection:
        connection.execute("ATTACH ? AS before", (reading_uri(copy),))
        if _has(connection, "before", "keys", "expires_s") or not _has(connection, "main", "keys", "expires_s"):
            return ()
        found = connection.execute(
            "SELECT old.name FROM before.keys AS old JOIN main.keys AS now USING (id)"
            " WHERE old.revoked_s IS NULL AND now.revoked_s IS NULL AND now.expires_s > ? ORDER BY 1",
            (time.time(),),
        )
        return tuple(name for (name,) in found.fetchall())


def _stays_so(copy: Path, database: Path) -> None:
    """Deletes from the copy what its owners have deleted since, and reduces the rights in it to those of today, in kind
    and in time. The copy may be of a release whose database had less in it."""
    with closing(sqlite3.connect(copy.absolute().as_uri(), uri=True)) as connection, connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("ATTACH ? AS now", (reading_uri(database),))
        compared = {**dict.fromkeys(_ALL_IN_ROWS, "id"), **_MAY_USE}
        for table, rows in compared.items():
            if all(_has(connection, of, table, rows) for of in ("main", "now")):
                connection.execute(f"DELETE FROM main.{table} WHERE ({rows}) NOT IN (SELECT {rows} FROM now.{table})")
        known = _OLDEST_SCOPES.union(
            # The older release does not know a scope that came with the newer one.
            *(json.loads(scopes) for (scopes,) in connection.execute("SELECT scopes FROM main.keys").fetchall())
        )
        for key_id, scopes in connection.execute("SELECT id, scopes FROM now.keys").fetchall():
            kept = json.dumps([scope for scope in json.loads(scopes) if scope in known])
            connection.execute("UPDATE main.keys SET scopes = ? WHERE id = ?", (kept, key_id))
        for column in _AS_NOW:
            if all(_has(connection, of, "keys", column) for of in ("main", "now")):
                connection.execute(
                    f"UPDATE main.keys SET {column} = (SELECT {column} FROM now.keys WHERE now.keys.id = main.keys.id)"
                    " WHERE id IN (SELECT id FROM now.keys)"
                )
        if _has(connection, "now", "keys", "expires_s") and not _has(connection, "main", "keys", "expires_s"):
            # The box revokes them when they end; these ended while it was stopped.
            connection.execute(
                "UPDATE main.keys SET revoked_s = ?1 WHERE revoked_s IS NULL"
                " AND id IN (SELECT id FROM now.keys WHERE expires_s <= ?1)",
                (time.time(),),
            )
        if all(_has(connection, of, "keys", "subject") for of in ("main", "now")):
            _shut_out(connection)


def _shut_out(connection: sqlite3.Connection) -> None:
    """Keeps the people in the copy who first came after it was made and whose access was revoked: otherwise the login
    provider would let them in, and they would get a key."""
    columns = ", ".join(sorted(_columns(connection, "main", "keys") & _columns(connection, "now", "keys") - {"seq"}))
    connection.execute(
        f"INSERT OR IGNORE INTO main.keys ({columns}) SELECT {columns} FROM now.keys"
        " WHERE revoked_s IS NOT NULL AND subject != '' AND id NOT IN (SELECT id FROM main.keys)"
    )


def _has(connection: sqlite3.Connection, schema: str, table: str, columns: str) -> bool:
    return _columns(connection, schema, table).issuperset(columns.split(", "))


def _columns(connection: sqlite3.Connection, schema: str, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA {schema}.table_info({table})")}


def _read(database: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(reading_uri(database), uri=True))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {words}" for words, count in counts.items()) or "nothing"
