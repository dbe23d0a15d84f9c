"""The flow of versions and snapshots from shared memory to the disk and to the remote place.

It is level-triggered: a pass reads what is in each place, works out what is missing and what is too much, and does one
thing after the other. A crash at any point costs nothing: the next pass finds what is left to do. Each tier has its own
thread, so a mount that hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from appliance.controller.access.model_access import resolve
from appliance.store.database import Database
from appliance.store.objects import jobs, models
from appliance.store.records import box, tier_removals
from appliance.store.rows import TierRemovalRow, VersionRow
from appliance.tiers.tiers import Tier, Tiers, name_of
from train.plan.spec import every_s
from weights.format.config import KeepRules
from weights.format.errors import StoreError, TierFull, TierUnavailable, VersionNotFound, WeightsError
from weights.format.names import Name, step_of
from weights.memory.lease import StoredVersion, take_lease, unpin
from weights.tiers.copies import RemoteCopies

log = logging.getLogger(__name__)

EVERY_S = 60.0
END_WAIT_S = 10.0


class TransferStopped(Exception):
    """The box ends while a copy runs; the next pass starts it again."""


class TierFlow:
    """`run` works until it is cancelled. Other methods belong to the loop's thread.

    `owner` names the box: a remote place belongs to one. `is_held(name)` says whether the box serves a version now; it
    is called on the tiers' threads.
    """

    def __init__(
        self, db: Database, tiers: Tiers, *, owner: str, is_held: Callable[[Name], bool] = lambda name: False
    ) -> None:
        self._db, self._tiers, self._owner, self._is_held = db, tiers, owner, is_held
        self._stopping = threading.Event()
        self._collected: set[str] = set()
        self._not_before_s: dict[tuple[str, str], float] = {}  # (tier, job): of its next snapshot's copy

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for tier in self._tiers.all:
                group.create_task(self._work(tier), name=f"tier: {tier.name}")

    async def finish(self) -> bool:
        """Ends the work and copies to disk what only memory has. False if something is not safe."""
        self._stopping.set()
        for tier in self._tiers.all:
            await asyncio.wait([asyncio.wrap_future(tier.pool.submit(lambda: None))], timeout=END_WAIT_S)
        self._stopping.clear()
        await self.run_once("disk", everything=True)
        return not self._tiers.disk.backlog

    async def _work(self, tier: Tier) -> None:
        while True:
            tier.changed.clear()
            await self.run_once(tier.name)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await tier.changed.wait()

    async def run_once(self, name: str, *, everything: bool = False) -> None:
        """One pass over the tier of this name. Its errors are noted for `Tiers.status`."""
        (tier,) = (tier for tier in self._tiers.all if tier.name == name)
        try:
            await asyncio.get_running_loop().run_in_executor(tier.pool, self._pass, tier, everything)
        except TransferStopped:
            return
        except (WeightsError, OSError) as error:
            self._tiers.note(tier, f"{error}; trying again in {EVERY_S:.0f} s")

    def _pass(self, tier: Tier, everything: bool) -> None:
        copies, disk = tier.copies, self._tiers.disk
        if isinstance(copies, RemoteCopies):
            owner_key = f"tier {copies.where}"
            copies.claim(self._owner, box.get(self._db, owner_key) is None)
            box.put(self._db, owner_key, self._owner)
        if tier.name not in self._collected:
            copies.collect()
            self._collected.add(tier.name)
        for row in tier_removals.list_all(self._db, "tier = ?", tier.name):
            copies.remove(Name(row.kind, row.model, row.version))
            tier_removals.delete(self._db, row.tier, row.kind, row.model, row.version)
        tier.here = {name: manifest.created_s for name, manifest in copies.manifests().items()}
        stored = self._tiers.in_memory()
        in_memory_s = {name: version.manifest.created_s for name, version in stored.items()}
        facts = read_facts(self._db, {**in_memory_s, **disk.here, **tier.here}, self._is_held)
        push, drop = _plan(tier, facts, {*stored} if tier is disk else {*stored, *disk.here})
        tier.backlog = {name: stored[name].nbytes if name in stored else 0 for name in push}
        is_full = self._push_all(tier, push, stored, everything)
        for name in _spare_newest(drop, tier.here, facts) if is_full else drop:
            copies.remove(name)
            tier.here = {other: created_s for other, created_s in tier.here.items() if other != name}
            log.info("%s left the %s tier: no rule keeps it", name, tier.name)
        if tier is disk:
            self._after_disk(facts, stored, push)
        tier.used_bytes = sum(manifest.nbytes for manifest in copies.manifests().values())

    def _push_all(self, tier: Tier, push: list[Name], stored: dict[Name, StoredVersion], everything: bool) -> bool:
        """Returns whether the tier is full. everything: also snapshots that another copy preceded a moment ago."""
        for name in push:
            job, began_s = (tier.name, name.model), self._tiers.clock()
            if everything or name.kind != "snapshot" or began_s >= self._not_before_s.get(job, 0.0):
                try:
                    self._push(tier, name, stored.get(name))
                except (VersionNotFound, StoreError, FileNotFoundError) as error:
                    log.info("%s was not copied to the %s tier: %s", name, tier.name, error)  # gone meanwhile
                except TierFull as error:
                    self._tiers.note(tier, str(error))
                    return True
                except TierUnavailable:
                    raise
                except WeightsError as error:
                    self._tiers.note(tier, f"{name} cannot be copied: {error}")
                    continue
                if name.kind == "snapshot":
                    now_s = self._tiers.clock()
                    self._not_before_s[job] = now_s + every_s(now_s - began_s)
            tier.backlog = {other: nbytes for other, nbytes in tier.backlog.items() if other != name}
        return False

    def _push(self, tier: Tier, name: Name, stored: StoredVersion | None) -> None:
        """Copies it from memory, or from the disk where memory has it no more."""

        def moved(nbytes: int) -> None:
            if self._stopping.is_set():
                raise TransferStopped
            tier.busy = name, nbytes + (tier.busy[1] if tier.busy else 0)

        tier.busy = name, 0
        try:
            if stored is None:
                tier.copies.put(self._tiers.disk.copies.path(name), moved)
            else:
                with take_lease(stored):
                    tier.copies.put(stored.path, moved)
                unpin(stored)
        finally:
            tier.busy = None
        tier.here = {**tier.here, name: self._tiers.clock()}

    def _after_disk(self, facts: Facts, stored: dict[Name, StoredVersion], push: list[Name]) -> None:
        """Writes into the store's rows what is on disk, and unpins in memory what is safe or what no rule keeps."""
        disk = self._tiers.disk
        for row in facts.rows:
            path = str(disk.copies.path(name_of(row))) if name_of(row) in disk.here else None
            if row.disk_path != path and models.find_version(self._db, row.model, row.version) is not None:
                models.update_version(self._db, row.model, row.version, disk_path=path)
        for name, version in stored.items():
            if name in facts.kept and (name in disk.here or name not in push) and version.pinned:
                with suppress(VersionNotFound):
                    unpin(version)

    def forget(self, name: Name) -> None:
        """A person deleted `name`: it leaves every tier, later also one that cannot be reached now."""
        for tier in self._tiers.all:
            tier_removals.put(self._db, TierRemovalRow(tier.name, *name, created_s=time.time()))
        self._tiers.nudge()


def _plan(tier: Tier, facts: Facts, above: set[Name]) -> tuple[list[Name], list[Name]]:
    """The names to copy to the tier, snapshots and then the newest first, and those to remove from it."""
    judged = [facts.kept[name] for name in {*above, *tier.here} if name in facts.kept]
    snapshots = [record for record in judged if record.key.kind == "snapshot"]
    others = [record for record in judged if record.key.kind != "snapshot"]
    kept = [*keep(snapshots, tier.snapshot_rules), *keep(others, tier.version_rules)]
    push = [name for name in kept if name not in tier.here]
    known = {record.key for record in judged} | facts.over
    return push, [name for name in tier.here if name in known and name not in kept]


def _spare_newest(drop: list[Name], here: dict[Name, float], facts: Facts) -> list[Name]:
    """What may leave a full tier before what replaces it is in: not the newest that the tier has of a model or of a job
    that goes on."""
    newest = {(name.kind, name.model): name for name in sorted(here, key=lambda name: here[name])}
    return [name for name in drop if name in facts.over or newest[name.kind, name.model] != name]


@dataclass(frozen=True)
class Kept:
    """One version or snapshot for retention. `family` is its model or job; rules apply to each family separately.
    `valid_loss` is None if never measured. A `protected` one stays regardless of the rules."""

    key: Name
    family: str
    created_s: float
    valid_loss: float | None = None
    protected: bool = False


def keep(records: Iterable[Kept], rules: KeepRules) -> list[Name]:
    """The keys to keep, the newest first: of each family the newest `keep_last`, the `keep_best` with the lowest
    validation loss, and protected ones; everything without rules."""
    newest_first = sorted(records, key=lambda record: record.created_s, reverse=True)
    measured = [record for record in newest_first if record.valid_loss is not None]
    best_first = sorted(measured, key=lambda record: record.valid_loss or 0.0)  # stable: of equals the newest
    kept = {record.key for record in newest_first if record.protected or rules.keeps_everything}
    for family in {record.family for record in newest_first}:
        for ranked, count in ((newest_first, rules.keep_last), (best_first, rules.keep_best)):
            kept |= {record.key for record in [record for record in ranked if record.family == family][: count or 0]}
    return [record.key for record in newest_first if record.key in kept]


@dataclass(frozen=True)
class Facts:
    """What the store's rows tell retention. `kept`: every version and snapshot that it may judge. `over`: snapshots of
    jobs that have ended."""

    kept: dict[Name, Kept]
    over: frozenset[Name]
    rows: tuple[VersionRow, ...]


def read_facts(db: Database, created: Mapping[Name, float], is_held: Callable[[Name], bool]) -> Facts:
    """`created`: creation time of everything that any place holds. What no row knows is not judged."""
    unfinished = {row.id: row for row in jobs.list_unfinished(db)}
    known = models.list_all(db)
    rows = tuple(version for model in known for version in models.list_versions(db, model.id))
    needed = {(row.id, row.active_version) for row in known}
    needed |= {
        (base.model.id, (job.resolved or {}).get("base_version") or base.version.version)
        for job in unfinished.values()
        if (base := resolve(db, job.model)) is not None
    }
    needed |= {(below["base"], below["base_version"]) for row in rows if (below := row.meta.get("adapter"))}
    needed |= {(canary.model, canary.version) for canary in models.running_canaries(db)}
    kept = {}
    for row in rows:
        name, version = name_of(row), (row.model, row.version)
        # Checkpoints count by themselves: of three jobs under one name the "last three" are their results.
        family = f"{row.model} by epochs" if row.meta.get("of_epoch") else row.model
        is_needed = version in needed or is_held(name)
        kept[name] = Kept(name, family, row.created_s, row.metrics.get("valid_loss"), is_needed)
    snapshots = [name for name in created if name.kind == "snapshot"]
    steps = {name: step for name in snapshots if name.model in unfinished and (step := step_of(name.version)) >= 0}
    newest = {name.model: name for name in sorted(steps, key=lambda name: steps[name])}
    for name, step in steps.items():
        metric = jobs.find_metric(db, name.model, step)
        loss = metric.valid_loss if metric is not None else None
        kept[name] = Kept(name, name.model, created[name], loss, protected=newest[name.model] == name)
    over = {name for name in snapshots if name.model not in unfinished and jobs.find(db, name.model) is not None}
    return Facts(kept, frozenset(over), rows)
