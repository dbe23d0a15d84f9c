"""Backups of a data directory: what is in them, what they share, and that they come back whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from appliance import backup_copies, last_backup
from appliance.backup import main as backup_main
from appliance.backup import manifest as manifests
from appliance.backup import take as take_module
from appliance.backup.errors import BackupDamaged, BackupError, BackupRunning, NoBackup, NotEmpty, NotThisBox
from appliance.backup.restore import live_keys, restore, verify
from appliance.backup.take import take
from appliance.config import BackupSettings
from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.store.objects import files
from appliance.store.records import box, keys
from appliance.store.rows import FileRow
from weights.format.errors import TierFull
from weights.tiers.objects import DirectoryObjects

SECRET = "sk-appl-canary"


@pytest.fixture
def paths(tmp_path: Path) -> BoxPaths:
    """A stopped box with a value in its database, two files and a snapshot."""
    found = BoxPaths.of(tmp_path / "box", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    found.create()
    with Database(found.database) as db:
        box.put(db, "colour", "blue")
    (found.files / "file-1").write_bytes(b"one" * 1000)
    (found.models / "m").mkdir()
    (found.models / "m" / "model.safetensors").write_bytes(os.urandom(100_000))
    (found.jobs / "empty").write_bytes(b"")
    (found.logs / "main.log").write_text("not mine to keep")
    found.first_key.write_text(SECRET)
    found.state_file.write_text("{}")
    return found


@pytest.fixture
def place(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "place", create=True)


def insert_file(db: Database, name: str) -> None:
    files.insert(db, FileRow(name, "f.jsonl", "user_data", 1, "0", "processed", 1.0))


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def colour(data_dir: Path) -> str:
    with Database(data_dir / "appliance.db") as db:
        return box.get(db, "colour")


def test_what_comes_back_is_what_was_there_and_nothing_of_the_old_run(paths, place, tmp_path):
    made = take(paths, place)
    back = tmp_path / "back"
    assert restore(place, None, back) == made
    found, before = tree(back), tree(paths.data_dir)
    assert set(found) == {"appliance.db", "files/file-1", "models/m/model.safetensors", "jobs/empty"}
    assert all(found[name] == before[name] for name in set(found) - {"appliance.db"})
    assert colour(back) == "blue"
    assert {path.stat().st_mode & 0o777 for path in back.rglob("*")} <= {0o600, 0o700}
    last = last_backup.read(paths.last_backup)
    assert last is not None and (last.name, last.where) == (made.name, place.where)


def test_private_keys_are_in_it_only_when_asked_for(paths, place):
    take(paths, place)
    assert not any(SECRET.encode() in text for text in tree(place.root).values())
    made = take(paths, place, secrets=True, clock=lambda: 2e9)
    assert made.secrets and any(SECRET.encode() in text for text in tree(place.root).values())


def test_a_second_backup_writes_only_what_is_new(paths, place, tmp_path):
    first = take(paths, place, clock=lambda: 1e9)
    (paths.files / "file-2").write_bytes(b"two" * 5000)
    second = take(paths, place, clock=lambda: 1e9 + 60)
    assert first.new_bytes >= 103_000 and second.new_bytes < first.new_bytes - 100_000
    assert {file.path for file in second.files} - {file.path for file in first.files} == {"files/file-2"}
    (paths.files / "file-1").write_bytes(b"uno" * 1000)  # as long as before
    third = take(paths, place, clock=lambda: 1e9 + 120)
    restore(place, third.name, tmp_path / "third")
    assert (tmp_path / "third" / "files" / "file-1").read_bytes() == b"uno" * 1000
    restore(place, first.name, tmp_path / "first")
    assert (tmp_path / "first" / "files" / "file-1").read_bytes() == b"one" * 1000


def test_old_ones_go_with_what_only_they_had(paths, place, tmp_path):
    for second in range(3):
        (paths.files / "file-1").write_bytes(os.urandom(50_000))
        take(paths, place, keep=2, clock=lambda second=second: 1e9 + second)
    assert len(manifests.names(place)) == 2
    chunks = {chunk for name in manifests.names(place) for f in manifests.read(place, name).files for chunk in f.chunks}
    assert {Path(key).name for key, _ in place.list("chunks/")} == chunks
    assert all(verify(place, name) for name in manifests.names(place))


def test_the_database_is_that_of_one_moment_while_it_is_written(paths, place, tmp_path):
    """Two rows always change together: no backup may have one without the other."""
    stop = threading.Event()

    def writes() -> None:
        with Database(paths.database) as db:
            n = 0
            while not stop.is_set():
                n += 1
                with db.transaction():
                    box.put(db, "left", n)
                    box.put(db, "right", n)

    writer = threading.Thread(target=writes)
    writer.start()
    try:
        for n in range(3):
            take(paths, place, clock=lambda n=n: 1e9 + n)
    finally:
        stop.set()
        writer.join()
    for n, name in enumerate(manifests.names(place)):
        restore(place, name, tmp_path / f"back{n}")
        with Database(tmp_path / f"back{n}" / "appliance.db") as db:
            assert box.get(db, "left") == box.get(db, "right")


def test_a_file_that_goes_while_it_is_copied_is_not_in_the_database_either(paths, place, monkeypatch, tmp_path):
    copy, passes = take_module.copy_database, []

    def copied(source: Path, target: Path) -> int:
        schema = copy(source, target)
        passes.append(target)
        if len(passes) == 1:  # deleted between the copy of the database and that of the files
            with Database(paths.database) as db:
                box.put(db, "colour", "green")
            (paths.files / "file-1").unlink()
        return schema

    monkeypatch.setattr(take_module, "copy_database", copied)
    made = take(paths, place)
    assert len(passes) == 2 and "files/file-1" not in {file.path for file in made.files}
    restore(place, made.name, tmp_path / "back")
    assert colour(tmp_path / "back") == "green"


def test_a_folder_that_goes_while_it_is_looked_into_is_gone_and_no_error(paths, place, monkeypatch):
    job, scan = paths.files / "job-1", os.scandir
    job.mkdir()
    (job / "log").write_bytes(b"x")

    def scanned(path=".") -> object:
        if str(path) == str(job) and job.exists():
            shutil.rmtree(job)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scanned)
    assert not [file.path for file in take(paths, place).files if "job-1" in file.path]


@pytest.mark.parametrize("how", ["missing", "changed", "manifest"])
def test_a_damaged_backup_is_said_and_leaves_no_directory(paths, place, tmp_path, how):
    made = take(paths, place)
    (model,) = [file for file in made.files if file.path.endswith("safetensors")]
    chunk = place.root / manifests.chunk_key(model.chunks[0])
    if how == "missing":
        chunk.unlink()
    elif how == "changed":
        whole = chunk.read_bytes()
        chunk.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])  # its bytes are random: a fixed letter may be the same
    else:
        manifest = place.root / "backups" / f"{made.name}.json"
        manifest.write_text(manifest.read_text().replace("file-1", "file-9"))
    with pytest.raises(BackupDamaged, match="use another"):
        verify(place, None)
    with pytest.raises(BackupDamaged, match="use another"):
        restore(place, None, tmp_path / "back")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["box", "place", "shm"]


@pytest.mark.parametrize("path", ["../../evil", "/evil", "files/e\0vil"])
def test_a_manifest_cannot_write_outside_the_directory(paths, place, tmp_path, path):
    made = take(paths, place)
    evil = replace(made, name="evil", files=(*made.files, replace(made.files[1], path=path)))
    manifests.write(place, evil)
    with pytest.raises(BackupDamaged, match="outside"):
        restore(place, "evil", tmp_path / "back")
    assert not (tmp_path.parent / "evil").exists() and not (tmp_path / "back").exists()


def test_what_no_backup_has_does_not_come_back(paths, place, tmp_path):
    """Somebody who may write at a place put files among the caches, which the restored box runs."""
    made = take(paths, place)
    evil = (
        "cache/numba/x.nbi",
        "logs/main.log",
        "box.json",
        "appliance.db-wal",
        "first-key",
        "ca/ca.key",
        ".backup-1/x",
    )
    more = tuple(replace(made.files[1], path=path) for path in evil)
    manifests.write(place, replace(made, name="evil", files=(*made.files, *more)))
    restore(place, "evil", tmp_path / "back")
    assert set(tree(tmp_path / "back")) == {file.path for file in made.files}


def test_what_cannot_be_done_is_refused_by_name(paths, place, tmp_path):
    with pytest.raises(NoBackup, match="appliance backup make"):
        restore(place, None, tmp_path / "back")
    made = take(paths, place)
    with pytest.raises(NoBackup, match=made.name):
        restore(place, "2001-01-01T00-00-00Z", tmp_path / "back")
    with pytest.raises(NotEmpty, match="not an empty directory"):
        restore(place, None, paths.data_dir)
    manifests.write(place, replace(made, name="newer", schema=10_000))
    with pytest.raises(BackupError, match="newer release"):
        restore(place, "newer", tmp_path / "back")
    other = BoxPaths.of(tmp_path / "other", tmp_path / "shm")
    other.create()
    with pytest.raises(BackupError, match="not a data directory"):
        take(other, place)
    Database(other.database).close()
    with pytest.raises(NotThisBox, match=made.box_id):
        take(other, place)
    with take_module._alone(paths.data_dir), pytest.raises(BackupRunning, match="already"):
        take(paths, place)


def test_a_full_place_keeps_the_backups_that_it_has(paths, place, tmp_path):
    made = take(paths, place)
    (paths.files / "large").write_bytes(os.urandom(200_000))
    with pytest.raises(TierFull):
        take(paths, DirectoryObjects(place.root, free_bytes=1 << 60))
    assert manifests.names(place) == [made.name] and verify(place, None) == made
    assert not list(paths.data_dir.glob(".backup-*"))


def test_a_database_that_is_no_database_is_said(paths, place):
    paths.database.write_bytes(b"no database at all" * 100)
    with pytest.raises(BackupError, match="cannot be copied"):
        take(paths, place)


def test_a_wal_that_a_killed_box_left_is_in_the_backup(paths, place, tmp_path):
    writer = sqlite3.connect(paths.database, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("PRAGMA wal_autocheckpoint = 0")
    writer.execute("UPDATE box SET value = ? WHERE name = 'colour'", ['"red"'])
    take(paths, place)
    restore(place, None, tmp_path / "back")
    assert colour(tmp_path / "back") == "red"
    writer.close()


def test_a_clock_that_was_ahead_costs_no_later_backup(paths, place, tmp_path):
    """The newest by its name was the one of 2033, and what was just made was deleted as the oldest."""
    take(paths, place, keep=2, clock=lambda: 2e9)
    for second in range(3):
        (paths.files / "file-1").write_bytes(b"later" * (1 + second))
        made = take(paths, place, keep=2, clock=lambda second=second: 1.9e9 + second)
        assert manifests.names(place)[-1] == made.name and verify(place, None) == made
    assert len(manifests.names(place)) == 2 and made.made_s == 1.9e9 + 2
    restore(place, None, tmp_path / "back")
    assert (tmp_path / "back" / "files" / "file-1").read_bytes() == b"later" * 3


@pytest.mark.parametrize("which", [0, -1])
def test_one_damaged_manifest_costs_that_backup(paths, place, tmp_path, which):
    for second in range(2):
        (paths.files / "file-1").write_bytes(os.urandom(1000))
        take(paths, place, clock=lambda second=second: 1e9 + second)
    name = manifests.names(place)[which]
    manifest = place.root / "backups" / f"{name}.json"
    manifest.write_bytes(b"x" + manifest.read_bytes()[1:])
    chunks = set(place.list("chunks/"))
    for second in range(2):
        made = take(paths, place, keep=3, clock=lambda second=second: 1e9 + 10 + second)
        assert verify(place, made.name) == made and last_backup.read(paths.last_backup).name == made.name
    assert len(manifests.names(place)) == 3
    if which:  # the damaged one is among those that stay: who knows what it has
        assert manifests.readable(place)[1] == [name] and chunks <= set(place.list("chunks/"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../x\x1b[31m"),
        ("version", "0.1\x1b[2J"),
        ("version", "\x9b2J"),
        ("version", [1]),
        ("data_dir", 5),
        ("made_s", "x"),
        ("made_s", 1e300),
        ("schema", None),
        ("secrets", "no"),
        ("files", []),
        ("files", [{"path": 5}]),
        ("files", [{"path": "a/../../b"}]),
        ("files", [{"path": "appliance.db/x"}]),
        ("files", [{"path": "appliance.db"}]),
        ("files", [{"bytes": "x"}]),
        ("files", [{"bytes": -1}]),
        ("files", [{"mtime_ns": 10**30}]),
        ("files", [{"chunks": [5]}]),
        ("files", [{"chunks": [["x"]]}]),
        ("files", [{"chunks": ["../../../etc/passwd"]}]),
        ("files", [{"path": "a" * 256}]),
        ("made_s", 1e18),
        ("made_s", None),
    ],
)
def test_what_somebody_else_wrote_as_a_manifest_is_damaged_and_stops_nothing(paths, place, tmp_path, field, value):
    """Some of these were whole to `verify`, and some an error of Python's to all that reads the place."""
    made = take(paths, place, clock=lambda: 1e9)
    fields = {"format": 1, **asdict(made)}
    if field == "files" and value:
        value = [*fields["files"], {**fields["files"][0], "path": "z", **value[0]}]
    body = json.dumps(fields | {field: value})
    written = f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode()
    (place.root / "backups" / f"{made.name}.json").write_bytes(written)
    for read in (lambda: verify(place, made.name), lambda: restore(place, made.name, tmp_path / "back")):
        with pytest.raises(BackupDamaged):
            read()
    assert not (tmp_path / "back").exists() and manifests.readable(place)[1] == ([] if value == [] else [made.name])
    assert verify(place, take(paths, place, keep=1, clock=lambda: 1e9 + 1).name).files


def test_a_file_of_another_size_than_its_manifest_says_is_not_whole(paths, place):
    made = take(paths, place, clock=lambda: 1e9)
    other = next(file for file in made.files if file.path != "appliance.db")
    files = [replace(file, bytes=file.bytes + (file is other)) for file in made.files]
    manifests.write(place, replace(made, files=tuple(files)))
    with pytest.raises(BackupDamaged, match=f"{other.path} has {other.bytes} bytes instead of {other.bytes + 1}"):
        verify(place, made.name)


def test_whoever_deletes_files_without_end_keeps_no_backup_from_being_taken(paths, place, monkeypatch, tmp_path):
    copy, passes = take_module.copy_database, []
    with Database(paths.database) as db:
        for name in ("file-1", *(f"file-x{n}" for n in range(take_module.PASSES))):
            insert_file(db, name)
            (paths.files / name).write_bytes(b"x")

    def copied(source: Path, target: Path) -> int:
        schema = copy(source, target)
        (paths.files / f"file-x{len(passes)}").unlink()
        passes.append(schema)
        return schema

    monkeypatch.setattr(take_module, "copy_database", copied)
    made = take(paths, place)
    assert len(passes) == take_module.PASSES
    restore(place, made.name, tmp_path / "back")
    with Database(tmp_path / "back" / "appliance.db") as db:
        assert files.ids(db) == {"file-1"} == {path.name for path in (tmp_path / "back" / "files").iterdir()}


def test_what_is_the_boxs_own_may_not_go_in_each_pass(paths, place, monkeypatch):
    copy, passes = take_module.copy_database, []

    def copied(source: Path, target: Path) -> int:
        (paths.models / "m" / f"{len(passes)}").unlink()
        passes.append(source)
        return copy(source, target)

    for number in range(take_module.PASSES):
        (paths.models / "m" / f"{number}").write_bytes(b"x")
    monkeypatch.setattr(take_module, "copy_database", copied)
    with pytest.raises(BackupError, match="models/m/4"):
        take(paths, place)


def test_what_a_killed_backup_left_goes_unless_one_runs(paths):
    left = paths.data_dir / ".backup-x"
    left.mkdir()
    (left / "appliance.db").write_bytes(b"everybody's")
    with backup_copies.alone(paths.data_dir) as nobody_else:
        assert nobody_else
        backup_copies.sweep(paths.data_dir)
        assert left.exists(), "it is being written"
    backup_copies.sweep(paths.data_dir)
    assert not left.exists()


def test_a_box_that_was_set_up_anew_does_not_push_out_the_backups_of_the_one_before(paths, place, tmp_path):
    """Nor does another machine's, whose data directory has the same path."""
    take(paths, place)  # before it has a key
    with Database(paths.database) as db:
        keys.create(db, "first", ["admin"])
    made = take(paths, place, clock=lambda: 3e9)
    shutil.rmtree(paths.data_dir)
    paths.create()
    with Database(paths.database) as db:
        keys.create(db, "first", ["admin"])
    with pytest.raises(NotThisBox, match="restore the backup first"):
        take(paths, place, keep=1)
    shutil.rmtree(paths.data_dir)
    restore(place, None, paths.data_dir)
    assert take(paths, place, clock=lambda: 3e9 + 5).box_id == made.box_id


def test_a_box_that_is_restored_elsewhere_is_told_what_to_do_with_its_place(paths, place, tmp_path):
    """It was told to restore the backup first, which it had."""
    with Database(paths.database) as db:
        keys.create(db, "first", ["admin"])
        keys.create(db, "left", ["inference"])
        keys.revoke(db, "left")
    take(paths, place)
    back = BoxPaths.of(tmp_path / "back", tmp_path / "shm")
    restore(place, None, back.data_dir)
    assert live_keys(back.database) == ["first"]
    with pytest.raises(NotThisBox, match=rf"restored or copied from it: move it to {paths.data_dir} if that is gone"):
        take(back, place)


def test_a_restored_box_tells_its_living_keys_wherever_it_is_and_whatever_made_it(paths, place, tmp_path):
    """A directory with a ? or # in its name failed after it was restored; keys past their end were told as living."""
    with Database(paths.database) as db:
        keys.create(db, "first", ["admin"])
        keys.create(db, "next", ["inference"], expires_s=3e9)
        keys.create(db, "past", ["inference"], expires_s=1.0)
    take(paths, place)
    back = BoxPaths.of(tmp_path / "back?a#b%20", tmp_path / "shm")
    restore(place, None, back.data_dir)
    assert live_keys(back.database) == ["first", "next"]
    assert take(back, DirectoryObjects(tmp_path / "its own", create=True)).bytes
    with closing(sqlite3.connect(back.database)) as older:  # as before keys could end
        older.executescript("DROP INDEX keys_expiring; DROP INDEX keys_expired; ALTER TABLE keys DROP COLUMN expires_s")
    assert live_keys(back.database) == ["first", "next", "past"]


def test_only_who_makes_a_backup_is_told_to_make_its_place(tmp_path):
    nowhere = BackupSettings(url=str(tmp_path / "none"))
    for make, said in ((True, "make it first"), (False, "is it written right, and mounted")):
        with pytest.raises(BackupError, match=said):
            backup_main._place(nowhere, make=make)


def test_a_mount_that_is_lost_is_not_filled(paths, place):
    take(paths, place)
    shutil.rmtree(place.root)
    place.root.mkdir()
    with pytest.raises(BackupError, match="is it mounted"):
        take(paths, place)
    assert not list(place.root.iterdir())
    paths.last_backup.unlink()
    assert take(paths, place).new_bytes
