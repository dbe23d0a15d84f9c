"""From which snapshot a job goes on: the newest that is whole, in shared memory, beside the job, or in any tier.

One that broke again as soon as a job had gone back to it is given up, with all that came after it, wherever it lies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from appliance.store.database import Database
from appliance.store.records import tier_removals
from appliance.tiers.tiers import Tiers
from weights.format.errors import StoreFull, VersionLeased, VersionNotFound, WeightsError
from weights.format.names import step_of
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers.record import Name

log = logging.getLogger(__name__)


class JobSnapshots:
    """What is given up and could not be removed yet is known to this process alone: after a restart a job may try it
    once more, and give it up again."""

    def __init__(self, db: Database, tiers: Tiers):
        self._db, self._tiers = db, tiers
        self._given_up: dict[str, tuple[int, float]] = {}
        self._removing: dict[str, asyncio.Task[None]] = {}

    def newest(self, job_id: str) -> StoredVersion | None:
        """From shared memory or beside the job, or else read in from the nearest tier. Callable from any thread."""
        newest = max(self._written(job_id), key=lambda stored: step_of(stored.version), default=None)
        for name, made_s in self._tiers.snapshots_of(job_id).items():
            if newest is not None and step_of(name.version) <= step_of(newest.version):
                break
            if not self._is_usable(name, made_s):
                continue
            try:
                try:
                    return self._tiers.bring_in(name)
                except StoreFull:
                    return self._tiers.bring_in(name, self._tiers.beside_job(job_id))
            except LookupError as error:
                log.error("the job resumes from an older snapshot: %s", error, extra={"job_id": job_id})
        return newest

    def older(self, job_id: str) -> int:
        """How many are kept beside the newest."""
        return max(0, len(self._kept(job_id)) - 1)

    def with_way_back(self, job_id: str, event: dict[str, Any]) -> dict[str, Any]:
        """An event of ranks; one that says that the snapshot they began with is broken, with the one that the job goes
        back to (`back_to`: {"step", "path"}). What is broken is given up, lest it is taken for the newest."""
        if event["event"] != "anomaly" or event.get("poisoned") is None:
            return event
        step = int(event["poisoned"])
        older = {one: path for one, path in self._kept(job_id).items() if one < step}
        if not older:
            return event
        self._give_up(job_id, step)
        return event | {"back_to": {"step": max(older), "path": older[max(older)]}}

    async def removed(self, job_id: str) -> None:
        """Returns when what was given up has left memory: the job makes snapshots of the same steps."""
        if (removing := self._removing.get(job_id)) is not None:
            await asyncio.wait([removing])
            if self._removing.get(job_id) is removing:
                del self._removing[job_id]

    def forget(self, job_id: str) -> None:
        """The job is over."""
        self._given_up.pop(job_id, None)

    def _give_up(self, job_id: str, step: int) -> None:
        self._given_up[job_id] = (step, time.time())
        before = self._removing.get(job_id)
        self._removing[job_id] = asyncio.create_task(self._remove(before, job_id, step), name=f"snapshots of {job_id}")
        for tier in self._tiers.all:
            for name in tier.here:
                if name.kind == "snapshot" and name.model == job_id and step_of(name.version) >= step:
                    tier_removals.insert(self._db, tier.name, *name)
        self._tiers.nudge()

    async def _remove(self, before: asyncio.Task[None] | None, job_id: str, step: int) -> None:
        """On a thread: it waits for whoever frees memory just now, and may free some itself, for seconds."""
        if before is not None:
            await asyncio.wait([before])
        try:
            await asyncio.to_thread(self._remove_now, job_id, step)
        except (WeightsError, OSError) as error:
            log.error("a broken snapshot is passed over, and not removed: %s", error, extra={"job_id": job_id})

    def _remove_now(self, job_id: str, step: int) -> None:
        for store in self._stores(job_id):
            for stored in store.list("snapshot", job_id):
                if step_of(stored.version) >= step:
                    with contextlib.suppress(VersionLeased, VersionNotFound):  # a tier copies it: it is passed over
                        store.remove(stored)

    def _is_usable(self, name: Name, made_s: float) -> bool:
        """Steps are done again after one is given up, and snapshots of them made anew."""
        step, before_s = self._given_up.get(name.model, (0, 0.0))
        return made_s > before_s or step_of(name.version) < step

    def _kept(self, job_id: str) -> dict[int, str]:
        """Steps of those that it could go on from, with where they lie; "" in a tier."""
        kept = {
            step_of(name.version): ""
            for tier in self._tiers.all
            for name, made_s in tier.here.items()
            if name.kind == "snapshot" and name.model == job_id and self._is_usable(name, made_s)
        }
        return kept | {step_of(stored.version): str(stored.path) for stored in self._written(job_id)}

    def _written(self, job_id: str) -> list[StoredVersion]:
        return [
            stored
            for store in self._stores(job_id)
            for stored in store.list("snapshot", job_id)
            if self._is_usable(Name("snapshot", job_id, stored.version), stored.manifest.created_s)
        ]

    def _stores(self, job_id: str) -> list[WeightStore]:
        beside = self._tiers.beside_job(job_id)
        return [self._tiers.store, *([beside] if (beside.root / "snapshots").is_dir() else [])]
