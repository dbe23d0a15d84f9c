"""The database keeps what it acknowledged, knows its own schema, and pages lists without holes."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from appliance.store.database import TABLES, Database
from appliance.store.errors import DatabaseUnusable, DuplicateRow, OtherSchema, RowNotFound, UnknownCursor
from appliance.store.objects import files, jobs
from appliance.store.rows import FileRow, JobRow
from appliance.store.table import Table


def job(number: int, **fields) -> JobRow:
    values = {"model": "m", "method": "supervised", "training_file": "f", "seed": 1, "output_model": "o"}
    return JobRow(id=f"ftjob-{number}", created_s=float(number), **values | fields)


def file(number: int, purpose: str = "batch", expires_s: float | None = None) -> FileRow:
    return FileRow(f"file-{number}", "n", purpose, 1, "0" * 64, "processed", 1.0, expires_s=expires_s)


def test_new_database_is_private_durable_and_has_the_schema(db: Database, tmp_path: Path):
    assert stat.S_IMODE((tmp_path / "appliance.db").stat().st_mode) == 0o600
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    assert db.execute("PRAGMA foreign_keys").fetchone()[0] == 1


@pytest.mark.parametrize("change", ["ADD COLUMN colour TEXT", "DROP COLUMN loss"])
def test_database_with_other_columns_is_refused(tmp_path: Path, change: str):
    with Database(tmp_path / "a.db") as db:
        db.execute(f"ALTER TABLE jobs {change}")
    with pytest.raises(OtherSchema, match="jobs"):
        Database(tmp_path / "a.db")


def test_database_of_another_program_is_refused_and_left_alone(tmp_path: Path):
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
        with pytest.raises(DatabaseUnusable, match="another program"):
            Database(tmp_path / "a.db")
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]


def test_declared_table_is_in_a_database_that_was_there_before(tmp_path: Path):
    @dataclass(frozen=True)
    class Gadget:
        id: str
        size: Literal["small", "large"]
        parts: list[int]
        owner: str | None = None

    Database(tmp_path / "a.db").close()
    gadgets = Table("gadgets", Gadget)
    try:
        with Database(tmp_path / "a.db") as db:
            gadgets.insert(db, Gadget("t1", "small", [1, 2]))
            assert gadgets.find(db, "t1") == Gadget("t1", "small", [1, 2], None)
            with pytest.raises(sqlite3.IntegrityError):
                gadgets.insert(db, Gadget("t2", "tiny", []))  # type: ignore[arg-type]
    finally:
        del TABLES["gadgets"]


def test_a_file_that_is_no_database_is_named(tmp_path: Path):
    (tmp_path / "a.db").write_bytes(b"this is not a database, but it is long enough to look at" * 20)
    with pytest.raises(DatabaseUnusable, match="a.db cannot be used"):
        Database(tmp_path / "a.db")


def test_an_exception_undoes_the_whole_transaction_with_those_inside_it(db: Database):
    with pytest.raises(RuntimeError), db.transaction():
        jobs.insert(db, job(1))
        with db.transaction():
            jobs.insert(db, job(2))
        raise RuntimeError
    assert jobs.list_unfinished(db) == []
    with db.transaction():
        jobs.insert(db, job(3))
    assert [row.id for row in jobs.list_unfinished(db)] == ["ftjob-3"]


def test_the_same_id_twice_and_unknown_rows_are_named(db: Database):
    jobs.insert(db, job(1))
    with pytest.raises(DuplicateRow, match="ftjob-1"):
        jobs.insert(db, job(1))
    with pytest.raises(RowNotFound, match="ftjob-2"):
        jobs.update(db, "ftjob-2", step=1)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_put_together_are_the_whole_list_in_order(db: Database, descending: bool, limit: int):
    for number in range(7):
        files.insert(db, file(number))
    found, after = [], None
    while True:
        page = files.page(db, viewer=None, purpose=None, after=after, limit=limit, descending=descending)
        found += [row.id for row in page.data]
        if not page.has_more:
            break
        after = page.data[-1].id
    expected = [f"file-{n}" for n in range(7)]
    assert found == (expected[::-1] if descending else expected)


def test_a_cursor_is_a_position_whatever_the_filter_but_must_exist(db: Database):
    files.insert(db, file(1, "batch"))
    files.insert(db, file(2, "vision"))
    files.insert(db, file(3, "batch"))
    page = files.page(db, viewer=None, purpose="batch", after="file-2", limit=10, descending=True)
    assert [row.id for row in page.data] == ["file-1"]
    with pytest.raises(UnknownCursor, match="file-9"):
        files.page(db, viewer=None, purpose=None, after="file-9", limit=10, descending=True)


def test_a_deleted_last_row_does_not_give_its_place_to_a_new_one(db: Database):
    for number in (1, 2):
        files.insert(db, file(number))
    files.delete(db, "file-2")
    files.insert(db, file(3))
    seqs = [row["seq"] for row in db.execute("SELECT seq FROM files ORDER BY seq")]
    assert seqs == [1, 3]


def test_expired_files_are_invisible_before_they_are_swept(db: Database):
    files.insert(db, file(1, expires_s=100.0))
    assert files.find(db, "file-1", viewer=None, now_s=99.0) is not None
    assert files.find(db, "file-1", viewer=None, now_s=100.0) is None
    assert files.page(db, viewer=None, purpose=None, after=None, limit=9, descending=True).data == []
    assert [row.id for row in files.expired(db, now_s=100.0)] == ["file-1"]
