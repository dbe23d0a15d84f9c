"""The flow of versions and snapshots from shared memory to disk and to the remote tier, and back when they are needed.

Level-triggered: a pass reads what is in each place, lets `weights.retention` say what is missing and what is too much,
and does one thing after the other. Nothing is remembered between passes but when to try again, so a crash at any point
costs nothing: the next pass finds what is left to do. Each tier has a thread of its own at low priority; a mount that
hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from appliance.store import box, models, tier_removals
from appliance.store.database import Database
from appliance.wiring.tier_facts import Facts, name_of, read_facts
from weights.config import KeepRules
from weights.directory_tier import DirectoryTier
from weights.errors import (
    IntegrityError,
    StoreError,
    StoreFull,
    TierFull,
    TierUnavailable,
    VersionExists,
    VersionNotFound,
    WeightsError,
)
from weights.lease import StoredVersion, take_lease, unpin
from weights.manifest import KINDS, Manifest
from weights.names import version_path
from weights.pace import Pace
from weights.packed import PackedTier
from weights.record import Name
from weights.retention import TierPlan, plan_tier
from weights.store import WeightStore
from weights.tiers import verify

log = logging.getLogger(__name__)

EVERY_S = 60.0
BACKOFF_MAX_S = 300.0
NICENESS = 10
END_WAIT_S = 10.0


class TransferStopped(Exception):
    """The box ends while a copy runs; the next pass goes on with it."""


@dataclass
class Level:
    """One tier: who keeps versions and who snapshots in it, and what it is to keep."""

    name: str
    where: str
    versions: DirectoryTier | PackedTier
    snapshots: PackedTier
    version_rules: KeepRules
    snapshot_rules: KeepRules
    rate_bytes_s: int | None = None

    def of(self, kind: str) -> DirectoryTier | PackedTier:
        return self.snapshots if kind == "snapshot" else self.versions

    def all(self) -> list[DirectoryTier | PackedTier]:
        return [self.versions] if self.versions is self.snapshots else [self.versions, self.snapshots]


@dataclass
class _Running:
    """What a level's worker knows of itself; shown by `status`."""

    level: Level
    pool: ThreadPoolExecutor
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    here: dict[Name, float] = field(default_factory=dict)
    backlog: dict[Name, int] = field(default_factory=dict)
    busy: tuple[Name, Pace] | None = None
    used_bytes: int = 0
    failures: int = 0
    damaged: int = 0
    last_error: str | None = None
    last_error_s: float | None = None
    next_try_s: float | None = None
    dirty: bool = True


class Copy(NamedTuple):
    """One place where a version or snapshot is. `verify` reads it all; it raises what its tier's `verify` does."""

    tier: str
    where: str
    verify: Callable[[], Manifest]


class TierFlow:
    """Owns the tiers. `run` works until it is cancelled; `bring_in` may be called from any thread.

    `owner` names the box: a remote tier belongs to one. `is_held(name)` says whether the box serves a version now;
    `jobs_dir` holds the stores that ranks write their snapshots to when shared memory is full.
    """

    def __init__(
        self, db: Database, store: WeightStore, levels: Iterable[Level], *, jobs_dir: Path, owner: str,
        is_held: Callable[[Name], bool] = lambda name: False, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._db, self._store, self._jobs_dir = db, store, jobs_dir
        self._owner, self._is_held, self._clock = owner, is_held, clock
        self._stopping = threading.Event()
        self._deleted: set[Name] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._levels = [
            _Running(level, ThreadPoolExecutor(1, f"tier-{level.name}", initializer=_be_nice)) for level in levels
        ]

    # --- the flow ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as workers:
            for running in self._levels:
                workers.create_task(self._work(running), name=f"tier {running.level.name}")

    def nudge(self) -> None:
        """Something new is there, or something is to go. Call it on the loop's thread."""
        for running in self._levels:
            running.changed.set()

    async def finish(self) -> bool:
        """Ends the work and brings what the first tier lacks to it, at full speed. False if something is not safe."""
        self._stopping.set()
        for running in self._levels:
            await asyncio.wait([asyncio.wrap_future(running.pool.submit(lambda: None))], timeout=END_WAIT_S)
        self._stopping.clear()
        if not self._levels:
            return True
        first = self._levels[0]
        await self.run_once(first.level.name, unthrottled=True)
        return not first.backlog

    async def _work(self, running: _Running) -> None:
        while True:
            running.changed.clear()
            wait_s = EVERY_S
            if running.next_try_s is not None:
                wait_s = running.next_try_s - self._clock()
            if running.next_try_s is None or wait_s <= 0:
                await self.run_once(running.level.name)
                wait_s = EVERY_S if running.next_try_s is None else running.next_try_s - self._clock()
            try:
                async with asyncio.timeout(max(0.05, wait_s)):
                    await running.changed.wait()
            except TimeoutError:
                continue

    async def run_once(self, tier: str, *, unthrottled: bool = False) -> None:
        """One pass over one tier. Errors of the tier are kept for `status` and put the next pass off."""
        index = next(i for i, running in enumerate(self._levels) if running.level.name == tier)
        running = self._levels[index]
        try:
            await self._pass(running, self._levels[:index], unthrottled)
        except TransferStopped:
            return
        except (WeightsError, OSError) as error:
            running.failures += 1
            running.next_try_s = self._clock() + min(BACKOFF_MAX_S, 2.0**running.failures)
            self._note(running, f"{error}; trying again in {running.next_try_s - self._clock():.0f} s")
        else:
            running.failures, running.next_try_s = 0, None

    async def _pass(self, running: _Running, above: list[_Running], unthrottled: bool) -> None:
        level = running.level
        if isinstance(level.versions, PackedTier):
            known = f"tier {level.where}"
            await self._on(running, level.versions.claim, self._owner, box.get(self._db, known) is None)
            box.put(self._db, known, self._owner)
        for row in tier_removals.list_of(self._db, level.name):
            await self._on(running, level.of(row.kind).remove, Name(row.kind, row.model, row.version))
            tier_removals.delete(self._db, row)
            running.dirty = True
        running.here = await self._on(running, lambda: {n: s for kind in KINDS
                                                        for n, s in level.of(kind).names(kind).items()})  # fmt: skip
        stored = await asyncio.to_thread(self._in_memory)
        higher = {name: created_s for other in above for name, created_s in other.here.items()}
        created = running.here | higher | {name: found.manifest.created_s for name, found in stored.items()}
        facts = read_facts(self._db, created, self._is_held)
        plan = self._plan(level, facts, {*stored, *higher}, running.here)
        running.backlog = {name: stored[name].nbytes if name in stored else 0 for name in plan.push}
        for name in plan.push:
            try:
                await self._push(running, name, stored.get(name), above, unthrottled)
            except (VersionNotFound, StoreError) as error:
                log.info("%s was not copied to the %s tier: %s", name, level.name, error)  # gone meanwhile
            except (TierFull, TierUnavailable):
                raise
            except WeightsError as error:
                self._note(running, f"{name} cannot be copied: {error}")
                continue
            running.backlog.pop(name, None)
        for name in plan.drop:
            await self._on(running, level.of(name.kind).remove, name)
            running.here.pop(name, None)
            running.dirty = True
            log.info("%s left the %s tier: no rule keeps it", name, level.name)
        if not above:
            self._after_first(facts, running.here, stored, plan)
        if running.dirty and not running.backlog:
            for tier in level.all():
                await self._on(running, tier.collect)
            running.dirty = False
        running.used_bytes = await self._on(running, lambda: sum(tier.usage_bytes() for tier in level.all()))

    def _plan(self, level: Level, facts: Facts, above: Iterable[Name], here: Mapping[Name, float]) -> TierPlan[Name]:
        push: list[Name] = []
        drop = [name for name in here if name in facts.over]
        now_s, above = self._clock(), set(above)
        for kind in KINDS:
            rules = level.snapshot_rules if kind == "snapshot" else level.version_rules
            described = {name: kept for name, kept in facts.kept.items() if name.kind == kind}
            plan = plan_tier(
                [kept for name, kept in described.items() if name in above],
                [name for name in here if name.kind == kind], described, rules, now_s,
            )  # fmt: skip
            push += plan.push
            drop += plan.drop
        return TierPlan(tuple(push), tuple(drop))

    async def _push(
        self, running: _Running, name: Name, stored: StoredVersion | None, above: list[_Running], unthrottled: bool
    ) -> None:
        tier, rate = running.level.of(name.kind), None if unthrottled else running.level.rate_bytes_s
        pace = Pace(rate, 0 if stored is None else stored.nbytes, partial(self._go_on, name), self._stopping.wait)

        def push() -> None:
            if isinstance(tier, DirectoryTier):
                assert stored is not None, "the first tier has no tier above"
                tier.put(stored.path, pace=pace)
            elif stored is not None:
                with take_lease(stored):
                    tier.put(stored.path, pace=pace)
                unpin(stored)
            else:
                source = next(other.level.of(name.kind) for other in above if name in other.here)
                if isinstance(source, DirectoryTier):
                    tier.put(source.path(name), pace=pace)
                else:
                    tier.copy_from(source, name, pace=pace)

        running.busy = name, pace
        try:
            await self._on(running, push)
        finally:
            running.busy = None
            self._deleted.discard(name)
        running.here[name] = self._clock()

    def _after_first(
        self, facts: Facts, here: Mapping[Name, float], stored: Mapping[Name, StoredVersion], plan: TierPlan[Name]
    ) -> None:
        """The store's rows say what is on disk; memory lets go of what is safe, or what no rule wants to be safe."""
        versions = self._levels[0].level.versions
        for row in facts.rows:
            name = name_of(row)
            path = None
            if name in here:
                path = str(versions.path(name)) if isinstance(versions, DirectoryTier) else versions.where
            facts.say_on_disk(self._db, row, path)
        for name, found in stored.items():
            if name in facts.kept and (name in here or name not in plan.push) and found.path.is_dir() and found.pinned:
                try:
                    unpin(found)
                except VersionNotFound:
                    continue

    def _go_on(self, name: Name, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise TransferStopped
        if name in self._deleted:
            raise VersionNotFound(f"{name} was deleted while it was copied")

    def _in_memory(self) -> dict[Name, StoredVersion]:
        stores = [WeightStore(path.parent, budget_bytes=None) for path in self._jobs_dir.glob("*/snapshots/snapshots")]
        found = {}
        for store in (*stores, self._store):
            for kind in KINDS:
                found |= {Name(kind, stored.model, stored.version): stored for stored in store.list(kind)}
        return found

    async def _on(self, running: _Running, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(running.pool, work, *arguments)

    def _note(self, running: _Running, text: str) -> None:
        running.last_error, running.last_error_s = text, self._clock()
        log.error("tier %s: %s", running.level.name, text)

    def found_damaged(self, tier: str, text: str) -> None:
        """Somebody read a copy in `tier` and it was not whole; `status` says so until the tier's next error."""
        for running in self._levels:
            if running.level.name == tier:
                self._note(running, text)

    # --- back -------------------------------------------------------------------------------------------------------

    def bring_in(self, name: Name, store: WeightStore | None = None) -> StoredVersion:
        """`name` in shared memory (or in `store`), from there or else from the nearest tier whose copy is whole.

        Copies found damaged on the way are logged and, once another was good, removed, so that the flow writes them
        anew. May be called from any thread. Raises LookupError if no tier has it whole, StoreFull.
        """
        store = store or self._store
        damaged: list[_Running] = []
        faults: list[str] = []
        try:
            found = store.find(*name)
        except IntegrityError as error:
            log.error("%s is damaged in memory: %s", name, error)
            if not any(name in running.here for running in self._levels):
                raise
            store.discard(*name)
            found = None
        if found is not None:
            return found
        for running in self._levels:
            try:
                found = running.level.of(name.kind).restore(store, name)
            except VersionNotFound:
                continue
            except VersionExists:
                found = store.find(*name)
            except StoreFull:
                raise
            except IntegrityError as error:
                damaged.append(running)
                faults.append(f"damaged in the {running.level.name} tier ({error})")
                self._note(running, f"{name} is damaged: {error}")
                continue
            except (TierUnavailable, OSError) as error:
                faults.append(f"unreachable in the {running.level.name} tier ({error})")
                continue
            if found is not None:
                for other in damaged:
                    self._quarantine(other, name, running.level.name)
                return found
        raise LookupError(f"{name} is in no tier that has it whole: {'; '.join(faults) or 'none has it'}")

    def _quarantine(self, running: _Running, name: Name, good: str) -> None:
        def work() -> None:
            running.level.of(name.kind).quarantine(name)
            running.damaged += 1
            running.dirty = True
            log.error("the damaged copy of %s was removed from the %s tier; the %s tier had it whole",
                      name, running.level.name, good)  # fmt: skip

        def done(future: Future[None]) -> None:
            if future.exception() is not None:
                self._note(running, f"the damaged copy of {name} could not be removed: {future.exception()}")
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.nudge)

        running.pool.submit(work).add_done_callback(done)

    def newest_snapshot(self, job_id: str) -> list[Name]:
        """The job's snapshots in any tier, the highest step first. May be called from any thread."""
        found: set[Name] = set()
        for running in self._levels:
            try:
                found |= {name for name in running.level.snapshots.names("snapshot") if name.model == job_id}
            except (TierUnavailable, OSError) as error:
                self._note(running, str(error))
        return sorted(found, key=lambda name: int(name.version.removeprefix("step-")), reverse=True)

    def stop_copying(self, name: Name) -> None:
        """It is about to be deleted: who copies it reads it no longer. On the loop's thread."""
        if any(running.busy is not None and running.busy[0] == name for running in self._levels):
            self._deleted.add(name)

    def forget(self, name: Name) -> None:
        """Deleted by a person: it leaves every tier, also one that cannot be reached now. On the loop's thread."""
        for running in self._levels:
            tier_removals.insert(self._db, running.level.name, *name)
        self.nudge()

    # --- what a person sees -----------------------------------------------------------------------------------------

    def places(self, name: Name) -> list[str]:
        """Names of the places that have `name`; of the tiers, those that had it when they were last looked at."""
        memory = ["memory"] if version_path(self._store.root, *name).is_dir() else []
        return memory + [running.level.name for running in self._levels if name in running.here]

    def version_places(self, model: str, version: str) -> list[str]:
        row = models.find_version(self._db, model, version)
        return [] if row is None else self.places(name_of(row))

    def known(self) -> list[Name]:
        """Everything that any place had when it was last looked at."""
        found = {name for running in self._levels for name in running.here} | self._in_memory().keys()
        return sorted(found)

    def copies(self, name: Name) -> list[Copy]:
        """Where `name` is now, or was when its tier was last looked at; nearest first."""
        in_memory = self._in_memory_copy(name)
        found = [] if in_memory is None else [in_memory]
        for running in self._levels:
            tier = running.level.of(name.kind)
            if isinstance(tier, DirectoryTier):
                there, where = tier.path(name).is_dir(), str(tier.path(name))
            else:
                there, where = name in running.here, tier.where
            if there:
                found.append(Copy(running.level.name, where, partial(tier.verify, name)))
        return found

    def _in_memory_copy(self, name: Name) -> Copy | None:
        path = version_path(self._store.root, *name)
        if not path.is_dir():
            path = version_path(self._jobs_dir / name.model / "snapshots", *name)
        return Copy("memory", str(path), partial(verify, path)) if path.is_dir() else None

    def status(self) -> list[dict[str, Any]]:
        """One entry per tier, shared memory first; sizes in bytes, times in Unix seconds."""
        usage = self._store.usage()
        counts = {kind: len(self._store.list(kind)) for kind in KINDS}
        memory = {"name": "memory", "where": str(self._store.root), "versions": counts["version"] + counts["adapter"],
                  "snapshots": counts["snapshot"], "bytes": usage.used_bytes, "limit_bytes": usage.budget_bytes,
                  "backlog": 0, "backlog_bytes": 0, "busy": None, "damaged": 0, "last_error": None,
                  "last_error_s": None, "next_try_s": None}  # fmt: skip
        return [memory, *(self._status(running) for running in self._levels)]

    def _status(self, running: _Running) -> dict[str, Any]:
        busy = None
        if running.busy is not None:
            name, pace = running.busy
            busy = {"name": str(name), "done_bytes": pace.done_bytes, "total_bytes": pace.total_bytes}
        return {
            "name": running.level.name, "where": running.level.where,
            "versions": sum(name.kind != "snapshot" for name in running.here),
            "snapshots": sum(name.kind == "snapshot" for name in running.here),
            "bytes": running.used_bytes, "limit_bytes": None, "backlog": len(running.backlog),
            "backlog_bytes": sum(running.backlog.values()), "busy": busy, "damaged": running.damaged,
            "last_error": running.last_error, "last_error_s": running.last_error_s, "next_try_s": running.next_try_s,
        }  # fmt: skip


def _be_nice() -> None:
    # On Linux a priority belongs to a thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
