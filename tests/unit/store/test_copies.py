"""Before the schema of a database changes, it is copied as it is."""

from __future__ import annotations

import os
import sqlite3
import types
from pathlib import Path

import pytest

from appliance.store import copies, migrator
from appliance.store.copies import kept_copies
from appliance.store.database import Database
from appliance.store.errors import NoRoomForCopy

RELEASED = migrator.migrations()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Database(tmp_path / "a.db") as db:
        db.execute("INSERT INTO box (name, value) VALUES ('a', '1')")
    assert kept_copies(tmp_path / "a.db") == [], "a new database has no before"
    return tmp_path / "a.db"


def value(path: Path) -> tuple[str, int]:
    with sqlite3.connect(path) as connection:
        return (
            connection.execute("SELECT value FROM box WHERE name = 'a'").fetchone()[0],
            connection.execute("PRAGMA user_version").fetchone()[0],
        )


def newer(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    scripts = {**RELEASED, **{n: f"CREATE TABLE t{n} (x);\n" for n in numbers}}
    monkeypatch.setattr(migrator, "migrations", lambda: scripts)


def test_the_copy_is_the_database_of_before(path: Path, monkeypatch: pytest.MonkeyPatch):
    before = value(path)
    newer(monkeypatch, 900)
    with Database(path) as db:
        db.execute("UPDATE box SET value = '2' WHERE name = 'a'")
    with Database(path):
        pass
    (kept,) = kept_copies(path)
    assert value(kept.path) == before and kept.schema == before[1]
    assert value(path) == ("2", 900)
    assert kept.path.stat().st_mode & 0o777 == 0o600 and kept.path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(kept.path.parent) == [kept.path.name], "one file, without a log beside it"


def test_the_newest_three_stay(path: Path, monkeypatch: pytest.MonkeyPatch):
    (path.parent / copies.FOLDER).mkdir()
    (path.parent / copies.FOLDER / "schema-0001-x.db.partial").touch()  # of one that was killed
    (path.parent / copies.FOLDER / "of-the-newer-release.sqlite").touch()  # not its own
    for number in range(900, 905):
        newer(monkeypatch, *range(900, number + 1))
        with Database(path):
            pass
        (newest,) = (
            kept.path for kept in kept_copies(path) if kept.schema == (number - 1 if number > 900 else max(RELEASED))
        )
        os.utime(newest, (number, number))
    assert [kept.schema for kept in kept_copies(path)] == [901, 902, 903]
    assert len(os.listdir(path.parent / copies.FOLDER)) == 4


def test_without_room_for_the_copy_nothing_is_changed(path: Path, monkeypatch: pytest.MonkeyPatch):
    before = value(path)
    newer(monkeypatch, 900)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1_000_000))
    with pytest.raises(NoRoomForCopy, match="before its schema is changed.*1 are free"):
        Database(path)
    assert value(path) == before and kept_copies(path) == []
