"""Work that outlives its request: a row of the table `tasks` and a coroutine on the controller's loop.

A kind's `run` continues its object from any state of rows and files. So the process may be killed at any point (its
next start runs the tasks again), and an object is cancelled or deleted by changing its row and calling `restart`. `run`
returns once the object has ended; after an exception, or the end of the object's key, the kind's `fail` ends the
object.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from appliance.store import keys
from appliance.store.database import Database
from appliance.store.rows import TASKS, TaskRow
from runtime.background_tasks import first_words

log = logging.getLogger("appliance.controller")

T = TypeVar("T")
ROOM_EVERY_S = 2.0
"""How often a full disk is tried again."""
KEY_ENDED, INTERNAL_ERROR = "invalid_api_key", "internal_error"
"""Codes of tasks whose key has ended, and that met a bug."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_OR_BUSY = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


class TaskFailed(Exception):
    """The object of a task cannot be completed."""

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of task.

    Args:
        name: the plural by which the API calls its objects.
        run: continues an object until it has ended. Raises TaskFailed; any other exception is a bug.
        fail: ends an unfinished object; repeated while the disk is full. noun: the object's name in messages; empty:
        the object does not end with its key. at_once, per_owner: most tasks at the same time, in all and for an owner;
        owners take turns.
    """

    name: str
    run: Callable[[TaskRow], Awaitable[None]]
    fail: Callable[[TaskRow, TaskFailed], Awaitable[None]]
    noun: str = ""
    at_once: int = 1000
    per_owner: int = 1000


async def _until_room(write: Callable[[], Awaitable[T]]) -> T:
    """Repeat `write` while the disk is full; return the result of `write`."""
    while True:
        try:
            return await write()
        except (OSError, sqlite3.OperationalError) as error:
            if not is_full(error):
                raise
            log.warning("a task waits for room on the disk: %s", error)
        await asyncio.sleep(ROOM_EVERY_S)


def is_full(error: Exception) -> bool:
    """Return whether an error means that the disk is full, or that others have locked the database for long."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", None) in _FULL_OR_BUSY
    return isinstance(error, OSError) and error.errno in _FULL


async def finished(begin: Iterator[Coroutine[Any, Any, T]], at_once: int) -> AsyncGenerator[list[T], None]:
    """Yield groups of the results that have arrived since the last group, each in the order of their beginning. Iterate
    within `contextlib.aclosing`, which cancels the running coroutines.

    Args:
        begin: makes the coroutines, of which `at_once` run at the same time. A coroutine's exception is raised after
        the results that arrived with it.
    """
    running = list[asyncio.Task[T]]()
    try:
        while True:
            for coroutine in islice(begin, at_once - len(running)):  # getting the next coroutine may raise
                running.append(asyncio.create_task(coroutine))
            if not running:
                return
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in running if task.done()]
            running = [task for task in running if not task.done()]
            if results := [task.result() for task in done if task.exception() is None]:
                yield results
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Tasks:
    """Starts, resumes and ends tasks. `start`, `restart` and `end_key` may be called from any thread."""

    def __init__(self, db: Database):
        self._db = db
        self._kinds: dict[str, Kind] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}  # {kind name: …}
        self._slots_of_owners: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()
        self._live: dict[tuple[str, ...], asyncio.Task[None]] = {}  # {(kind, object id): …}
        self._restarting: set[tuple[str, ...]] = set()  # running tasks that were cancelled in order to restart
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, kind: Kind) -> None:
        self._kinds[kind.name], self._slots[kind.name] = kind, asyncio.Semaphore(kind.at_once)

    def resume(self) -> None:
        """Run the tasks left by earlier processes, and from now on new tasks."""
        self._loop = asyncio.get_running_loop()
        for row in TASKS.list_all(self._db):
            self._begin((row.kind, row.id))

    def start(self, kind: str, object_id: str, key_id: str | None, **arguments: Any) -> None:
        """Add a task; call it in the transaction that makes the object. arguments: facts that the object's row lacks.
        An existing task stays unchanged."""
        with self._db.transaction():
            if TASKS.find(self._db, kind, object_id) is None:
                TASKS.insert(self._db, TaskRow(kind, object_id, key_id, time.time(), arguments))
        self._soon(kind, object_id, restart=False)

    def restart(self, kind: str, object_id: str) -> None:
        """Stop the task of an object that was cancelled, deleted or failed, and restart it from the changed row."""
        self._soon(kind, object_id, restart=True)

    def of_key(self, key_id: str) -> dict[str, list[str]]:
        """Return {kind: ids of unfinished objects that end with this key}."""
        ids = defaultdict[str, list[str]](list)
        for row in TASKS.list_all(self._db, "key_id = ?", key_id):
            if self._kinds[row.kind].noun:
                ids[row.kind].append(row.id)
        return ids

    def end_key(self, key_id: str) -> None:
        """Fail the unfinished objects of a key that was revoked or has expired."""
        for kind, ids in self.of_key(key_id).items():
            for object_id in ids:
                self.restart(kind, object_id)

    async def idle(self, *kinds: str) -> None:
        """Wait until no task of these kinds runs."""
        await asyncio.sleep(0)  # let tasks begin that were just started
        while running := [task for (kind, _), task in self._live.items() if kind in kinds]:
            await asyncio.wait(running)

    async def stop(self) -> None:
        """Cancel all coroutines; the next start resumes them."""
        self._loop, running = None, list(self._live.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _soon(self, *name: str, restart: bool) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin, name, restart)

    def _begin(self, name: tuple[str, ...], restart: bool = True) -> None:
        """Run a task. restart: cancel a running task first."""
        if name not in self._live:
            task = self._live[name] = asyncio.create_task(self._run(*name), name=" ".join(name))
            task.add_done_callback(lambda _: self._ended(name))
        elif restart and name not in self._restarting:
            self._restarting.add(name)
            self._live[name].cancel()

    def _ended(self, name: tuple[str, ...]) -> None:
        del self._live[name]
        if name in self._restarting:
            self._restarting.discard(name)
            if self._loop is not None:
                self._begin(name)

    async def _run(self, name: str, object_id: str) -> None:
        try:
            with self._db.transaction():  # waits until the thread that started the task has committed
                row = TASKS.find(self._db, name, object_id)
            if row is None:
                return
            kind = self._kinds[name]
            if (failed := await self._failure(kind, row)) is not None:
                await _until_room(partial(kind.fail, row, failed))
            await _until_room(partial(asyncio.to_thread, TASKS.delete, self._db, name, object_id))
        except Exception as error:  # noqa: BLE001 - its row stays, and the next start tries again
            log.error("the task %s of %s failed: %s", object_id, name, first_words(error), exc_info=error)

    async def _failure(self, kind: Kind, row: TaskRow) -> TaskFailed | None:
        """Run a task once a slot of its kind and one of its owner are free, so owners take turns. Returns why the task
        failed; None: its object has ended."""
        if kind.noun and (how := keys.how_ended(self._db, row.key_id)):
            return TaskFailed(KEY_ENDED, f"The API key of this {kind.noun} {how}.")
        try:
            owner = keys.owner_of(self._db, row.key_id or "")
            own = self._slots_of_owners.setdefault((kind.name, owner), asyncio.Semaphore(kind.per_owner))
            async with own, self._slots[kind.name]:
                await _until_room(partial(kind.run, row))
        except TaskFailed as error:
            return error
        except Exception as error:  # noqa: BLE001 - logged, and its object says so
            log.error("%s of %s failed by a bug", row.id, kind.name, exc_info=error)
            return TaskFailed(INTERNAL_ERROR, first_words(error))
        return None
