"""Builds the spec for a job's ranks, handles their reports, and deletes files that are no longer needed."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.controller.access.model_access import base_of, version_prefix
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.grading.rollouts import Rollouts
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.jobs.events import JobEvents, serve_if_allowed
from appliance.controller.models import lifecycle
from appliance.store import jobs, models
from appliance.store.database import Database
from appliance.store.rows import JobRow, VersionRow
from appliance.tiers.tiers import Tiers, name_of
from scheduler.loop.cluster_state import Inbox
from train.plan.spec import TrainSpec
from weights.format.errors import IntegrityError, VersionLeased, VersionNotFound, WeightsError
from weights.format.names import policy_of, replace_file
from weights.memory.store import Lease, StoredVersion, WeightStore
from weights.tiers.copies import verify

log = logging.getLogger(__name__)

Unload = Callable[[list[str]], Awaitable[None]]
"""`Scheduler.unload_adapters`."""
Remove = Callable[[VersionRow], Awaitable[None]]

TIDY_EVERY_S = 10.0


@dataclass(eq=False)
class JobRuns:
    """Implements `scheduler.ray.groups.Jobs`. The tiers copy a job's results by themselves once notified.

    Versions and snapshots that ranks are about to read are leased here until `taken`, so that they are not evicted
    while memory is short.
    """

    db: Database
    store: WeightStore
    jobs_dir: Path
    shm_root: Path
    events: JobEvents
    tiers: Tiers
    routing: BusRouting
    inbox: Inbox
    rollouts: Rollouts
    _verified: set[Path] = field(default_factory=set)
    _leases: dict[str, list[Lease]] = field(default_factory=dict)
    _dropped: list[VersionRow] = field(default_factory=list)  # checkpoints without rows whose bytes are still there

    async def prepare(self, job_id: str) -> None:
        """Load the parts of the base model that neither shared memory nor disk has in full. Raises LookupError."""
        for row in self._parts(jobs.get(self.db, job_id))[1]:
            await asyncio.to_thread(self._prepare, row)

    def _prepare(self, row: VersionRow) -> None:
        """Load a version into shared memory unless ranks can read it where it is. Shared memory was verified on
        arrival; a copy on disk is verified once per controller lifetime."""
        try:
            path = Path(self._path_of(row))
            if path not in self._verified and not path.is_relative_to(self.shm_root):
                verify(path)
                self._verified.add(path)
            return
        except LookupError:
            pass
        except IntegrityError as error:
            log.error("the copy on disk is not used as a base for training: %s", error)
        try:
            self.tiers.bring_in(name_of(row))
        except WeightsError as error:
            raise LookupError(str(error)) from error

    def spec(self, job_id: str, device_kind: str) -> TrainSpec:
        """Return the spec for the job's ranks on devices of this kind. Raises LookupError if the base model's bytes are
        gone."""
        row = jobs.get(self.db, job_id)
        assert row.resolved is not None, f"job {job_id} was scheduled before it was validated"
        fields, parts = self._parts(row)
        # A resumed LoRA run reads its frozen weights again, and an adapter is served beside the weights it was trained
        # on: neither may change because another version was activated in the meantime.
        paths = zip(("base_path", "base_adapter"), (self._path_of(part, job_id) for part in parts), strict=False)
        judge, folder = jobs.find_judge(self.db, job_id), self.jobs_dir / job_id
        limits = self.store.budget_bytes, (row.estimate or {}).get("memory", {}).get("limit_bytes")
        form = {"response_format": judge.judge.get("response_format")} if judge is not None else {}
        spec = TrainSpec.from_dict(
            {
                **row.resolved,
                # The answers' format, which the request has next to the grader.
                "options": row.resolved.get("options", {}) | {name: value for name, value in form.items() if value},
                "job_id": job_id,
                "method": row.method,
                **fields,
                **dict(paths),
                "device_kind": device_kind,
                "train_path": str(folder / "train.jsonl"),
                "valid_path": str(folder / "valid.jsonl") if row.validation_file else None,
                "run_dir": str(folder),
                "shm_root": str(self.shm_root),
                # Otherwise ranks would fill the tmpfs beyond the box's share, so that other processes find it full, and
                # snapshots would fill host memory that offloaded data needs.
                "shm_budget_bytes": min((limit for limit in limits if limit is not None), default=None),
                "output_model": row.output_model,
                "version_prefix": version_prefix(row),
                "seed": row.seed,
            }
        )
        replace_file(folder / "spec.json", spec.to_json().encode())
        return spec

    def _parts(self, row: JobRow) -> tuple[dict[str, str], list[VersionRow]]:
        """Return name and version of the base that was active when the job was queued, and the rows of its weights and,
        if the base is an adapter, of that. Raises LookupError if a version is gone."""
        base = base_of(self.db, row)
        if base is None:
            raise LookupError(f"the base model {row.model} was deleted, or is not shared with the job's owner any more")
        name, version = base.model.id, (row.resolved or {}).get("base_version") or base.version.version
        part = models.find_version(self.db, name, version)
        if part is None:
            raise LookupError(f"version {version} of the base model {name} was deleted")
        fields, adapter = {"base_model": name, "base_version": version}, part.meta.get("adapter")
        if adapter is None:
            return fields, [part]
        weights = models.find_version(self.db, adapter["base"], adapter["base_version"])
        if weights is None:
            raise LookupError(f"{adapter['base']} {adapter['base_version']}, the base of {name}, was deleted")
        return fields, [weights, part]

    def _path_of(self, row: VersionRow, held_for: str = "") -> str:
        """Return the version's directory, in shared memory or on disk. held_for: id of the job that holds the version
        in shared memory until `taken`. Raises LookupError."""
        kind = "adapter" if row.meta.get("adapter") else "version"
        stored = self.store.find(kind, row.model, row.version)
        if stored is not None and (not held_for or self._hold(held_for, stored)):
            return str(stored.path)
        if row.disk_path is None or not Path(row.disk_path).is_dir():
            raise LookupError(f"{row.model} {row.version} is neither in shared memory nor in any other tier")
        return row.disk_path

    def _hold(self, job_id: str, stored: StoredVersion) -> bool:
        """Hold a version until `taken`; returns False if it is gone."""
        try:
            lease = self.store.lease(stored)
        except VersionNotFound:
            return False
        except IntegrityError:  # the version's reader reports the damage
            return True
        self._leases.setdefault(job_id, []).append(lease)
        return True

    def taken(self, job_id: str) -> None:
        for lease in self._leases.pop(job_id, ()):
            lease.release()

    def newest_snapshot(self, job_id: str) -> Path | None:
        """Return the newest complete snapshot, in shared memory or else loaded from the nearest tier; it is held until
        `taken`. Callable from any thread."""
        while (snapshot := self.tiers.newest_snapshot(job_id)) is not None:
            if self._hold(job_id, snapshot):
                return snapshot.path
        return None

    def on_event(self, job_id: str, event: dict[str, Any]) -> None:
        """Record the event; the tiers copy published versions at once, and snapshots in their next pass."""
        if event["event"] == "started":  # the scheduler's loop records the start with the device names
            self.events.resumed(job_id, int(event["step"]))
            return
        if event["event"] == "policy":
            self.rollouts.published(job_id, int(event["step"]))
            return
        self.events.ingest(job_id, event)
        if event["event"] != "published":
            return
        row = jobs.get(self.db, job_id)
        self.tiers.nudge()
        if row.resolved["publish"] in ("checkpoints", "best"):
            self._dropped += lifecycle.drop_older_checkpoints(self.db, row)
        if row.resolved["publish"] == "epoch":
            # Requested: each epoch's weights go live at once, in the engine that already serves the model.
            serve_if_allowed(self.db, row, event["version"])
        self.routing.refresh()
        self.inbox.nudge()

    async def will_succeed(self, job_id: str) -> None:
        try:
            await asyncio.to_thread(self.events.conclude, job_id)
        except (OSError, sqlite3.Error) as error:  # the end of the job is reported anyway
            log.warning("the table of its steps is not written yet: %s", error, extra={"job_id": job_id})

    def on_stopped(self, job_id: str) -> None:
        """Complete the cancellation of a job whose ranks were ended by force."""
        row = jobs.find(self.db, job_id)
        if row is not None and row.wanted == "cancel":
            self.events.cancelled(job_id)

    async def tidy(self, unload: Unload, remove: Remove) -> None:
        """Delete the snapshots of jobs that are over, their policies, and the bytes of checkpoints that newer ones
        replaced; called every `TIDY_EVERY_S`. unload: makes every engine unload the adapters with these names. remove:
        removes a version, whose row is gone, from engines and tiers."""
        for row in jobs.list_left_snapshots(self.db):
            if await asyncio.to_thread(self._forget, row.id):
                jobs.update(self.db, row.id, snapshot=None)
                self.tiers.nudge()
        self.rollouts.follow()
        self.routing.keep_policies(lambda name: jobs.find_unfinished(self.db, policy_of(name)) is not None)
        await self._tidy_policies(unload)
        while self._dropped:
            version = self._dropped.pop()
            try:
                await remove(version)
            except OperationFailed as error:  # without a row, the next sweep of the store deletes the rest
                log.warning("%s %s was replaced by newer checkpoints, but %s", version.model, version.version, error)

    async def _tidy_policies(self, unload: Unload) -> None:
        """Remove models in training: weights that ranks write at every step under a private name (train.rollouts). The
        newest weights, and weights in use, stay while the job trains."""
        by_model = defaultdict[tuple[str, str], list[StoredVersion]](list)
        for kind in ("adapter", "version"):
            for stored in await asyncio.to_thread(self.store.list, kind):  # oldest first
                if policy_of(stored.model) is not None:
                    by_model[kind, stored.model].append(stored)
        for (kind, model), versions in by_model.items():
            row, n_kept = jobs.find_unfinished(self.db, policy_of(model)), 0
            if row is not None:
                # Versions that may still sample answers, and the one that ranks have just written.
                n_kept = int((row.resolved or {}).get("options", {}).get("staleness", 0)) + 2
            for stored in versions[: max(0, len(versions) - n_kept)]:
                try:
                    if kind == "adapter":
                        await unload([f"{stored.model}@{stored.version}"])
                    await asyncio.to_thread(self.store.remove, stored)
                except VersionNotFound:
                    continue  # the job's ranks removed it
                except (OperationFailed, VersionLeased) as error:
                    log.info("the model in training %s %s stays for now: %s", stored.model, stored.version, error)

    def _forget(self, job_id: str) -> bool:
        """Remove a job's snapshots from memory and its own directory; False while a rank still reads one. The tiers
        drop the snapshots of jobs that are over on their own."""
        try:
            for stored in self.store.list("snapshot", job_id):
                self.store.remove(stored)
        except VersionLeased:
            return False
        except VersionNotFound:
            return self._forget(job_id)  # the ending job has just removed it
        shutil.rmtree(self.jobs_dir / job_id / "snapshots", ignore_errors=True)
        return True
