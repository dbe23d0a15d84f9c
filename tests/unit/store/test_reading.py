"""What is read on threads of its own: as of one moment, never a write, in turns, and ended when nobody waits."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.store import readers
from appliance.store.database import Database
from appliance.store.errors import OpenedByParent, ReadingEnded, UnknownCursor, WriteWhileReading
from appliance.store.objects import files, jobs
from appliance.store.reading_threads import OF_ONE, THREADS
from appliance.store.records import keys
from appliance.store.rows import FileRow

FOR_EVER = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "appliance.db") as opened:
        opened.execute("CREATE TABLE sums (name TEXT PRIMARY KEY, value INTEGER)")
        opened.many("INSERT INTO sums VALUES (?, ?)", [("a", 50), ("b", 50), ("commits", 0)])
        yield opened


def counted(db: Database) -> tuple[int, int]:
    """(a + b, which every transaction leaves at 100; number of transactions), by two statements."""
    (commits,) = db.execute("SELECT value FROM sums WHERE name = 'commits'").fetchone()
    (total,) = db.execute("SELECT sum(value) FROM sums WHERE name != 'commits'").fetchone()
    (again,) = db.execute("SELECT value FROM sums WHERE name = 'commits'").fetchone()
    assert commits == again, "two moments within one reading"
    return total, commits


@contextmanager
def overlapping_reads(db: Database) -> Iterator[threading.Event]:
    """One of two threads reads at every moment. Yields what is set when they are to end."""
    done, begun = threading.Event(), [threading.Event(), threading.Event()]

    def read_on(mine: threading.Event, other: threading.Event) -> None:
        while not done.is_set():
            with db.reading():
                counted(db)
                mine.set()
                other.wait(0.02)
                other.clear()

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read_on, *pair) for pair in (begun, begun[::-1])]
        try:
            yield done
        finally:
            done.set()
        for one in reading:
            one.result()


@given(amounts=st.lists(st.tuples(st.integers(-30, 30), st.booleans()), min_size=1, max_size=25))
@settings(max_examples=25, deadline=None)
def test_readers_see_what_was_committed_and_never_half_a_transaction(tmp_path_factory, amounts: list[tuple[int, bool]]):
    done, seen = threading.Event(), list[tuple[int, int, int]]()
    with Database(tmp_path_factory.mktemp("db") / "a.db") as db:
        db.execute("CREATE TABLE sums (name TEXT PRIMARY KEY, value INTEGER)")
        db.many("INSERT INTO sums VALUES (?, ?)", [("a", 50), ("b", 50), ("commits", 0)])
        committed = [0]

        def read_on() -> None:
            while not done.is_set():
                before = committed[0]
                with db.reading():
                    seen.append((*counted(db), before))

        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(read_on) for _ in range(2)]
            try:
                for amount, kept in amounts:
                    try:
                        with db.transaction():
                            db.execute("UPDATE sums SET value = value - ? WHERE name = 'a'", [amount])
                            db.execute("UPDATE sums SET value = value + ? WHERE name = 'b'", [amount])
                            db.execute("UPDATE sums SET value = value + 1 WHERE name = 'commits'")
                            if not kept:
                                raise KeyError
                    except KeyError:
                        continue
                    committed[0] += 1
                    with db.reading():
                        assert counted(db) == (100, committed[0]), "who reads after a commit sees it"
            finally:
                done.set()
            for one in reading:
                one.result()
        assert all(total == 100 and commits >= before for total, commits, before in seen)


async def test_who_reads_after_a_reply_sees_what_was_written_and_the_code_of_the_tables_is_the_same(db: Database):
    row, _ = keys.create(db, "ann", ["inference"])
    assert await db.read("ann", keys.find, db, "ann") == row == keys.find(db, "ann")
    keys.revoke(db, "ann")
    assert await db.read(None, keys.is_revoked, db, row.id)
    with pytest.raises(UnknownCursor):
        await db.read("ann", lambda: jobs.page(db, viewer=None, after="nobody", limit=1))


@pytest.mark.parametrize(
    "write",
    [
        lambda db: db.execute("INSERT INTO sums VALUES ('c', 1)"),
        lambda db: db.execute("DELETE FROM sums"),
        lambda db: db.execute("CREATE TABLE more (x)"),
        lambda db: db.many("INSERT INTO sums VALUES (?, 1)", [("c",)]),
        lambda db: keys.create(db, "ann", []),
        lambda db: files.update(db, "file-1", status="x"),
    ],
)
async def test_a_reading_does_not_write(db: Database, write: Callable[[Database], object]):
    files.insert(db, FileRow("file-1", "n", "batch", 1, "0" * 64, "processed", 1.0))
    with pytest.raises(WriteWhileReading):
        await db.read(None, write, db)
    with pytest.raises(WriteWhileReading), db.reading():
        write(db)
    assert db.execute("SELECT count(*) FROM sums").fetchone()[0] == 3 and not keys.list_all(db)
    write(db)  # as it may again here


def test_elsewhere_no_thread_reads_but_the_openers(db: Database):
    with ThreadPoolExecutor(1) as pool, pytest.raises(sqlite3.ProgrammingError, match="thread"):
        pool.submit(keys.list_all, db).result()


def test_within_a_transaction_nothing_is_read_beside_it(db: Database):
    with pytest.raises(AssertionError, match="would not see"), db.transaction(), db.reading():
        pass


def test_a_cursor_that_was_left_open_ends_with_its_reading(db: Database):
    with db.reading():
        left = iter(db.execute("SELECT value FROM sums"))
        next(left)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        next(left)
    db.execute("UPDATE sums SET value = 7 WHERE name = 'commits'")
    with db.reading():
        assert counted(db) == (100, 7), "the same connection, a later moment"


async def test_a_function_is_there_for_readers_too(db: Database):
    await db.read(None, counted, db)
    db.define("twice", 1, lambda value: 2 * value)
    asked = [db.read(f"{n}", lambda: db.execute("SELECT twice(21)").fetchone()[0]) for n in range(THREADS)]
    assert await asyncio.gather(*asked) == [42] * THREADS


async def test_owners_take_turns_and_none_has_all_threads(db: Database):
    go, end, begun = threading.Event(), threading.Event(), list[str]()

    def work(name: str) -> None:
        begun.append(name)
        assert (end if go.is_set() else go).wait(60)

    hers = [asyncio.ensure_future(db.read("ann", work, "ann")) for _ in range(9)]
    his = [asyncio.ensure_future(db.read("bob", work, "bob")) for _ in range(2)]
    theirs = asyncio.ensure_future(db.read("cid", work, "cid"))
    while len(begun) < THREADS:
        await asyncio.sleep(0)
    assert sorted(begun) == ["ann"] * OF_ONE + ["bob"] * 2
    go.set()
    while len(begun) < THREADS + OF_ONE + 1:
        await asyncio.sleep(0)
    assert sorted(begun[THREADS:]) == ["ann"] * OF_ONE + ["cid"], "he does not wait for the rest of ann's"
    end.set()
    await asyncio.gather(*hers, *his, theirs)


async def test_a_reading_that_nobody_waits_for_gives_its_thread_back(db: Database):
    def for_ever() -> None:
        db.execute(FOR_EVER).fetchone()

    tasks = [asyncio.ensure_future(db.read("ann", for_ever)) for _ in range(2 * THREADS)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(60):
        assert await db.read("ann", counted, db) == (100, 0)
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*tasks, return_exceptions=True))


async def test_closing_ends_what_is_read_and_refuses_what_waits(tmp_path: Path):
    db, begun = Database(tmp_path / "a.db"), threading.Event()

    def for_ever() -> None:
        begun.set()
        db.execute(FOR_EVER).fetchone()

    tasks = [asyncio.ensure_future(db.read("ann", for_ever)) for _ in range(OF_ONE + 1)]
    while not begun.is_set():
        await asyncio.sleep(0)
    db.close()
    assert [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)] == [ReadingEnded] * len(tasks)
    with pytest.raises(ReadingEnded):
        await db.read("ann", for_ever)
    with Database(tmp_path / "a.db") as again:
        assert again.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


async def test_a_forked_child_uses_nothing_of_its_parents(db: Database):
    await db.read(None, counted, db)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (lambda: counted(db), db.transaction().__enter__, db.reading):
                with pytest.raises(OpenedByParent):
                    use()
            db.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert await db.read(None, counted, db) == counted(db)


class Released:
    """A reserve that the disk has no room for."""

    is_released = True

    def tend(self) -> None:
        return None


async def test_what_is_long_is_carried_over_beside_the_writers_thread(tmp_path: Path):
    """The commit of a row of 12 MiB carried all of it over from the log: 43 ms of the loop's processor time, now 23."""
    with Database(tmp_path / "a.db") as db:
        db.execute("CREATE TABLE texts (text TEXT)")
        await db.carry_over()
        before = db.path.stat().st_size
        with db.log_is_left():
            db.execute("INSERT INTO texts VALUES (?)", ["x" * (8 << 20)])
            assert db.path.stat().st_size == before
        await db.carry_over()
        assert db.path.stat().st_size > before + (8 << 20)
        db.execute("INSERT INTO texts VALUES (?)", ["y" * (8 << 20)])
        assert db.path.stat().st_size > before + (16 << 20), "others' commits do as they did"


@pytest.mark.parametrize("disk_is_short", [False, True])
def test_readings_without_a_gap_do_not_have_the_log_grow(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_is_short: bool
):
    """Where the disk is full it has to do with the length that it has, or no key could be revoked."""
    monkeypatch.setattr(readers, "LOG_BYTES", 1 << 40 if disk_is_short else 2 << 20)
    if disk_is_short:
        db.reserve = Released()  # type: ignore[assignment]
    monkeypatch.setattr(readers, "_GAPS_EVERY_S", 0.05)
    longest, texts = 0, "x" * 100_000
    with overlapping_reads(db):
        for number in range(600):
            db.execute("INSERT INTO sums VALUES (?, ?) ON CONFLICT DO NOTHING", [texts + str(number), 0])
            db.execute("DELETE FROM sums WHERE length(name) > 1000")
            longest = max(longest, (tmp_path / "appliance.db-wal").stat().st_size)
    assert longest < 60 << 20, "120 MB were written"
    until_s = time.monotonic() + 10
    while (tmp_path / "appliance.db-wal").stat().st_size > 8 << 20:  # readers make room every 50 ms at most
        assert time.monotonic() < until_s, "the log stays as long as it was"
        with db.reading():
            pass
        db.execute("UPDATE sums SET value = value + 1 WHERE name = 'commits'")


def test_nor_where_the_writer_takes_longer_than_a_moment(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Readers made room for 50 ms, within which it had not come to the log's end: its next transactions went behind it,
    and 60 MB a second on a slow disk."""
    monkeypatch.setattr(readers, "LOG_BYTES", 8 << 20)
    monkeypatch.setattr(readers, "MOST_LOG_BYTES", 8 << 20)
    monkeypatch.setattr(readers, "_GAPS_EVERY_S", 0.05)
    db.execute("PRAGMA journal_size_limit = 1048576")
    longest = 0
    with overlapping_reads(db) as reading:
        for number in range(40):
            with db.transaction():
                db.execute("INSERT INTO sums VALUES (?, ?)", ["x" * 1_000_000 + str(number), 0])
                db.execute("DELETE FROM sums WHERE length(name) > 1000")
                reading.wait(0.08)
            longest = max(longest, (tmp_path / "appliance.db-wal").stat().st_size)
    assert longest < 24 << 20, "80 MB were written"
