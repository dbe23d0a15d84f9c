"""The database keeps what it acknowledged, knows its own schema, and pages lists without holes."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from appliance.store import migrator
from appliance.store.database import Database
from appliance.store.errors import (
    DatabaseUnusable,
    DuplicateRow,
    RowNotFound,
    SchemaTooNew,
    UnknownColumn,
    UnknownCursor,
)
from appliance.store.migrator import migrations
from appliance.store.objects import files, job_records, jobs, models
from appliance.store.records import box, deployments
from appliance.store.rows import FileRow, JobRow, ModelRow


def job(number: int, **fields) -> JobRow:
    values = {"model": "m", "method": "supervised", "training_file": "f", "seed": 1, "output_model": "o"}
    return JobRow(id=f"ftjob-{number}", created_s=float(number), **values | fields)


def file(number: int, purpose: str = "batch", expires_s: float | None = None) -> FileRow:
    return FileRow(f"file-{number}", "n", purpose, 1, "0" * 64, "processed", 1.0, expires_s=expires_s)


def test_a_new_database_is_private_durable_and_at_the_newest_schema(db: Database, tmp_path: Path):
    assert stat.S_IMODE((tmp_path / "appliance.db").stat().st_mode) == 0o600
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    assert db.execute("PRAGMA foreign_keys").fetchone()[0] == 1
    assert db.execute("PRAGMA user_version").fetchone()[0] >= 1


def test_opening_again_keeps_rows_and_migrates_nothing(tmp_path: Path):
    with Database(tmp_path / "a.db") as db:
        jobs.insert(db, job(1, metadata={"k": "v"}, devices=["n0/0"]))
        version = db.execute("PRAGMA user_version").fetchone()[0]
    with Database(tmp_path / "a.db") as db:
        assert jobs.get(db, "ftjob-1") == job(1, metadata={"k": "v"}, devices=["n0/0"])
        assert db.execute("PRAGMA user_version").fetchone()[0] == version


def older_database(path: Path, numbers: list[int]) -> None:
    """As a release made it that had these migrations, and only `user_version` to remember them by."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for number in numbers:
            connection.executescript(migrations()[number])
        connection.execute(f"PRAGMA user_version = {max(numbers)}")
        connection.execute(
            "INSERT INTO files (id, filename, purpose, bytes, sha256, status, created_s) "
            "VALUES ('file-old', 'n', 'batch', 1, '00', 'processed', 1.0)"
        )
        connection.commit()


def schema(db: Database) -> dict[str, list[tuple[str, str]]]:
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'index')")]
    return {table: sorted((row[1], row[2]) for row in db.execute(f"PRAGMA table_info({table})")) for table in tables}


@pytest.mark.parametrize(
    "numbers",
    [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 10], [1, 2, 8, 10], [1, 2, 4, 8, 9, 10]],
    ids=lambda numbers: "-".join(map(str, numbers)),
)
def test_a_database_of_an_older_set_of_migrations_gets_what_it_lacks(tmp_path: Path, db: Database, numbers):
    older_database(tmp_path / "old.db", numbers)
    with Database(tmp_path / "old.db") as opened:
        assert schema(opened) == schema(db)
        assert opened.execute("SELECT id FROM files").fetchall()[0][0] == "file-old"
        assert [row[0] for row in opened.execute("SELECT number FROM migrations")] == list(migrations())
    with Database(tmp_path / "old.db") as again:
        assert schema(again) == schema(db)


def test_an_operators_idle_time_survives_its_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, older = tmp_path / "old.db", {number: script for number, script in migrations().items() if number < 33}
    with monkeypatch.context() as patched:
        patched.setattr(migrator, "migrations", lambda: older)
        with Database(path) as old:
            for model, idle_s in (("m", 600.0), ("n", None)):
                models.insert(old, ModelRow(model, "base", "llama", 1, 1, "x", "x", 1.0))
                old.execute(
                    "INSERT INTO deployments (model, created_s, min_replicas, tensor_parallel, pinned, options,"
                    " idle_sleep_s) VALUES (?, 1, 0, 1, 0, '{}', ?)",
                    [model, idle_s],
                )
    with Database(path) as opened:
        assert [row.idle for row in deployments.list_all(opened)] == [{"idle_sleep_s": 600.0}, {}]


def test_the_grader_of_a_job_becomes_its_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, older = (
        tmp_path / "old.db",
        {number: script for number, script in migrations().items() if number < 70 or number == 141},
    )
    with monkeypatch.context() as patched:
        patched.setattr(migrator, "migrations", lambda: older)
        with Database(path) as old:
            jobs.insert(old, job(1))
            old.execute("""INSERT INTO job_graders VALUES ('ftjob-1', '{"type": "string_check", "name": "é"}')""")
    with Database(path) as opened:
        judge = job_records.find_judge(opened, "ftjob-1")
        assert judge is not None and judge.judge == {"grader": {"type": "string_check", "name": "é"}}


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Database(tmp_path / "a.db") as db:
        before = schema(db)
    more = {**migrations(), 900: "CREATE TABLE half (x);\nCREATE TABLE files (x);\n"}
    monkeypatch.setattr(migrator, "migrations", lambda: more)
    with pytest.raises(DatabaseUnusable, match="already exists"):
        Database(tmp_path / "a.db")
    monkeypatch.undo()
    with Database(tmp_path / "a.db") as db:
        assert schema(db) == before and db.execute("PRAGMA user_version").fetchone()[0] == max(migrations())


def test_a_crash_between_two_migrations_leaves_the_old_version_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, found = tmp_path / "a.db", tmp_path / "found"
    found.mkdir()
    with Database(path) as db:
        before = schema(db)
    more = {**migrations(), 900: "CREATE TABLE first (x);\n", 901: "CREATE TABLE second AS SELECT crash() AS x;\n"}

    def crash() -> int:
        # What a kill or a power loss would leave at this moment.
        for file in tmp_path.glob("a.db*"):
            shutil.copy(file, found)
        return 1

    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection,
        monkeypatch.context() as patched,
    ):
        connection.create_function("crash", 0, crash)
        patched.setattr(migrator, "migrations", lambda: more)
        migrator.migrate(connection, path)
    assert sqlite3.connect(path).execute("SELECT x FROM second").fetchall() == [(1,)]
    # The release before still opens it: it would refuse a number that it does not know.
    with Database(found / "a.db") as db:
        assert schema(db) == before and db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_schema_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path):
    with Database(tmp_path / "a.db") as db:
        db.execute("PRAGMA user_version = 999")
    with pytest.raises(SchemaTooNew, match="999.*newer release"):
        Database(tmp_path / "a.db")
    assert sqlite3.connect(tmp_path / "a.db").execute("PRAGMA user_version").fetchone()[0] == 999


def test_a_file_that_is_no_database_is_named(tmp_path: Path):
    (tmp_path / "a.db").write_bytes(b"this is not a database, but it is long enough to look at" * 20)
    with pytest.raises(DatabaseUnusable, match="a.db cannot be used"):
        Database(tmp_path / "a.db")


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(DatabaseUnusable, match="nowhere"):
        Database(tmp_path / "nowhere" / "a.db")


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


def test_an_inner_transaction_that_fails_and_is_caught_leaves_the_outer_one_usable(db: Database):
    with db.transaction():
        jobs.insert(db, job(1))
        with pytest.raises(DuplicateRow), db.transaction():
            jobs.insert(db, job(1))
        jobs.insert(db, job(2))
    assert len(jobs.list_unfinished(db)) == 2


def test_the_same_id_twice_and_unknown_rows_and_columns_are_named(db: Database):
    jobs.insert(db, job(1))
    with pytest.raises(DuplicateRow, match="ftjob-1"):
        jobs.insert(db, job(1))
    with pytest.raises(RowNotFound, match="ftjob-2"):
        jobs.update(db, "ftjob-2", step=1)
    with pytest.raises(UnknownColumn, match="colour"):
        jobs.update(db, "ftjob-1", colour="red")


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_put_together_are_the_whole_list_in_order(db: Database, descending: bool, limit: int):
    for number in range(7):
        files.insert(db, file(number))
    found, after = [], None
    while True:
        page = files.page(db, viewer=None, now_s=0, purpose=None, after=after, limit=limit, descending=descending)
        found += [row.id for row in page.data]
        if not page.has_more:
            break
        after = page.data[-1].id
    expected = [f"file-{n}" for n in range(7)]
    assert found == (expected[::-1] if descending else expected)


def test_a_page_of_nothing_still_says_that_more_follow(db: Database):
    files.insert(db, file(1))
    page = files.page(db, viewer=None, now_s=0, purpose=None, after=None, limit=0, descending=True)
    assert (page.data, page.has_more) == ([], True)


def test_a_cursor_is_a_position_whatever_the_filter_but_must_exist(db: Database):
    files.insert(db, file(1, "batch"))
    files.insert(db, file(2, "vision"))
    files.insert(db, file(3, "batch"))
    page = files.page(db, viewer=None, now_s=0, purpose="batch", after="file-2", limit=10, descending=True)
    assert [row.id for row in page.data] == ["file-1"]
    with pytest.raises(UnknownCursor, match="file-9"):
        files.page(db, viewer=None, now_s=0, purpose=None, after="file-9", limit=10, descending=True)


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
    assert files.page(db, viewer=None, now_s=100.0, purpose=None, after=None, limit=9, descending=True).data == []
    assert files.expired(db, now_s=100.0) == ["file-1"]


def test_box_facts_and_counters(db: Database):
    assert box.get(db, "mode", "none yet") == "none yet"
    box.put(db, "mode", {"policy": "auto"})
    box.put(db, "mode", {"policy": "serve"})
    assert box.get(db, "mode") == {"policy": "serve"}
    assert [box.increment(db, "starts") for _ in range(3)] == [1, 2, 3]


def test_another_thread_is_refused(db: Database):
    caught: list[BaseException] = []

    def use() -> None:
        try:
            box.get(db, "mode")
        except sqlite3.ProgrammingError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert caught
