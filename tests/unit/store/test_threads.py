"""All threads use one database: readers never wait for the writer, and writers take turns."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.records import box
from tests.unit.store.test_database import job

WAIT_S = 60.0


def on_a_thread(work, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result(WAIT_S)


def test_writers_of_many_threads_lose_nothing(db: Database):
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: box.increment(db, "starts"), range(200)))
    assert sorted(numbers) == list(range(1, 201))


@pytest.mark.parametrize("fail", [RuntimeError, KeyboardInterrupt])
def test_error_in_a_transaction_releases_the_write_lock(db: Database, fail: type[BaseException]):
    with pytest.raises(fail), db.transaction():
        jobs.insert(db, job(1))
        raise fail
    on_a_thread(jobs.insert, db, job(2))
    assert [row.id for row in jobs.list_unfinished(db)] == ["ftjob-2"]


def test_emptied_log_and_file_have_no_deleted_text(tmp_path: Path):
    with Database(tmp_path / "a.db") as db:
        box.put(db, "note", "a secret")
        db.execute("DELETE FROM box")
        assert db.empty_log()
        assert not any(b"a secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_full_disk_refuses_writes_and_takes_them_once_there_is_room(db: Database):
    size = db.value("PRAGMA page_count")
    db.execute(f"PRAGMA max_page_count = {size}")
    with pytest.raises(sqlite3.OperationalError, match="full"), db.transaction():
        for number in range(1000):
            jobs.insert(db, job(number))
    assert jobs.list_unfinished(db) == []
    db.execute(f"PRAGMA max_page_count = {size + 1000}")
    on_a_thread(jobs.insert, db, job(1))
    assert len(jobs.list_unfinished(db)) == 1


def test_closed_database_refuses_all_threads(tmp_path: Path):
    db = Database(tmp_path / "a.db")
    db.close()
    with pytest.raises(sqlite3.ProgrammingError):
        box.get(db, "mode")
    with pytest.raises(sqlite3.ProgrammingError):
        on_a_thread(box.get, db, "mode")
