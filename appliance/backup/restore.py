"""Brings a backup back into an empty directory, or reads all of it to see that it could be."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from appliance.backup import manifest as manifests
from appliance.backup.encryption import chunk_digest
from appliance.backup.errors import BackupDamaged, BackupError, NoBackup, NotEmpty
from appliance.backup.manifest import Manifest, SavedFile, chunk_key
from appliance.backup.take import DATABASE, Report, left_out
from appliance.store.migrator import migrations
from appliance.store.readers import reading_uri
from weights.format.errors import ObjectDamaged
from weights.tiers.objects import Objects


def restore(objects: Objects, name: str | None, data_dir: Path, *, report: Report = lambda done, of: None) -> Manifest:
    """Puts a backup (None: the newest) into `data_dir`, which must be empty or missing. The files appear there all at
    once.

    Raises NoBackup, NotEmpty, BackupDamaged, BackupError, TierUnavailable."""
    found = _named(objects, name)
    if found.schema > max(migrations()):
        raise BackupError(
            f"the backup {found.name} is of a newer release ({found.version}, schema {found.schema}; this one knows "
            f"{max(migrations())}); restore it with that release"
        )
    if data_dir.is_symlink() or (data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir()))):
        raise NotEmpty(f"{data_dir} is not an empty directory; restore into a new one, and move it afterwards")
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = data_dir.with_name(f".{data_dir.name}.restoring-{secrets.token_hex(4)}")
    partial.mkdir(mode=0o700)
    try:
        done = 0
        for file in found.files:
            report(done, found.bytes)
            # Others may write at the place, and what is in caches is run.
            if file.path == DATABASE or not left_out(file.path.partition("/")[0], found.secrets):
                _write(objects, file, partial / file.path)
            done += file.bytes
        _check_database(partial / DATABASE, found.name)
        if data_dir.exists():
            data_dir.rmdir()
        partial.rename(data_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(found.bytes, found.bytes)
    return found


def live_keys(database: Path) -> list[str]:
    """Returns the names of keys that are still valid in a restored database, which may be of an older release."""
    with closing(sqlite3.connect(reading_uri(database), uri=True)) as connection:
        query = "SELECT name FROM keys WHERE revoked_s IS NULL AND NOT session"
        values = list[float]()
        if any(column[1] == "expires_s" for column in connection.execute("PRAGMA table_info(keys)")):
            query += " AND (expires_s IS NULL OR expires_s > ?)"
            values.append(time.time())
        return [name for (name,) in connection.execute(f"{query} ORDER BY seq", values)]


def verify(objects: Objects, name: str | None, *, report: Report = lambda done, of: None) -> Manifest:
    """Reads every byte of a backup and opens its database. Raises NoBackup, BackupDamaged, TierUnavailable."""
    found = _named(objects, name)
    done = 0
    with TemporaryDirectory(prefix="appliance-backup-") as folder:
        for file in found.files:
            report(done, found.bytes)
            if file.path == DATABASE:
                _write(objects, file, Path(folder) / DATABASE)
                _check_database(Path(folder) / DATABASE, found.name)
            else:
                _check_size(file, sum(len(_chunk(objects, digest, file.path)) for digest in file.chunks))
            done += file.bytes
    report(found.bytes, found.bytes)
    return found


def _named(objects: Objects, name: str | None) -> Manifest:
    found = manifests.newest(objects) if name is None else manifests.read(objects, name)
    if found is None:
        raise NoBackup(f"{objects.where} has no backup; `appliance backup make` takes one")
    if not any(file.path == DATABASE for file in found.files):
        raise BackupDamaged(f"the backup {found.name} at {objects.where} has no database; use another backup")
    return found


def _write(objects: Objects, file: SavedFile, path: Path) -> None:
    for folder in reversed(path.parents):
        folder.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as written:
        for digest in file.chunks:
            written.write(_chunk(objects, digest, file.path))
        written.flush()
        os.fsync(handle)
    _check_size(file, path.stat().st_size)
    if file.mtime_ns:
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))


def _check_size(file: SavedFile, found: int) -> None:
    if found != file.bytes:
        raise BackupDamaged(f"{file.path} has {found} bytes instead of {file.bytes}; use another backup")


def _chunk(objects: Objects, digest: str, path: str) -> bytes:
    try:
        data = objects.get(chunk_key(digest))
    except ObjectDamaged as error:
        raise BackupDamaged(f"a part of {path} is missing at {objects.where}; use another backup") from error
    if chunk_digest(objects, data) != digest:
        raise BackupDamaged(f"a part of {path} at {objects.where} is not what was written; use another backup")
    return data


def _check_database(path: Path, name: str) -> None:
    try:
        with sqlite3.connect(path) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise BackupDamaged(f"the database in the backup {name} is damaged ({verdict}); use another backup")
