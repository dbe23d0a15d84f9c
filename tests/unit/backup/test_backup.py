"""Backups of a data directory: contents, chunks shared by backups, and restores, which are complete or refused."""

import errno
import itertools
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from appliance import backup
from appliance.backup import BackupError, names, read, read_last, restore, take
from appliance.paths import BoxPaths
from appliance.store import box, keys
from appliance.store.database import Database
from weights.format.errors import TierFull
from weights.tiers.objects import DirectoryObjects

SECRET = "sk-appl-canary"


@pytest.fixture
def paths(tmp_path: Path) -> BoxPaths:
    """Create a stopped box with a value in its database, two files and a snapshot; return its paths."""
    found = BoxPaths.of(tmp_path / "box", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    found.create()
    with Database(found.database) as db:
        box.put(db, "colour", "blue")
        keys.create(db, "first", ["admin"], "ann")
    (found.files / "file-1").write_bytes(b"one" * 1000)
    (found.models / "m").mkdir()
    (found.models / "m" / "model.safetensors").write_bytes(os.urandom(100_000))
    (found.jobs / "empty").write_bytes(b"")
    (found.logs / "main.log").write_text("of this machine")
    found.first_key.write_text(SECRET)
    found.state_file.write_text("{}")
    return found


@pytest.fixture
def place(tmp_path: Path) -> DirectoryObjects:
    (tmp_path / "place").mkdir()
    return DirectoryObjects(tmp_path / "place")


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    """Fake the clock, so that each backup is a minute later than the backup before."""
    times = itertools.count(1e9, 60.0)
    monkeypatch.setattr(backup.time, "time", lambda: next(times))


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def colour(data_dir: Path) -> str:
    with Database(data_dir / "appliance.db") as db:
        return box.get(db, "colour")


def test_restore_after_take_returns_identical_files(paths, place, tmp_path):
    made = take(paths, place, keep=9)
    assert not any(SECRET.encode() in text for text in tree(place.root).values())
    back = tmp_path / "back"
    assert restore(place, None, back) == made
    found, before = tree(back), tree(paths.data_dir)
    assert set(found) == {"appliance.db", "files/file-1", "models/m/model.safetensors", "jobs/empty"}
    assert all(found[name] == before[name] for name in set(found) - {"appliance.db"})
    assert colour(back) == "blue"
    assert back.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in back.rglob("*") if path.is_file()} == {0o600}
    last = read_last(paths.last_backup)
    assert last is not None and (last.name, last.where) == (made.name, place.where)


def test_take_second_backup_writes_only_new_chunks(paths, place, tmp_path):
    first = take(paths, place, keep=9)
    (paths.files / "file-2").write_bytes(b"two" * 5000)
    second = take(paths, place, keep=9)
    assert first.new_bytes >= 103_000 and second.new_bytes < first.new_bytes - 100_000
    assert {file.path for file in second.files} - {file.path for file in first.files} == {"files/file-2"}
    (paths.files / "file-1").write_bytes(b"uno" * 1000)  # same length as the old content
    take(paths, place, keep=9)
    restore(place, None, tmp_path / "third")
    assert (tmp_path / "third" / "files" / "file-1").read_bytes() == b"uno" * 1000
    restore(place, first.name, tmp_path / "first")
    assert (tmp_path / "first" / "files" / "file-1").read_bytes() == b"one" * 1000


def test_take_with_keep_deletes_old_backups_and_chunks(paths, place, tmp_path):
    for _ in range(3):
        (paths.files / "file-1").write_bytes(os.urandom(50_000))
        made = take(paths, place, keep=2)
    assert len(names(place)) == 2 and made.name in names(place)
    chunks = {chunk for name in names(place) for file in read(place, name).files for chunk in file.chunks}
    assert {Path(key).name for key in place.list("chunks/")} == chunks
    for n, name in enumerate(names(place)):
        restore(place, name, tmp_path / str(n))


def test_take_includes_every_file_in_the_database(paths, place, monkeypatch, tmp_path):
    copy = backup._copy_database

    def copied(source: Path, target: Path) -> None:
        (paths.files / "file-2").write_bytes(b"two")  # runs after `take` has copied the files for the first time
        copy(source, target)
        (paths.files / "file-1").unlink()

    monkeypatch.setattr(backup, "_copy_database", copied)
    made = take(paths, place, keep=9)
    assert {"files/file-1", "files/file-2"} <= {file.path for file in made.files}
    restore(place, made.name, tmp_path / "back")


@pytest.mark.parametrize("how", ["missing", "changed", "manifest"])
def test_restore_damaged_backup_creates_no_directory(paths, place, tmp_path, how):
    made = take(paths, place, keep=9)
    (model,) = [file for file in made.files if file.path.endswith("safetensors")]
    chunk = place.root / "chunks" / model.chunks[0][:2] / model.chunks[0]
    if how == "missing":
        chunk.unlink()
    elif how == "changed":
        whole = chunk.read_bytes()
        chunk.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])  # flip one bit: a constant byte could equal the old byte
    else:
        manifest = place.root / "backups" / f"{made.name}.json"
        manifest.write_text(manifest.read_text().replace("file-1", "file-9"))
    with pytest.raises(BackupError, match="use another"):
        restore(place, None, tmp_path / "back")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["box", "place", "shm"]
    if how == "missing":
        take(paths, place, keep=9)  # the next backup rewrites the missing chunk
        restore(place, None, tmp_path / "back")


def test_restore_rejects_path_outside_target_directory(place, tmp_path):
    target = tmp_path / "back"
    target.mkdir()
    for path in ("../evil", "/evil"):
        with pytest.raises(BackupError, match="outside"):
            backup._restore_file(place, backup.SavedFile(path, 0, 0, []), target)


def test_take_and_restore_reject_unsuitable_locations(paths, place, tmp_path):
    with pytest.raises(BackupError, match="appliance backup make"):
        restore(place, None, tmp_path / "back")
    made = take(paths, place, keep=9)
    with pytest.raises(BackupError, match=made.name):
        restore(place, "2001-01-01T00-00-00Z", tmp_path / "back")
    with pytest.raises(BackupError, match="not an empty directory"):
        restore(place, None, paths.data_dir)
    other = BoxPaths.of(tmp_path / "other", tmp_path / "shm")
    other.create()
    with pytest.raises(BackupError, match="not a data directory"):
        take(other, place, keep=9)
    Database(other.database).close()
    with pytest.raises(BackupError, match="another box"):
        take(other, place, keep=9)
    with backup._alone(paths.data_dir), pytest.raises(BackupError, match="another backup of"):
        take(paths, place, keep=9)


def test_take_on_full_disk_keeps_existing_backups(paths, place, tmp_path, monkeypatch):
    made = take(paths, place, keep=1)
    (paths.files / "large").write_bytes(os.urandom(200_000))

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(TierFull):
            take(paths, place, keep=1)
    assert names(place) == [made.name] and restore(place, None, tmp_path / "back") == made
    assert not (paths.data_dir / backup.COPY).exists()


def test_take_after_kill_includes_database_wal(paths, place, tmp_path):
    with closing(sqlite3.connect(paths.database, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("UPDATE box SET value = '\"red\"' WHERE name = 'colour'")
        shutil.copytree(paths.data_dir, tmp_path / "killed")
    killed = BoxPaths.of(tmp_path / "killed", tmp_path / "shm")
    assert (killed.data_dir / "appliance.db-wal").stat().st_size
    take(killed, place, keep=9)
    restore(place, None, tmp_path / "back")
    assert colour(tmp_path / "back") == "red"


def test_take_rejects_location_whose_backups_disappeared(paths, place):
    take(paths, place, keep=9)
    shutil.rmtree(place.root)
    place.root.mkdir()
    with pytest.raises(BackupError, match="but is empty. Mount it"):
        take(paths, place, keep=9)
    assert not list(place.root.iterdir())
    paths.last_backup.unlink()
    assert take(paths, place, keep=9).new_bytes
