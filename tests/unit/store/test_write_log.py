"""What was deleted stands nowhere in the files of the database."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from appliance.store import database, write_log
from appliance.store.database import Database
from appliance.store.objects import responses
from appliance.store.rows import ResponseRow

SAID = "what annabel said "
_CONNECT = sqlite3.connect


def keep(db: Database) -> None:
    row = ResponseRow(
        "resp_1", "key", "completed", created_s=1.0, used_s=1.0, bytes=9, input=SAID * 2000, response="{}", owner="a"
    )
    assert responses.insert(db, row)


def said(db: Database) -> dict[str, int]:
    """How often it stands in each file."""
    return {
        path.name: count
        for path in db.path.parent.iterdir()
        if (count := path.read_bytes().count(SAID.encode())) and path.is_file()
    }


def test_what_was_deleted_stands_in_no_log_once_it_is_emptied(tmp_path):
    with Database(tmp_path / "a.db") as db:
        keep(db)
        responses.delete(db, "resp_1")
        assert said(db).keys() == {"a.db-wal"}, "deleting writes no more than that it is gone"
        assert write_log.emptied(db.path, 0.0) and said(db) == {}
        keep(db)  # it goes on as before
        assert responses.find(db, "resp_1") is not None


def test_one_that_is_read_from_is_waited_for_and_the_writer_goes_on(tmp_path):
    with Database(tmp_path / "a.db") as db, closing(sqlite3.connect(db.path, isolation_level=None)) as reader:
        keep(db)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM responses").fetchone() == (1,)
        responses.delete(db, "resp_1")
        assert not write_log.emptied(db.path, 0.0)
        keep(db)
        responses.delete(db, "resp_1")
        reader.execute("COMMIT")
        assert write_log.emptied(db.path, 0.0) and said(db) == {}


def test_pages_that_became_free_are_overwritten_by_every_build_of_sqlite(tmp_path, monkeypatch):
    """Debian's overwrites what is deleted, others do not: there a forgotten person's answers stood in free pages."""

    def another_build(*args, **named):
        connection = _CONNECT(*args, **named)
        connection.execute("PRAGMA secure_delete = OFF")
        return connection

    monkeypatch.setattr(database.sqlite3, "connect", another_build)
    with Database(tmp_path / "a.db") as db:
        keep(db)
        assert write_log.emptied(db.path, 0.0) and said(db).keys() == {"a.db"}
        responses.delete(db, "resp_1")
        assert write_log.emptied(db.path, 0.0) and said(db) == {}
