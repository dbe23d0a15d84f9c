"""The tiers of the box, what each had at the last pass, the way back from them, and what a person sees of them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.rows import VersionRow
from weights.format.config import KeepRules, WeightsConfig
from weights.format.errors import (
    IntegrityError,
    StoreFull,
    TierUnavailable,
    VersionExists,
    VersionNotFound,
)
from weights.format.names import KINDS, Name, step_of
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers.copies import DirectoryCopies, RemoteCopies
from weights.tiers.objects import objects_at

log = logging.getLogger(__name__)

NICENESS = 10


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
    pool: ThreadPoolExecutor = field(default_factory=lambda: _thread())
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

    def __init__(self, db: Database, store: WeightStore, config: WeightsConfig, paths: BoxPaths) -> None:
        self.store, self.clock = store, time.time
        self._db, self._jobs_dir = db, paths.jobs
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

    def tiers_of_version(self, model: str, version: str) -> list[str]:
        row = models.find_version(self._db, model, version)
        return [] if row is None else self.tiers_of(name_of(row))

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


def _thread() -> ThreadPoolExecutor:
    """One thread at low priority. On Linux a priority belongs to a thread."""
    return ThreadPoolExecutor(
        1, "tier", initializer=lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    )
