"""The tiers of the box, what each had at the last look, and what a person sees of it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from appliance.store.database import Database
from appliance.store.objects import models
from appliance.tiers.facts import name_of
from weights.format.config import KeepRules
from weights.format.errors import VersionLeased
from weights.format.manifest import KINDS, Manifest
from weights.format.names import version_path
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers.copies import verify
from weights.tiers.directory import DirectoryTier
from weights.tiers.pace import Pace
from weights.tiers.packed import PackedTier
from weights.tiers.record import Name

log = logging.getLogger(__name__)

NICENESS = 10


@dataclass
class Level:
    """One tier: what holds versions and snapshots in it, and the rules of what it keeps."""

    name: str
    where: str
    versions: DirectoryTier | PackedTier
    snapshots: PackedTier
    version_rules: KeepRules
    snapshot_rules: KeepRules
    rate_bytes_s: int | None = None

    def of(self, kind: str) -> DirectoryTier | PackedTier:
        return self.snapshots if kind == "snapshot" else self.versions

    def names(self) -> dict[Name, float]:
        """Creation time (Unix seconds) of everything in it."""
        return {name: created_s for kind in KINDS for name, created_s in self.of(kind).names(kind).items()}

    def all(self) -> list[DirectoryTier | PackedTier]:
        return [self.versions] if self.versions is self.snapshots else [self.versions, self.snapshots]


@dataclass
class Tier:
    """A level, the one thread that works for it, and what is known of it. `here`: creation time (Unix seconds) of what
    it had; `backlog`: bytes of what it lacks; `dirty`: something left it, and its bytes have to be collected."""

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
    """One place where a version or snapshot is; tier: None for memory. `verify` reads all of it and raises as its
    tier's `verify` does."""

    tier: Tier | None
    where: str
    verify: Callable[[], Manifest]

    @property
    def place(self) -> str:
        return self.tier.level.name if self.tier else "memory"


class Tiers:
    """All tiers, nearest first in `all`; shared memory is above them.

    `jobs_dir` holds the stores that ranks write snapshots to when shared memory is full. `loop` is the flow's while it
    runs.
    """

    def __init__(
        self,
        db: Database,
        store: WeightStore,
        levels: Iterable[Level],
        *,
        jobs_dir: Path,
    ) -> None:
        self.store, self.clock = store, time.time
        self.loop: asyncio.AbstractEventLoop | None = None
        self.all = [Tier(level, ThreadPoolExecutor(1, f"tier-{level.name}", initializer=_be_nice)) for level in levels]
        self._db, self._jobs_dir = db, jobs_dir

    def nudge(self) -> None:
        """Wake the flow: something new is there, or something has to go. Call it on the loop's thread."""
        for tier in self.all:
            tier.changed.set()

    def note(self, tier: Tier, text: str) -> None:
        """Notes an error of a tier, which `status` shows until its next one."""
        tier.last_error, tier.last_error_s = text, self.clock()
        log.error("tier %s: %s", tier.level.name, text)

    def drop_from_memory(self, name: Name, tier: str) -> str:
        """Removes a copy that is damaged in memory and whole in the tier of this name; says what came of it. May be
        called from any thread."""
        ours = version_path(self.store.root, *name).is_dir()
        store = self.store if ours else WeightStore(self._jobs_dir / name.model / "snapshots", budget_bytes=None)
        try:
            store.discard(*name)
        except VersionLeased:
            return "it is in use and stays; when its engine or job has let go of it, verify again"
        log.error("the damaged copy of %s was removed from memory; the %s tier has it whole", name, tier)
        return f"it was removed there, and comes from the {tier} tier when it is needed"

    def in_memory(self) -> dict[Name, StoredVersion]:
        """What shared memory has, and what the stores of jobs have that found it full."""
        stores = [WeightStore(path.parent, budget_bytes=None) for path in self._jobs_dir.glob("*/snapshots/snapshots")]
        found = {}
        for store in (*stores, self.store):
            for kind in KINDS:
                found |= {Name(kind, stored.model, stored.version): stored for stored in store.list(kind)}
        return found

    def tiers_of(self, name: Name) -> list[str]:
        """Names of the tiers that have `name`, or that had it at the last look."""
        memory = ["memory"] if version_path(self.store.root, *name).is_dir() else []
        return memory + [tier.level.name for tier in self.all if name in tier.here]

    def tiers_of_version(self, model: str, version: str) -> list[str]:
        row = models.find_version(self._db, model, version)
        return [] if row is None else self.tiers_of(name_of(row))

    def known(self) -> list[Name]:
        """Everything that any place had at the last look."""
        return sorted({name for tier in self.all for name in tier.here} | self.in_memory().keys())

    def copies(self, name: Name) -> list[Copy]:
        """Where `name` is now, or was at the last look at the tier; nearest first."""
        in_memory = self._in_memory_copy(name)
        found = [] if in_memory is None else [in_memory]
        for tier in self.all:
            holder = tier.level.of(name.kind)
            if isinstance(holder, DirectoryTier):
                there, where = holder.path(name).is_dir(), str(holder.path(name))
            else:
                there, where = name in tier.here, holder.where
            if there:
                found.append(Copy(tier, where, partial(holder.verify, name)))
        return found

    def status(self) -> Callable[[], list[dict[str, Any]]]:
        """One entry per tier, shared memory first; sizes in bytes, times in Unix seconds. Taken on the loop; called on
        any thread, for it lists the folders of shared memory."""
        known = list(map(_status, self.all))

        def listed() -> list[dict[str, Any]]:
            usage = self.store.usage()
            counts = {kind: self.store.count(kind) for kind in KINDS}
            memory = {
                "name": "memory",
                "where": str(self.store.root),
                "versions": counts["version"] + counts["adapter"],
                "snapshots": counts["snapshot"],
                "bytes": usage.used_bytes,
                "limit_bytes": usage.budget_bytes,
                **dict.fromkeys(("backlog", "backlog_bytes", "damaged"), 0),
                **dict.fromkeys(("busy", "last_error", "last_error_s", "next_try_s")),
            }
            return [memory, *known]

        return listed

    def _in_memory_copy(self, name: Name) -> Copy | None:
        path = version_path(self.store.root, *name)
        if not path.is_dir():
            path = version_path(self._jobs_dir / name.model / "snapshots", *name)
        return Copy(None, str(path), partial(verify, path)) if path.is_dir() else None


def _status(tier: Tier) -> dict[str, Any]:
    busy = None
    if tier.busy is not None:
        name, pace = tier.busy
        busy = {"name": str(name), "done_bytes": pace.done_bytes, "total_bytes": pace.total_bytes}
    return {
        "name": tier.level.name,
        "where": tier.level.where,
        "versions": sum(name.kind != "snapshot" for name in tier.here),
        "snapshots": sum(name.kind == "snapshot" for name in tier.here),
        "bytes": tier.used_bytes,
        "limit_bytes": None,
        "backlog": len(tier.backlog),
        "backlog_bytes": sum(tier.backlog.values()),
        "busy": busy,
        **{key: getattr(tier, key) for key in ("damaged", "last_error", "last_error_s", "next_try_s")},
    }


def _be_nice() -> None:
    # On Linux a priority belongs to a thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
