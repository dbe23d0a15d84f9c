"""When a running box takes a backup by itself."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from appliance import last_backup
from appliance.boot.backup_schedule import BackupSchedule
from appliance.boot.scheduled_process import ProcessFailed
from appliance.last_backup import LastBackup


async def test_one_is_taken_when_the_newest_is_older_than_allowed(tmp_path: Path):
    newest, started, now_s = tmp_path / "last-backup.json", [], 1e9

    async def start() -> asyncio.subprocess.Process:
        started.append(now_s)
        last_backup.write(newest, LastBackup("b", now_s, "/mnt", 1))
        return await asyncio.create_subprocess_exec("true")

    schedule = BackupSchedule(24, newest, tmp_path / "backup.log", start, clock=lambda: now_s)
    await schedule.look()
    await schedule.look()
    now_s += 23.9 * 3600
    await schedule.look()
    assert started == [1e9], "also the first one counts, and a restart takes none anew"
    now_s += 0.2 * 3600
    await schedule.look()
    assert len(started) == 2


async def test_one_of_a_time_when_the_clock_was_ahead_counts_for_nothing(tmp_path: Path):
    newest, started = tmp_path / "last-backup.json", []
    last_backup.write(newest, LastBackup("b", 2e9, "/mnt", 1))

    async def start() -> asyncio.subprocess.Process:
        started.append(1)
        last_backup.write(newest, LastBackup("b", 1.9e9, "/mnt", 1))
        return await asyncio.create_subprocess_exec("true")

    schedule = BackupSchedule(24, newest, tmp_path / "backup.log", start, clock=lambda: 1.9e9)
    await schedule.look()
    await schedule.look()
    assert started == [1]


async def test_one_that_fails_says_why_and_is_tried_again(tmp_path: Path):
    log = tmp_path / "backup.log"

    async def start() -> asyncio.subprocess.Process:
        with open(log, "ab") as said:
            words = "import sys; print('/mnt is full', file=sys.stderr); sys.exit(1)"
            return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", words, stderr=said)

    schedule = BackupSchedule(1, tmp_path / "last-backup.json", log, start)
    for _ in range(2):
        with pytest.raises(ProcessFailed, match="/mnt is full"):
            await schedule.look()


async def test_a_box_that_ends_takes_its_backup_with_it(tmp_path: Path):
    processes = []

    async def start() -> asyncio.subprocess.Process:
        processes.append(await asyncio.create_subprocess_exec("sleep", "600"))
        return processes[0]

    looking = asyncio.create_task(BackupSchedule(1, tmp_path / "x", tmp_path / "log", start).look())
    while not processes:
        await asyncio.sleep(0)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert processes[0].returncode is not None
