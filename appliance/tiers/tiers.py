"""The tiers of the box: what each had at the last pass, the way back from them, what a person sees of them, and the
flow of versions and snapshots from shared memory to the disk and to the remote place.

The flow is level-triggered: a pass reads what is in each place, works out what is missing and what is too much, and
does one thing after the other. A crash at any point costs nothing: the next pass finds what is left to do. Each tier
has its own thread, so a mount that hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from appliance.controller.access.model_access import resolve
from appliance.paths import BoxPaths
from appliance.store import box, jobs, models
from appliance.store.database import Database
from appliance.store.rows import TIER_REMOVALS, TierRemovalRow, VersionRow
from train.plan.spec import every_s
from weights.format.config import KeepRules, WeightsConfig
from weights.format.errors import (
    IntegrityError,
    StoreError,
    StoreFull,
    TierFull,
    TierUnavailable,
    VersionExists,
    VersionNotFound,
    WeightsError,
)
from weights.format.names import KINDS, Name, step_of
from weights.memory.lease import StoredVersion, take_lease, unpin
from weights.memory.store import WeightStore
from weights.tiers.copies import DirectoryCopies, RemoteCopies
from weights.tiers.objects import objects_at

log = logging.getLogger(__name__)

EVERY_S = 60.0
END_WAIT_S = 10.0


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux a priority belongs to a thread


@dataclass
class Tier:
    """Where copies are, the one thread that writes them, and what is known of it.

    `here`: creation time (Unix seconds) of what it had at the last pass, replaced and never changed, for other threads
    read it. `backlog`: bytes of what it lacks. `busy`: what is being copied, and the bytes done.
    """

    name: str
    copies: DirectoryCopies | RemoteCopies
    version_rules: KeepRules
    snapshot_rules: KeepRules
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "tier", initializer=_yield_to_others)
    )
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    here: dict[Name, float] = field(default_factory=dict)
    backlog: dict[Name, int] = field(default_factory=dict)
    busy: tuple[Name, int] | None = None
    used_bytes: int = 0
    damaged: int = 0
    last_error: str | None = None
    last_error_s: float | None = None


class Tiers:
    """The disk and the remote place, if there is one, in `all`; shared memory is above them.

    May be called from any thread, but for `nudge`. Raises TierUnavailable where the settings of an S3 store make no
    client.
    """

    def __init__(self, store: WeightStore, config: WeightsConfig, paths: BoxPaths) -> None:
        self.store, self.clock = store, time.time
        self._jobs_dir = paths.jobs
        disk, remote = config.disk, config.remote
        on_disk = DirectoryCopies(paths.models, paths.snapshots, free_bytes=disk.free_bytes)
        self.disk = Tier("disk", on_disk, disk.versions, disk.snapshots)
        self.all = [self.disk]
        if remote.url is not None:
            copies = RemoteCopies(objects_at(remote), int8_moments=remote.moments == "int8")
            self.all.append(Tier("remote", copies, remote.versions, remote.snapshots))

    def nudge(self) -> None:
        """Wake the flow: something new is there, or something has to go. Call it on the loop's thread."""
        for tier in self.all:
            tier.changed.set()

    def note(self, tier: Tier, text: str) -> None:
        """Notes an error of a tier, which `status` shows until its next one."""
        tier.last_error, tier.last_error_s = text, self.clock()
        log.error("tier %s: %s", tier.name, text)

    def beside_job(self, job_id: str) -> WeightStore:
        """The store that ranks write snapshots to when shared memory is full."""
        return WeightStore(self._jobs_dir / job_id / "snapshots", budget_bytes=None)

    def in_memory(self) -> dict[Name, StoredVersion]:
        """What shared memory has, and what the stores of jobs have that found it full."""
        jobs = [path.parent.parent.name for path in self._jobs_dir.glob("*/snapshots/snapshots")]
        versions = {}
        for store in (*map(self.beside_job, jobs), self.store):
            for kind in KINDS:
                versions |= {Name(kind, stored.model, stored.version): stored for stored in store.list(kind)}
        return versions

    # The way back

    def bring_in(self, name: Name, store: WeightStore | None = None) -> StoredVersion:
        """Brings `name` into shared memory (or `store`) unless it is there, from the nearest tier whose copy is whole.

        Damaged copies on the way are removed once another was good, so that the flow writes them again. Raises
        LookupError if no tier has it whole, StoreFull.
        """
        store, stored = store or self.store, None
        try:
            if (stored := store.find(*name)) is not None:
                return stored
        except IntegrityError as error:
            log.error("%s is damaged in memory: %s", name, error)
            if not any(name in tier.here for tier in self.all):
                raise
            store.discard(*name)
        damaged: list[Tier] = []
        faults: list[str] = []
        for tier in self.all:
            try:
                stored = tier.copies.restore(store, name)
            except VersionNotFound:
                continue
            except VersionExists:
                stored = store.find(*name)
            except IntegrityError as error:
                damaged.append(tier)
                faults.append(f"damaged in the {tier.name} tier ({error})")
                self.note(tier, f"{name} is damaged: {error}")
            except (TierUnavailable, OSError) as error:
                faults.append(f"unreachable in the {tier.name} tier ({error})")
            if stored is not None:
                for other in damaged:
                    self._remove_damaged(other, name, tier.name)
                return stored
        raise LookupError(f"{name} is in no tier that has it whole: {'; '.join(faults) or 'none has it'}")

    def _remove_damaged(self, tier: Tier, name: Name, whole_in: str) -> None:
        try:
            tier.copies.remove(name)
        except (TierUnavailable, OSError) as error:
            self.note(tier, f"the damaged copy of {name} could not be removed: {error}")
            return
        tier.damaged += 1
        self.note(tier, f"{name} was damaged and was removed, to be written again; the {whole_in} tier had it whole")

    def snapshots_of(self, job_id: str) -> list[Name]:
        """The job's snapshots in any tier, the highest step first."""
        names: set[Name] = set()
        for tier in self.all:
            try:
                known = [*tier.copies.manifests()]  # at once: the tier's thread changes it
                names |= {name for name in known if name[:2] == ("snapshot", job_id)}
            except (TierUnavailable, OSError) as error:
                self.note(tier, str(error))
        return sorted(names, key=lambda name: step_of(name.version), reverse=True)

    def newest_snapshot(self, job_id: str) -> StoredVersion | None:
        """The newest whole snapshot, from which the job resumes: in shared memory, in the job's folder, or else read in
        from the nearest tier."""
        beside = self.beside_job(job_id)
        stores = [self.store, *([beside] if (beside.root / "snapshots").is_dir() else [])]
        written = [stored for store in stores for stored in store.list("snapshot", job_id)]
        newest = max(written, key=lambda stored: step_of(stored.version), default=None)
        for name in self.snapshots_of(job_id):
            if newest is not None and step_of(name.version) <= step_of(newest.version):
                break
            try:
                try:
                    return self.bring_in(name)
                except StoreFull:
                    return self.bring_in(name, beside)
            except LookupError as error:
                log.error("the job resumes from an older snapshot: %s", error, extra={"job_id": job_id})
        return newest

    # What people see

    def tiers_of(self, name: Name) -> list[str]:
        """Names of the tiers that have `name`, or that had it at the last pass."""
        memory = ["memory"] if (self.store.root / name.key).is_dir() else []
        return memory + [tier.name for tier in self.all if name in tier.here]

    def status(self) -> list[dict[str, Any]]:
        """One entry per tier, shared memory first; sizes in bytes, times in Unix seconds. It reads folders of shared
        memory: call it on a thread."""
        usage, kinds = self.store.usage(), [kind for kind in KINDS for _ in self.store.list(kind)]
        memory = {
            "name": "memory",
            "where": str(self.store.root),
            **_counts(kinds),
            "bytes": usage.used_bytes,
            "limit_bytes": self.store.budget_bytes,
            **dict.fromkeys(("backlog", "backlog_bytes", "damaged"), 0),
            **dict.fromkeys(("busy", "last_error", "last_error_s")),
        }
        return [memory, *map(_status, self.all)]


def _status(tier: Tier) -> dict[str, Any]:
    backlog, busy = tier.backlog, tier.busy
    return {
        "name": tier.name,
        "where": tier.copies.where,
        **_counts([name.kind for name in tier.here]),
        "bytes": tier.used_bytes,
        "limit_bytes": None,
        "backlog": len(backlog),
        "backlog_bytes": sum(backlog.values()),
        "busy": None if busy is None else {"name": str(busy[0]), "done_bytes": busy[1]},
        **{key: getattr(tier, key) for key in ("damaged", "last_error", "last_error_s")},
    }


def _counts(kinds: list[str]) -> dict[str, int]:
    snapshots = kinds.count("snapshot")
    return {"versions": len(kinds) - snapshots, "snapshots": snapshots}


def name_of(row: VersionRow) -> Name:
    """The name of a version in every tier."""
    return Name("adapter" if row.meta.get("adapter") else "version", row.model, row.version)


# The way out


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
        for row in TIER_REMOVALS.list_all(self._db, "tier = ?", tier.name):
            copies.remove(Name(row.kind, row.model, row.version))
            TIER_REMOVALS.delete(self._db, row.tier, row.kind, row.model, row.version)
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
            TIER_REMOVALS.put(self._db, TierRemovalRow(tier.name, *name, created_s=time.time()))
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
    kept = {record.key for record in newest_first if record.protected or rules == KeepRules()}
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
