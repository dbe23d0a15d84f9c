"""Transactions of the database are durable, its schema is checked, and pages cover each list completely."""

import contextlib
import hashlib
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from appliance.controller.bus.bus import first_generation
from appliance.store import box, files, jobs, keys
from appliance.store.database import (
    TABLES,
    Database,
    DatabaseUnusable,
    IllegalTransition,
    OtherSchema,
    RowNotFound,
    Table,
    UnknownCursor,
)
from appliance.store.rows import FileRow, JobMetricRow, JobRow


def job(number: int, **fields) -> JobRow:
    values = {"model": "m", "method": "supervised", "training_file": "f", "seed": 1, "output_model": "o"}
    return JobRow(id=f"ftjob-{number}", created_s=float(number), **values | fields)


def file(number: int, purpose: str = "batch", expires_s: float | None = None) -> FileRow:
    return FileRow(f"file-{number}", "n", purpose, 1, "0" * 64, "processed", 1.0, expires_s=expires_s)


def test_new_database_is_private_and_durable(db: Database, tmp_path: Path):
    assert stat.S_IMODE((tmp_path / "appliance.db").stat().st_mode) == 0o600
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    assert db.execute("PRAGMA foreign_keys").fetchone()[0] == 1


@pytest.mark.parametrize("change", ["ADD COLUMN colour TEXT", "DROP COLUMN loss"])
def test_database_with_other_columns_is_rejected(tmp_path: Path, change: str):
    with Database(tmp_path / "a.db") as db:
        db.execute(f"ALTER TABLE jobs {change}")
    with pytest.raises(OtherSchema, match="jobs"):
        Database(tmp_path / "a.db")


def test_database_of_another_program_is_rejected_unchanged(tmp_path: Path):
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
        with pytest.raises(DatabaseUnusable, match="another program"):
            Database(tmp_path / "a.db")
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]


def test_new_table_is_added_to_existing_database(tmp_path: Path):
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


def test_file_that_is_not_a_database_is_named(tmp_path: Path):
    (tmp_path / "a.db").write_bytes(b"this is not a database, but it is long enough to look at" * 20)
    with pytest.raises(DatabaseUnusable, match="a.db cannot be used"):
        Database(tmp_path / "a.db")


@pytest.mark.parametrize("fail", [RuntimeError, KeyboardInterrupt])
def test_transaction_error_rolls_back_and_releases_lock(db: Database, fail: type[BaseException]):
    with pytest.raises(fail), db.transaction():
        jobs.insert(db, job(1))
        with db.transaction():
            jobs.insert(db, job(2))
        raise fail
    assert jobs.list_unfinished(db) == []
    on_a_thread(jobs.insert, db, job(3))
    assert [row.id for row in jobs.list_unfinished(db)] == ["ftjob-3"]


def test_duplicate_id_and_unknown_row_raise(db: Database):
    jobs.insert(db, job(1))
    with pytest.raises(sqlite3.IntegrityError):
        jobs.insert(db, job(1))
    with pytest.raises(RowNotFound, match="ftjob-2"):
        jobs.update(db, "ftjob-2", step=1)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_cover_whole_list_in_order(db: Database, descending: bool, limit: int):
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


def test_page_cursor_may_be_outside_filter_but_must_exist(db: Database):
    files.insert(db, file(1, "batch"))
    files.insert(db, file(2, "vision"))
    files.insert(db, file(3, "batch"))
    page = files.page(db, viewer=None, purpose="batch", after="file-2", limit=10, descending=True)
    assert [row.id for row in page.data] == ["file-1"]
    with pytest.raises(UnknownCursor, match="file-9"):
        files.page(db, viewer=None, purpose=None, after="file-9", limit=10, descending=True)


def test_expired_files_are_invisible_before_sweep(db: Database):
    files.insert(db, file(1, expires_s=100.0))
    assert files.find(db, "file-1", viewer=None, now_s=99.0) is not None
    assert files.find(db, "file-1", viewer=None, now_s=100.0) is None
    assert files.page(db, viewer=None, purpose=None, after=None, limit=9, descending=True).data == []


def test_key_has_256_bits_and_is_stored_as_hash(db: Database, tmp_path: Path):
    row, key = keys.create(db, "laptop", ["inference"])
    assert key.startswith("sk-appl-") and len(key) == len("sk-appl-") + 43
    assert row.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key.startswith(row.prefix) and len(row.prefix) <= 12
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert key[12:].encode() not in (tmp_path / "appliance.db").read_bytes()


def test_key_name_is_reusable_only_after_revocation(db: Database):
    first, key = keys.create(db, "ci", ["inference"])
    with pytest.raises(sqlite3.IntegrityError):
        keys.create(db, "ci", ["inference"])
    revoked_s = keys.revoke(db, "ci").revoked_s
    assert revoked_s is not None and keys.revoke(db, first.id).revoked_s == revoked_s
    second, other = keys.create(db, "ci", ["inference"])
    assert key != other and first.id != second.id and keys.find(db, "ci") == second
    assert [row.id for row in keys.list_all(db, "revoked_s IS NULL")] == [second.id] and len(keys.list_all(db)) == 2
    with pytest.raises(RowNotFound):
        keys.revoke(db, "nobody")


def test_set_phase_records_times_and_keeps_finished_jobs(db: Database):
    jobs.insert(db, job(1))
    jobs.set_phase(db, "ftjob-1", "queued")
    jobs.set_phase(db, "ftjob-1", "running", devices=["n0/0", "n0/1"])
    started = jobs.get(db, "ftjob-1")
    assert started.started_s is not None and started.devices == ["n0/0", "n0/1"]
    jobs.update(db, "ftjob-1", eta_s=9.0)
    jobs.set_phase(db, "ftjob-1", "suspended", reason="traffic")
    suspended = jobs.get(db, "ftjob-1")
    assert (suspended.devices, suspended.eta_s, suspended.reason) == ([], None, "traffic")
    jobs.set_phase(db, "ftjob-1", "running", devices=["n0/0"])
    assert jobs.get(db, "ftjob-1").started_s == started.started_s
    jobs.set_phase(db, "ftjob-1", "succeeded")
    assert jobs.get(db, "ftjob-1").finished_s is not None
    for phase in ("running", "failed", "cancelled"):
        with pytest.raises(IllegalTransition, match="succeeded"):
            jobs.set_phase(db, "ftjob-1", phase)  # type: ignore[arg-type]


def test_set_wanted_after_cancel_is_rejected(db: Database):
    jobs.insert(db, job(1, phase="running"))
    assert jobs.set_wanted(db, "ftjob-1", "pause").wanted == "pause"
    assert jobs.set_wanted(db, "ftjob-1", "run").wanted == "run"
    jobs.set_wanted(db, "ftjob-1", "cancel")
    assert jobs.set_wanted(db, "ftjob-1", "cancel").wanted == "cancel"
    with pytest.raises(IllegalTransition):
        jobs.set_wanted(db, "ftjob-1", "run")


def test_repeated_step_replaces_metrics_and_keeps_validation(db: Database):
    jobs.insert(db, job(1))
    jobs.upsert_metric(db, JobMetricRow("ftjob-1", 5, 1.0, loss=2.0, tokens_per_s=10.0))
    jobs.upsert_metric(db, JobMetricRow("ftjob-1", 5, 2.0, valid_loss=1.5))
    jobs.upsert_metric(db, JobMetricRow("ftjob-1", 5, 3.0, loss=1.9))
    (row,) = jobs.list_metrics(db, "ftjob-1")
    assert (row.loss, row.valid_loss, row.tokens_per_s, row.created_s) == (1.9, 1.5, 10.0, 3.0)
    jobs.upsert_metric(db, JobMetricRow("ftjob-1", 6, 4.0, loss=1.8))
    assert [row.step for row in jobs.list_metrics(db, "ftjob-1", after_step=5)] == [6]
    assert [row.step for row in jobs.last_metrics(db, "ftjob-1", 1)] == [6]


WAIT_S = 60.0


def on_a_thread(work, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result(WAIT_S)


def test_concurrent_writers_lose_no_rows(db: Database):
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(first_generation, [db] * 200)) == [starts * 10**9 for starts in range(1, 201)]


def test_empty_log_removes_deleted_text_from_disk(tmp_path: Path):
    with Database(tmp_path / "a.db") as db:
        box.put(db, "note", "a secret")
        db.execute("DELETE FROM box")
        assert db.empty_log()
        assert not any(b"a secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_full_disk_rejects_writes_until_space_is_free(db: Database):
    size = db.value("PRAGMA page_count")
    db.execute(f"PRAGMA max_page_count = {size}")
    with pytest.raises(sqlite3.OperationalError, match="full"), db.transaction():
        for number in range(1000):
            jobs.insert(db, job(number))
    assert jobs.list_unfinished(db) == []
    db.execute(f"PRAGMA max_page_count = {size + 1000}")
    on_a_thread(jobs.insert, db, job(1))
    assert len(jobs.list_unfinished(db)) == 1


def test_closed_database_rejects_all_threads(tmp_path: Path):
    db = Database(tmp_path / "a.db")
    db.close()
    with pytest.raises(sqlite3.ProgrammingError):
        box.get(db, "mode")
    with pytest.raises(sqlite3.ProgrammingError):
        on_a_thread(box.get, db, "mode")


WRITER = """
import sys
from itertools import count
from pathlib import Path
from appliance.store.database import Database
from appliance.store import box

db = Database(Path(sys.argv[1]))
for number in count():
    with db.transaction():
        for part in range(3):
            box.put(db, f"{number}/{part}", number)
    print(number, flush=True)
"""


def test_database_after_kill_has_all_acknowledged_transactions(tmp_path: Path):
    path = tmp_path / "appliance.db"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 50:
            pass
        process.kill()
        acknowledged = 51 + len(process.stdout.read().split())
    with Database(path) as db:
        assert db.value("PRAGMA integrity_check") == "ok"
        stored = db.column("SELECT count(*) FROM box GROUP BY value")
        assert set(stored) == {3} and acknowledged <= len(stored) <= acknowledged + 1


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "appliance.db") as opened:
        yield opened
