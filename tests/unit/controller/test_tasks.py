"""Tasks resume after a restart, respect limits, and fail if their key is revoked or a bug raises."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Coroutine, Iterator
from contextlib import aclosing

import pytest

from appliance.controller.context import tasks
from appliance.controller.context.tasks import Kind, TaskFailed, Tasks
from appliance.store import keys
from appliance.store.database import Database
from appliance.store.rows import TASKS, TaskRow
from tests.unit.controller.conftest import disk_full


class Work:
    """A kind of task that runs until `may_end` is set. log: the calls of the kind, oldest first."""

    def __init__(self, db: Database, **bounds: int):
        self.tasks, self.log = Tasks(db), list[str]()
        self.may_end, self.error = asyncio.Event(), None
        self.tasks.add(Kind("things", self.run, self.fail, "thing", **bounds))
        self.tasks.resume()

    async def run(self, task: TaskRow) -> None:
        self.log.append(f"run {task.id}")
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        self.log.append(f"end {task.id}")

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        self.log.append(f"fail {task.id} {error.code}")

    async def until(self, number: int) -> None:
        async with asyncio.timeout(60):
            while len(self.log) < number:
                await asyncio.sleep(0)

    async def end(self) -> list[str]:
        self.may_end.set()
        await self.tasks.idle("things")
        return self.log


async def test_task_resumes_after_restart_with_its_cursor(db: Database):
    before = Work(db)
    before.tasks.start("things", "a", None, size=7)
    await before.until(1)
    await before.tasks.stop()
    row = TASKS.find(db, "things", "a")
    assert row is not None and row.arguments == {"size": 7}
    after = Work(db)
    assert await after.end() == ["run a", "end a"] and TASKS.list_all(db) == []


async def test_task_of_rolled_back_transaction_does_not_run(db: Database):
    work = Work(db)
    with pytest.raises(ZeroDivisionError), db.transaction():
        work.tasks.start("things", "a", None)
        raise ZeroDivisionError
    assert await work.end() == []


async def test_task_started_on_thread_runs_after_commit(db: Database):
    work = Work(db)

    def make() -> None:
        with db.transaction():
            work.tasks.start("things", "a", None)
            while not work.tasks._live:
                time.sleep(0)

    await asyncio.to_thread(make)
    assert await work.end() == ["run a", "end a"]


async def test_end_key_fails_only_tasks_of_key(db: Database):
    key, other = (keys.create(db, name, ["inference"])[0] for name in ("ann", "bob"))
    work = Work(db, per_owner=1)
    for object_id, key_id in (("a", key.id), ("waits", key.id), ("b", other.id)):
        work.tasks.start("things", object_id, key_id)
    await work.until(2)
    assert work.tasks.of_key(key.id) == {"things": ["a", "waits"]}
    keys.revoke(db, key.id)
    work.tasks.end_key(key.id)
    await work.until(4)
    assert set(work.log[2:]) == {"fail a invalid_api_key", "fail waits invalid_api_key"}
    assert (await work.end())[4:] == ["end b"]


async def test_task_of_ended_key_fails_at_restart(db: Database):
    key, _ = keys.create(db, "ann", ["inference"])
    work = Work(db)
    await work.tasks.stop()
    work.tasks.start("things", "a", key.id)
    keys.revoke(db, key.id)
    work.tasks.resume()
    assert await work.end() == ["fail a invalid_api_key"]


async def test_bug_in_task_fails_object_and_is_logged(db: Database, caplog: pytest.LogCaptureFixture):
    work = Work(db)
    work.error = ZeroDivisionError("odd")
    work.tasks.start("things", "a", None)
    assert await work.end() == ["run a", "fail a internal_error"] and TASKS.list_all(db) == []
    assert "ZeroDivisionError: odd" in caplog.text


@pytest.mark.parametrize("full", [OSError(errno.ENOSPC, "x"), disk_full()])
async def test_task_on_full_disk_is_retried(db: Database, monkeypatch: pytest.MonkeyPatch, full: Exception):
    monkeypatch.setattr(tasks, "ROOM_EVERY_S", 0.001)
    work = Work(db)
    work.error = full
    work.tasks.start("things", "a", None)
    work.may_end.set()
    await work.until(2)
    work.error = None
    assert (await work.end())[-1] == "end a"


async def test_tasks_alternate_owners_within_limit(db: Database):
    ann, bob = (keys.create(db, name, ["inference"])[0].id for name in ("ann", "bob"))
    work = Work(db, at_once=2, per_owner=1)
    for object_id, key_id in (("a1", ann), ("a2", ann), ("b1", bob), ("b2", bob)):
        work.tasks.start("things", object_id, key_id)
    await work.until(2)
    assert work.log == ["run a1", "run b1"]
    assert sorted(await work.end()) == sorted(
        f"{what} {one}" for what in ("run", "end") for one in ("a1", "a2", "b1", "b2")
    )


async def test_finished_cancels_running_coroutines_if_source_raises():
    def begin() -> Iterator[Coroutine[None, None, None]]:
        yield asyncio.sleep(60)
        raise ValueError

    with pytest.raises(ValueError):
        async with aclosing(tasks.finished(begin(), 2)) as groups:
            async for _ in groups:
                pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_start_keeps_a_live_task_and_restart_reruns_it(db: Database):
    work = Work(db)
    work.tasks.start("things", "a", None)
    await work.until(1)
    work.tasks.start("things", "a", None)
    await asyncio.sleep(0)
    assert work.log == ["run a"]
    work.tasks.restart("things", "a")
    await work.until(2)
    assert await work.end() == ["run a", "run a", "end a"]
