"""Takes a backup of a data directory, while its box runs or is stopped.

SQLite's online copy copies the database first. Then the files are copied, each of which appears in the directory whole.
The copied database may still name a file that was deleted meanwhile. So the whole pass is repeated until none of the
files that were there before the database was copied has gone; a repeated pass finds its chunks at the place already.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from appliance import last_backup
from appliance.backup import manifest as manifests
from appliance.backup.encryption import chunk_digest
from appliance.backup.errors import BackupError, BackupRunning, NotThisBox
from appliance.backup.manifest import CHUNK_BYTES, DATABASE_CHUNK_BYTES, Manifest, SavedFile, chunk_key
from appliance.backup_copies import PREFIX, alone, remove_left
from appliance.last_backup import LastBackup
from appliance.paths import BoxPaths
from appliance.store import copies
from appliance.store.readers import reading_uri
from weights.tiers.objects import Objects

log = logging.getLogger(__name__)

DATABASE = "appliance.db"
# Logs describe this machine, caches are made again, and the rest belongs to one run of the box.
_OF_ONE_RUN = frozenset({"box.json", "box.lock", "backup.lock", "last-backup.json"})
LEFT_OUT = frozenset({"logs", "cache", "away-jobs", copies.FOLDER}) | _OF_ONE_RUN
SECRETS = frozenset({"ca", "first-key", "ray.token"})
PASSES = 5
# The holder of a key may delete these as often as he likes, and then no backup would ever end.
_OWNERS = ("files/", "uploads/", "jobs/", "batches/")
Report = Callable[[int, int], None]


def take(
    paths: BoxPaths,
    objects: Objects,
    *,
    keep: int | None = None,
    secrets: bool = False,
    report: Report = lambda done, of: None,
    clock: Callable[[], float] = time.time,
) -> Manifest:
    """Returns the new backup once all of it is at the place.

    Args:
        keep: how many backups stay there, this one included; None: all.
        secrets: whether the keys of the box's certificate authority, the first API key and Ray's token are in it.
        report: called with the bytes looked at so far, and all of them.

    Raises BackupError, TierUnavailable, TierFull.
    """
    if not paths.database.is_file():
        raise BackupError(f"{paths.data_dir} is not a data directory of a box: it has no {DATABASE}")
    with _alone(paths.data_dir), TemporaryDirectory(prefix=PREFIX, dir=paths.data_dir) as folder:
        _check_is_there(paths, objects)
        objects.sweep()
        last, box_id = manifests.newest_readable(objects), _identity(paths)
        if last is not None and not _same_box(last.box_id, box_id):
            raise _not_this_box(last, box_id, objects.where)
        writer = _Writer(objects, {} if last is None else {file.path: file for file in last.files}, report)
        schema, files = _copied(writer, paths, Path(folder) / DATABASE, secrets)
        made_s = clock()
        made = Manifest(
            manifests.next_name(objects, made_s),
            made_s,
            box_id,
            version("appliance"),
            schema,
            str(paths.data_dir),
            secrets,
            writer.new_bytes,
            files,
        )
        manifests.write(objects, made)
        if keep is not None:
            manifests.remove(objects, manifests.names(objects)[:-keep])
        last_backup.write(paths.last_backup, LastBackup(made.name, made.made_s, objects.where, made.bytes))
        return made


def _copied(writer: _Writer, paths: BoxPaths, copy: Path, secrets: bool) -> tuple[int, tuple[SavedFile, ...]]:
    """Copies the database to `copy`, and saves it with all files that it names; returns its schema and these. Raises
    BackupError."""
    for left in reversed(range(PASSES)):
        before = {name for name, _ in _files(paths.data_dir, secrets)}
        schema = copy_database(paths.database, copy)
        end_logins(copy)
        files, gone = writer.save(paths.data_dir, copy, secrets, before)
        if not left:
            gone = {name for name in gone if not name.startswith(_OWNERS)}
        if not gone:
            break
        log.info("%d files were deleted while they were copied; once more", len(gone))
    else:
        raise BackupError(
            f"files of {paths.data_dir} were deleted during each of {PASSES} passes, {min(gone)} for one; take the "
            "backup when less of the box's own is deleted"
        )
    if forget_gone(copy, {file.path for file in files}):
        files = (writer.database(copy), *files[1:])
    return schema, files


def _not_this_box(last: Manifest, box_id: str, where: str) -> NotThisBox:
    if _same_key(last.box_id, box_id):
        remedy = (
            f"this one was restored or copied from it: move it to {last.data_dir} if that is gone, or give it a place "
            "of its own ([backup] url)"
        )
    else:
        remedy = (
            "give each box a place of its own. If this directory was set up again, restore the backup first: taking "
            "others would in time delete it"
        )
    return NotThisBox(
        f"{where} has backups of another box ({last.box_id}, {last.data_dir}), this is {box_id}; {remedy}"
    )


def _check_is_there(paths: BoxPaths, objects: Objects) -> None:
    """Checks that the place still has the backups that it had: a lost mount leaves an empty directory on a disk that a
    backup must not fill. Raises BackupError."""
    last = last_backup.read(paths.last_backup)
    if last is not None and last.where == objects.where and not manifests.names(objects):
        raise BackupError(
            f"{objects.where} has no backup, and had {last.name}: is it mounted? If it was emptied on purpose, delete "
            f"{paths.last_backup}"
        )


def _identity(paths: BoxPaths) -> str:
    """Returns PLACE:KEY, made of the directory's path and the box's first key, which a backup brings back. The path
    alone does not tell two machines apart, nor a box that was set up again. While there is no key, it is PLACE
    alone."""
    query = "SELECT id FROM keys WHERE NOT session ORDER BY seq LIMIT 1"
    try:
        with closing(sqlite3.connect(reading_uri(paths.database), uri=True)) as connection:
            first = connection.execute(query).fetchone()
    except sqlite3.Error as error:
        raise BackupError(f"{paths.database} cannot be copied: {error}") from error
    return f"{paths.box_id}:{first[0]}" if first else paths.box_id


def _same_key(known: str, other: str) -> bool:
    key = known.partition(":")[2]
    return bool(key) and key == other.partition(":")[2]


def _same_box(known: str, other: str) -> bool:
    """Compares two ids of boxes. If one has no key, as in older backups, the path decides."""
    (place, _, key), (other_place, _, other_key) = known.partition(":"), other.partition(":")
    return place == other_place and (not key or not other_key or key == other_key)


def copy_database(source: Path, target: Path) -> int:
    """Copies the database, and returns the number of its schema. Raises BackupError."""
    try:
        return copies.copy_database(source, target)
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied: {error}") from error


class _Writer:
    def __init__(self, objects: Objects, last: dict[str, SavedFile], report: Report):
        self._objects, self._last, self._report = objects, last, report
        self._there = {Path(key).name for key, _ in objects.list("chunks/")}
        self.new_bytes = 0

    def save(
        self, data_dir: Path, database: Path, secrets: bool, before: Set[str]
    ) -> tuple[tuple[SavedFile, ...], set[str]]:
        """Returns the files now at the place, the database first, and which others, also of `before`, were deleted
        before they were read."""
        found = dict(_files(data_dir, secrets))
        of, done, saved = sum(status.st_size for status in found.values()), 0, [self.database(database)]
        for name, status in found.items():
            self._report(done, of)
            done += status.st_size
            with suppress(FileNotFoundError):
                saved.append(self._file(name, data_dir / name, status))
        self._report(of, of)
        return tuple(saved), {*before, *found} - {file.path for file in saved}

    def database(self, copied: Path) -> SavedFile:
        return self._file(DATABASE, copied, chunk_bytes=DATABASE_CHUNK_BYTES)

    def _file(
        self, name: str, path: Path, status: os.stat_result | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> SavedFile:
        """status: from before the file is read, so that a file which changes meanwhile is read again next time."""
        known, mtime_ns = self._last.get(name), 0 if status is None else status.st_mtime_ns
        if known and status and (known.mtime_ns, known.bytes) == (mtime_ns, status.st_size):
            if self._there.issuperset(known.chunks):
                return known
        chunks, nbytes = [], 0
        with open(path, "rb") as file:
            while piece := file.read(chunk_bytes):
                digest = chunk_digest(self._objects, piece)
                if digest not in self._there:
                    self._objects.put(chunk_key(digest), piece)
                    self._there.add(digest)
                    self.new_bytes += len(piece)
                chunks.append(digest)
                nbytes += len(piece)
        self._last[name] = SavedFile(name, nbytes, mtime_ns, tuple(chunks))
        return self._last[name]


def left_out(name: str, secrets: bool) -> bool:
    """Whether what has this name in a data directory is in no backup, but for the copy of the database."""
    return name in LEFT_OUT or (name in SECRETS and not secrets) or name.startswith((DATABASE, PREFIX))


def _files(data_dir: Path, secrets: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Returns the regular files, by name below the directory, without what an earlier backup left behind."""
    for entry in sorted(data_dir.iterdir()):
        if left_out(entry.name, secrets):
            continue
        below = [entry]
        if entry.is_dir() and not entry.is_symlink():
            # rglob would fail when a folder is deleted after it was listed and before it is read.
            below = sorted(Path(folder, name) for folder, _, names in os.walk(entry) for name in names)
        for path in below:
            with suppress(FileNotFoundError):
                if stat.S_ISREG((status := path.lstat()).st_mode):
                    yield path.relative_to(data_dir).as_posix(), status


def forget_gone(database: Path, there: Set[str]) -> bool:
    """Deletes from a copied database what its owners deleted since: rows of files and of parts of uploads whose bytes
    are not among these names below the data directory. Returns whether there were any."""
    with closing(sqlite3.connect(database)) as connection, connection:
        gone = [
            (table, row[0])
            for table, path in (("files", "'files/' || id"), ("upload_parts", "'uploads/' || upload_id || '/' || id"))
            for row in connection.execute(f"SELECT id, {path} FROM {table}")
            if row[1] not in there
        ]
        for table, row_id in gone:
            connection.execute(f"DELETE FROM {table} WHERE id = ?", [row_id])
    if gone:
        log.info("%d files were deleted by their owners meanwhile: the backup has neither bytes nor rows", len(gone))
    return bool(gone)


def end_logins(database: Path) -> None:
    """Deletes the logins of the page from a copied database, because a login that ended since must not come back."""
    with closing(sqlite3.connect(database)) as connection, connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'page_sessions'").fetchone():
            connection.execute("DELETE FROM page_sessions")


@contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    with alone(data_dir) as nobody_else:
        if not nobody_else:
            raise BackupRunning(f"a backup of {data_dir} is being taken already; wait for its end")
        remove_left(data_dir)
        yield
