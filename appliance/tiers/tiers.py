"""The tiers of the box: contents at the last pass, status, restoring, and the flow that copies versions and snapshots
from shared memory to the disk and to the remote store.

The flow is level-triggered: a pass reads the contents of each tier, computes missing and surplus copies, and copies or
removes them one by one. After a crash the next pass finds the remaining work. Each tier has its own thread, so a
hanging mount does not block other tiers.
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
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux a priority applies to one thread


@dataclass
class Tier:
    """A place for copies, with the one thread that writes them and the copies' last known state.

    `here`: creation time (Unix seconds) of each copy at the last pass; replaced, never changed, because other threads
    read it. `backlog`: bytes of each missing copy. `busy`: the copy that is being written, and its written bytes.
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
    """The disk and, if configured, the remote store, both in `all`; shared memory is the tier above them.

    Any thread may call any method except `nudge`. Raises TierUnavailable if the settings of an S3 store are unusable.
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
        """Wake the flow after a copy was added or must be removed. Call it on the loop's thread."""
        for tier in self.all:
            tier.changed.set()

    def note(self, tier: Tier, text: str) -> None:
        """Record a tier's last error, which `status` shows."""
        tier.last_error, tier.last_error_s = text, self.clock()
        log.error("tier %s: %s", tier.name, text)

    def beside_job(self, job_id: str) -> WeightStore:
        """Return the store to which ranks write snapshots when shared memory is full."""
        return WeightStore(self._jobs_dir / job_id / "snapshots", budget_bytes=None)

    def in_memory(self) -> dict[Name, StoredVersion]:
        """Return the versions and snapshots in shared memory, and in the stores of jobs that found it full."""
        jobs = [path.parent.parent.name for path in self._jobs_dir.glob("*/snapshots/snapshots")]
        versions = {}
        for store in (*map(self.beside_job, jobs), self.store):
            for kind in KINDS:
                versions |= {Name(kind, stored.model, stored.version): stored for stored in store.list(kind)}
        return versions

    # Restoring

    def bring_in(self, name: Name, store: WeightStore | None = None) -> StoredVersion:
        """Bring `name` into shared memory (or `store`), if absent, from the nearest tier with an undamaged copy.

        Damaged copies in nearer tiers are then removed, so that the flow writes them again. Raises LookupError if no
        tier has an undamaged copy, StoreFull.
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
        raise LookupError(f"no tier has an undamaged copy of {name}: {'; '.join(faults) or 'none has it'}")

    def _remove_damaged(self, tier: Tier, name: Name, whole_in: str) -> None:
        try:
            tier.copies.remove(name)
        except (TierUnavailable, OSError) as error:
            self.note(tier, f"cannot remove the damaged copy of {name}: {error}")
            return
        tier.damaged += 1
        self.note(tier, f"removed the damaged copy of {name} to write it again; the {whole_in} tier has a good one")

    def snapshots_of(self, job_id: str) -> list[Name]:
        """Return the names of the job's snapshots in all tiers, highest step first."""
        names: set[Name] = set()
        for tier in self.all:
            try:
                known = [*tier.copies.manifests()]  # a copy of the list, which the tier's thread changes
                names |= {name for name in known if name[:2] == ("snapshot", job_id)}
            except (TierUnavailable, OSError) as error:
                self.note(tier, str(error))
        return sorted(names, key=lambda name: step_of(name.version), reverse=True)

    def newest_snapshot(self, job_id: str) -> StoredVersion | None:
        """Return the newest undamaged snapshot, from which the job resumes: from shared memory or the job's folder,
        else from the nearest tier."""
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

    # Status

    def tiers_of(self, name: Name) -> list[str]:
        """Return the names of the tiers that have `name`; for disk and remote, by the last pass."""
        memory = ["memory"] if (self.store.root / name.key).is_dir() else []
        return memory + [tier.name for tier in self.all if name in tier.here]

    def status(self) -> list[dict[str, Any]]:
        """Return one entry per tier, shared memory first; sizes in bytes, times in Unix seconds. Blocks on reads of
        folders: call it in a worker thread."""
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
    """Return the name that a version has in all tiers."""
    return Name("adapter" if row.meta.get("adapter") else "version", row.model, row.version)


# Copying to the tiers


class TransferStopped(Exception):
    """The box stops during a copy; the next pass starts the copy again."""


class TierFlow:
    """Copies versions and snapshots to the tiers: `run` works until cancelled. Call other methods on the loop's thread.

    `owner`: the box's id, because a remote store belongs to one box. `is_held(name)`: returns whether the box serves a
    version now; called on the tiers' threads.
    """

    def __init__(
        self, db: Database, tiers: Tiers, *, owner: str, is_held: Callable[[Name], bool] = lambda name: False
    ) -> None:
        self._db, self._tiers, self._owner, self._is_held = db, tiers, owner, is_held
        self._stopping = threading.Event()
        self._collected: set[str] = set()
        self._not_before_s: dict[tuple[str, str], float] = {}  # (tier, job) -> when its next snapshot may be copied

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for tier in self._tiers.all:
                group.create_task(self._work(tier), name=f"tier: {tier.name}")

    async def finish(self) -> bool:
        """Stop the flow and copy to disk what is only in memory. Returns False if any copy is missing."""
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
        """Run one pass over a tier; its errors go to `Tiers.status`."""
        (tier,) = (tier for tier in self._tiers.all if tier.name == name)
        try:
            await asyncio.get_running_loop().run_in_executor(tier.pool, self._pass, tier, everything)
        except TransferStopped:
            return
        except (WeightsError, OSError) as error:
            self._tiers.note(tier, f"{error}; retrying in {EVERY_S:.0f} s")

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
            log.info("removed %s from the %s tier: no rule keeps it", name, tier.name)
        if tier is disk:
            self._after_disk(facts, stored, push)
        tier.used_bytes = sum(manifest.nbytes for manifest in copies.manifests().values())

    def _push_all(self, tier: Tier, push: list[Name], stored: dict[Name, StoredVersion], everything: bool) -> bool:
        """Copy `push` to a tier; return whether it is full. everything: include snapshots of recently copied jobs."""
        for name in push:
            job, began_s = (tier.name, name.model), self._tiers.clock()
            if everything or name.kind != "snapshot" or began_s >= self._not_before_s.get(job, 0.0):
                try:
                    self._push(tier, name, stored.get(name))
                except (VersionNotFound, StoreError, FileNotFoundError) as error:
                    log.info("%s was not copied to the %s tier: %s", name, tier.name, error)  # it was removed meanwhile
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
        """Copy one item to a tier, from memory or, if memory no longer has it, from disk."""

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
        """Record in the database what is on disk; unpin in memory all items that are on disk or that no rule keeps."""
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
        """Remove the deleted item `name` from every tier; from an unreachable tier once it is reachable."""
        for tier in self._tiers.all:
            TIER_REMOVALS.put(self._db, TierRemovalRow(tier.name, *name, created_s=time.time()))
        self._tiers.nudge()


def _plan(tier: Tier, facts: Facts, above: set[Name]) -> tuple[list[Name], list[Name]]:
    """Return the names to copy to the tier, snapshots first, then newest first, and the names to remove from it."""
    judged = [facts.kept[name] for name in {*above, *tier.here} if name in facts.kept]
    snapshots = [record for record in judged if record.key.kind == "snapshot"]
    others = [record for record in judged if record.key.kind != "snapshot"]
    kept = [*keep(snapshots, tier.snapshot_rules), *keep(others, tier.version_rules)]
    push = [name for name in kept if name not in tier.here]
    known = {record.key for record in judged} | facts.over
    return push, [name for name in tier.here if name in known and name not in kept]


def _spare_newest(drop: list[Name], here: dict[Name, float], facts: Facts) -> list[Name]:
    """Return the copies that a full tier may drop before their replacements arrive: all of `drop` but its newest copy
    of each model and of each unfinished job."""
    newest = {(name.kind, name.model): name for name in sorted(here, key=lambda name: here[name])}
    return [name for name in drop if name in facts.over or newest[name.kind, name.model] != name]


@dataclass(frozen=True)
class Kept:
    """A version or snapshot to which rules of retention apply. `family`: its model or job; rules apply to each family
    separately. `valid_loss`: None if never measured. `protected`: to be kept regardless of the rules."""

    key: Name
    family: str
    created_s: float
    valid_loss: float | None = None
    protected: bool = False


def keep(records: Iterable[Kept], rules: KeepRules) -> list[Name]:
    """Return the keys to keep, newest first: of each family the newest `keep_last`, the `keep_best` with the lowest
    validation loss, and all protected items; without rules all keys."""
    newest_first = sorted(records, key=lambda record: record.created_s, reverse=True)
    measured = [record for record in newest_first if record.valid_loss is not None]
    best_first = sorted(measured, key=lambda record: record.valid_loss or 0.0)  # stable: at equal loss, newest first
    kept = {record.key for record in newest_first if record.protected or rules == KeepRules()}
    for family in {record.family for record in newest_first}:
        for ranked, count in ((newest_first, rules.keep_last), (best_first, rules.keep_best)):
            kept |= {record.key for record in [record for record in ranked if record.family == family][: count or 0]}
    return [record.key for record in newest_first if record.key in kept]


@dataclass(frozen=True)
class Facts:
    """Facts from the database for retention. `kept`: `Kept` of versions and snapshots by name. `over`: names of
    snapshots of ended jobs."""

    kept: dict[Name, Kept]
    over: frozenset[Name]
    rows: tuple[VersionRow, ...]


def read_facts(db: Database, created: Mapping[Name, float], is_held: Callable[[Name], bool]) -> Facts:
    """Read facts for retention. `created`: creation time of each item in any tier. Rules skip items without a row."""
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
        # Epoch checkpoints are a family of their own, so that the "last three" of a model are results of three jobs.
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
