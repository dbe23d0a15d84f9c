"""Back up a data directory, also while its box runs, and restore backups into another directory.

SQLite's online copy gives a consistent database; other files appear only when they are complete, and are copied in
chunks. The destination, a directory or an S3 store, has one manifest `backups/NAME.json` for each backup, and chunks
`chunks/AB/SHA-256` that backups share. The manifest is written last, so an interrupted backup is ignored.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

import msgspec

from appliance.paths import BoxPaths
from runtime.logs import stamp
from weights.format.errors import ObjectDamaged
from weights.format.names import replace_file
from weights.tiers.objects import Objects

DATABASE, COPY, LOCK = "appliance.db", ".backup.db", "backup.lock"
# Logs concern this machine, caches can be rebuilt, private keys must not leave, the rest is of one run.
LEFT_OUT = frozenset(
    ("logs", "cache", "away-jobs", "ca", "first-key", "ray.token")
    + ("box.json", "config.json", "box.lock", "last-backup.json", LOCK, COPY, f"{COPY}-journal")
    + (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
)
CHUNK_BYTES = 16 << 20
DATABASE_CHUNK_BYTES = 1 << 20  # small, because few of the database's pages change between backups
Report = Callable[[int, int], object]


class BackupError(RuntimeError):
    """A backup cannot be taken or restored; the message says what to do. Errors of the destination are
    `weights.format.errors.TierUnavailable` and `TierFull`."""


@dataclass(frozen=True)
class SavedFile:
    """A file of a backup. path: relative to the data directory, with "/". chunks: SHA-256 of its chunks, in order."""

    path: str
    bytes: int
    mtime_ns: int
    chunks: list[str]


@dataclass(frozen=True)
class Manifest:
    """A backup's manifest. name: sortable UTC time. box: id of the box's first key. new_bytes: bytes it added."""

    name: str
    made_s: float
    box: str
    data_dir: str
    new_bytes: int
    files: list[SavedFile]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class LastBackup:
    """The newest backup of a box, recorded in its data directory. made_s: Unix time of its end. where: its destination,
    without credentials."""

    name: str
    made_s: float
    where: str
    bytes: int


def read_last(path: Path) -> LastBackup | None:
    """Read the record of the newest backup; None if there is none, or the file is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LastBackup)
    except (OSError, msgspec.DecodeError):
        return None


def names(place: Objects) -> list[str]:
    """Return the names of the backups at the destination, oldest first."""
    return sorted(PurePosixPath(key).stem for key in place.list("backups/"))


def read(place: Objects, name: str) -> Manifest:
    """Read a manifest. Raises BackupError if it is missing or damaged."""
    try:
        digest, body = place.get(_manifest_key(name)).split(b"\n", 1)
        if sha256(body).hexdigest() != digest.decode():
            raise ValueError("its checksum does not match")
        return msgspec.json.decode(body, type=Manifest)
    except ObjectDamaged as error:
        raise BackupError(f"{place.where} has no backup {name!r}; it has {names(place)[-5:]}") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise BackupError(f"{place.where}/{_manifest_key(name)} is damaged; delete it, use another backup") from error


def take(paths: BoxPaths, place: Objects, *, keep: int, report: Report = lambda done, of: None) -> Manifest:
    """Take a backup; return once the destination has all of it.

    Args:
        keep: number of backups to keep at the destination, including this one.
        report: called with the copied bytes and the bytes of all files.

    Raises BackupError, TierUnavailable, TierFull."""
    if not paths.database.is_file():
        raise BackupError(f"{paths.data_dir} is not a data directory of a box: it has no {DATABASE}")
    with _alone(paths.data_dir):
        known, last = names(place), read_last(paths.last_backup)
        if not known and last is not None and last.where == place.where:
            raise BackupError(
                f"{place.where} had {last.name} but is empty. Mount it; if it is new, delete {paths.last_backup}"
            )
        place.sweep()
        before = read(place, known[-1]) if known else None
        copy = paths.data_dir / COPY
        try:
            with _reading(paths.database) as source:
                row = source.execute("SELECT id FROM keys ORDER BY seq LIMIT 1").fetchone()
                box = row[0] if row else ""
            if before is not None and before.box != box:
                raise BackupError(f"{place.where} has backups of another box ({before.data_dir}); give another place")
            writer = _Writer(place, before, report)
            saved = [*writer.save_all(paths.data_dir)]
            _copy_database(paths.database, copy)
            saved.append(writer.save(DATABASE, copy, DATABASE_CHUNK_BYTES))
            saved += writer.save_all(paths.data_dir)  # files created meanwhile, to which the database may refer
            files = {file.path: file for file in saved}
        finally:
            copy.unlink(missing_ok=True)
        made_s = time.time()
        manifest = Manifest(stamp(made_s), made_s, box, str(paths.data_dir), writer.new_bytes, [*files.values()])
        body = msgspec.json.encode(manifest)
        place.put(_manifest_key(manifest.name), f"{sha256(body).hexdigest()}\n".encode() + body)
        last = LastBackup(manifest.name, made_s, place.where, manifest.bytes)
        replace_file(paths.last_backup, msgspec.json.encode(last))
        _remove_old(place, manifest.name, keep)
        return manifest


def restore(place: Objects, name: str | None, data_dir: Path, *, report: Report = lambda done, of: None) -> Manifest:
    """Restore a backup (None: the newest) into `data_dir`, which must be empty or missing; one rename adds all files.

    Raises BackupError, TierUnavailable."""
    if name is None and not (known := names(place)):
        raise BackupError(f"{place.where} has no backup; `appliance backup make` takes one")
    manifest = read(place, name or known[-1])
    if data_dir.is_symlink() or (data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir()))):
        raise BackupError(f"{data_dir} is not an empty directory; restore into a new one")
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = data_dir.with_name(f".{data_dir.name}.restoring-{secrets.token_hex(4)}")
    partial.mkdir(mode=0o700)
    try:
        done, of = 0, manifest.bytes
        for file in manifest.files:
            report(done, of)
            _restore_file(place, file, partial)
            done += file.bytes
        if data_dir.exists():
            data_dir.rmdir()
        partial.rename(data_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


class _Writer:
    """Writes missing chunks to the destination. `before`: last backup, whose unchanged files are reused."""

    def __init__(self, place: Objects, before: Manifest | None, report: Report):
        self._place, self._report = place, report
        self._known = {file.path: file for file in (before.files if before else ())}
        self._chunks = {PurePosixPath(key).name for key in place.list("chunks/")}
        self.new_bytes = 0

    def save_all(self, data_dir: Path) -> Iterator[SavedFile]:
        """Save all files, and skip files that are deleted meanwhile."""
        statuses = dict(_files(data_dir))
        done, of = 0, sum(status.st_size for status in statuses.values())
        for name, status in statuses.items():
            self._report(done, of)
            done += status.st_size
            known = self._known.get(name)
            state = (status.st_mtime_ns, status.st_size)
            if known and (known.mtime_ns, known.bytes) == state and self._chunks.issuperset(known.chunks):
                yield known
            else:
                with suppress(FileNotFoundError):
                    yield self.save(name, data_dir / name, mtime_ns=status.st_mtime_ns)

    def save(self, name: str, path: Path, chunk_bytes: int = CHUNK_BYTES, mtime_ns: int = 0) -> SavedFile:
        """Save a file. mtime_ns: modification time before reading; 0: the next backup rereads the file."""
        chunks, nbytes = [], 0
        with open(path, "rb") as file:
            while piece := file.read(chunk_bytes):
                digest = sha256(piece).hexdigest()
                if digest not in self._chunks:
                    self._place.put(f"chunks/{digest[:2]}/{digest}", piece)
                    self._chunks.add(digest)
                    self.new_bytes += len(piece)
                chunks.append(digest)
                nbytes += len(piece)
        self._known[name] = SavedFile(name, nbytes, mtime_ns, chunks)
        return self._known[name]


def _files(data_dir: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files to back up, by path relative to the data directory."""
    for folder, folders, files in os.walk(data_dir):
        if Path(folder) == data_dir:
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            files = [name for name in files if name not in LEFT_OUT]
        for path in (Path(folder, name) for name in sorted(files)):
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(data_dir).as_posix(), path.stat()


@contextmanager
def _reading(database: Path) -> Iterator[sqlite3.Connection]:
    """Open the database read-only, so that a backup by root creates no files of root next to it. Raises BackupError."""
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise BackupError(f"{database} cannot be copied: {error}") from error


def _copy_database(database: Path, copy: Path) -> None:
    """Copy a consistent state of the database, without the page's logins."""
    copy.unlink(missing_ok=True)
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with _reading(database) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # makes the copy one file, without a write-ahead log
        with target:
            target.execute("DELETE FROM page_sessions")


def _restore_file(place: Objects, file: SavedFile, target: Path) -> None:
    path = target / file.path
    if not path.resolve().is_relative_to(target.resolve()):
        raise BackupError(f"the manifest has the path {file.path!r}, which is outside the data directory")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
        for digest in file.chunks:
            try:
                piece = place.get(f"chunks/{digest[:2]}/{digest}")
            except ObjectDamaged:
                piece = b""
            if sha256(piece).hexdigest() != digest:
                raise BackupError(f"a chunk of {file.path} is missing or damaged at {place.where}; use another backup")
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))


def _remove_old(place: Objects, taken: str, keep: int) -> None:
    """Delete all backups except `taken` and the newest `keep`, and chunks that only the deleted ones use."""
    known = names(place)
    old = [name for name in known[:-keep] if name != taken]
    if not old:
        return
    needed = {chunk for name in {*known} - {*old} for file in read(place, name).files for chunk in file.chunks}
    for name in old:
        place.delete(_manifest_key(name))
    for key in list(place.list("chunks/")):
        if PurePosixPath(key).name not in needed:
            place.delete(key)


@contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    with open(os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(f"another backup of {data_dir} is running; wait until it ends") from None
        yield


def _manifest_key(name: str) -> str:
    return f"backups/{name}.json"
