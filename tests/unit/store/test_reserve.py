"""Room inside the database: given back when the disk is nearly full, used by nobody else, made anew when there is
space."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.reserve import MIB, WAL_BYTES, Reserve


class Volume:
    """A disk of 10 GiB with so many bytes free."""

    def __init__(self, free: int):
        self.free = free

    def __call__(self, _: Path) -> os.statvfs_result:
        free = self.free // 4096
        return os.statvfs_result((4096, 4096, 10 * 2**30 // 4096, free, free, 0, 0, 0, 0, 255))


def fill_up(db: Database, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """From now on SQLite has no room for this statement."""
    real = db._connection

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def execute(self, sql: str, *rest: Any) -> Any:
            if sql == refused:
                raise sqlite3.OperationalError("database or disk is full")
            return real.execute(sql, *rest)

    monkeypatch.setattr(db, "_connection", Full())


def pages(db: Database) -> int:
    return db.execute("PRAGMA page_count").fetchone()[0]


def test_it_is_released_below_the_mark_and_used_up_before_the_file_grows(db: Database, tmp_path: Path):
    volume = Volume(2**30)
    db.reserve = Reserve(db, 4 * MIB, volume)
    db.reserve.keep(rows=99)
    assert db.reserve.held_bytes == 4 * MIB and (tmp_path / "appliance.db-wal").stat().st_size >= WAL_BYTES
    before = pages(db)
    volume.free = MIB
    with db.transaction():
        keys.create(db, "ann", ["admin"])
    assert db.reserve.held_bytes == 0
    for n in range(300):
        db.execute("INSERT INTO box (name, value) VALUES (?, ?)", [f"n{n}", "x" * 10_000])
    assert pages(db) == before  # three megabytes, and not one page that was not there
    db.reserve.keep()
    assert db.reserve.held_bytes == 0  # not while the disk is short
    volume.free = 2**30
    db.reserve.keep()
    assert db.reserve.held_bytes == MIB  # a row at a time: it is made on the controller's loop
    db.reserve.keep(rows=99)
    assert db.reserve.held_bytes == 4 * MIB


def test_a_statement_outside_a_transaction_releases_it_too_and_reading_does_not(db: Database):
    volume = Volume(2**30)
    db.reserve = Reserve(db, MIB, volume)
    db.reserve.keep(rows=9)
    volume.free = 0
    keys.list_all(db)
    assert db.reserve.held_bytes == MIB
    db.execute("DELETE FROM keys")
    assert db.reserve.held_bytes == 0


def test_before_the_disk_is_full_the_file_has_all_pages(db: Database):
    """Pages in the log alone could not be carried over on a full disk: the log filled up, and no key was revoked."""
    volume = Volume(2**30)
    db.reserve = Reserve(db, MIB, volume)
    db.reserve.keep(rows=9)
    assert db.reserve.in_log_bytes
    volume.free = 3 * 2 * WAL_BYTES
    db.execute("INSERT INTO box (name, value) VALUES ('one', 'write')")
    assert db.reserve.held_bytes == MIB and not db.reserve.in_log_bytes


def test_where_the_missing_pages_would_fill_the_disk_the_reserve_is_released(db: Database):
    volume = Volume(2**30)
    db.reserve = Reserve(db, MIB, volume)
    db.reserve.keep(rows=9)
    missing = db.reserve.in_log_bytes
    volume.free = 2 * WAL_BYTES + missing - 4096  # more than the mark, and not once they have their place
    db.execute("INSERT INTO box (name, value) VALUES ('one', 'write')")
    assert missing and db.reserve.held_bytes == 0


def test_a_log_that_cannot_be_carried_over_fails_no_write_and_no_start(db: Database, monkeypatch: pytest.MonkeyPatch):
    """A box whose disk was full did not start."""
    fill_up(db, monkeypatch, "PRAGMA wal_checkpoint(PASSIVE)")
    db.keep_reserve(MIB)
    assert db.reserve is not None and db.reserve.in_log_bytes
    keys.create(db, "ann", ["admin"])


async def test_a_round_of_housekeeping_carries_over_what_the_file_lacks(db: Database):
    db.keep_reserve(MIB)
    assert db.reserve is not None and not db.reserve.in_log_bytes
    for n in range(30):
        db.execute("INSERT INTO box (name, value) VALUES (?, ?)", [f"n{n}", "x" * 10_000])
    assert db.reserve.in_log_bytes
    await db.carry_over()
    assert not db.reserve.in_log_bytes


def test_a_smaller_setting_gives_back_and_a_restart_finds_it(tmp_path: Path):
    with Database(tmp_path / "a.db") as db:
        db.keep_reserve(3 * MIB)
        assert db.reserve is not None and db.reserve.held_bytes == 3 * MIB
    with Database(tmp_path / "a.db") as db:
        assert Reserve(db, 3 * MIB).held_bytes == 3 * MIB
        db.keep_reserve(0)
        assert db.reserve is not None and db.reserve.held_bytes == 0


def test_a_commit_that_fails_leaves_no_transaction_open(db: Database, monkeypatch: pytest.MonkeyPatch):
    """Before, the next transaction could not begin: every write failed until the controller was started anew."""
    fill_up(db, monkeypatch, "COMMIT")
    with pytest.raises(sqlite3.OperationalError), db.transaction():
        keys.create(db, "ann", ["admin"])
    monkeypatch.undo()
    assert keys.list_all(db) == []
    with db.transaction():
        keys.create(db, "ben", ["admin"])
    assert [row.name for row in keys.list_all(db)] == ["ben"]


SMALL = """
import os, sys
from pathlib import Path
from appliance.store.records import keys
from appliance.store.database import Database
folder = Path(sys.argv[1])
db = Database(folder / "appliance.db")
db.keep_reserve(int(sys.argv[2]))
ids = [keys.create(db, f"key-{n}", ["inference"])[0].id for n in range(200)]
db.reserve.keep()  # as housekeeping does
db.reserve.carry_over()
with open(folder / "hog", "wb", buffering=0) as hog:
    try:
        while True:
            hog.write(bytes(65536))
    except OSError:
        pass
    revoked = 0
    for key_id in ids:
        with db.transaction():
            keys.revoke(db, key_id)
            db.execute("INSERT INTO box (name, value) VALUES (?, ?)", [key_id, "x" * 5000])
        revoked += 1
        try:  # whoever fills the disk takes what was given back, too
            while True:
                hog.write(bytes(4096))
        except OSError:
            pass
print(revoked, len(keys.list_live(db)))
"""


@pytest.mark.soak
@pytest.mark.parametrize("reserve_bytes", [16 * MIB, 0])
def test_keys_are_revoked_on_a_volume_without_a_free_byte(tmp_path: Path, reserve_bytes: int):
    """Wants to mount: root, or a namespace of its own."""
    volume = tmp_path / "volume"
    volume.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(volume)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a volume: {mounted.stderr.decode().strip()} ({errno.errorcode[errno.EPERM]})")
    try:
        ran = subprocess.run(
            [sys.executable, "-c", SMALL, str(volume), str(reserve_bytes)], capture_output=True, text=True
        )
    finally:
        subprocess.run(["umount", "-l", str(volume)], check=True)
    if reserve_bytes:
        assert ran.stdout.split() == ["200", "0"], ran.stderr
    else:
        assert "disk is full" in ran.stderr  # what it is there for
