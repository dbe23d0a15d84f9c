"""What a job's ranks are told, and what becomes of what they report."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.controller.job_events import JobEvents
from appliance.controller.naming import resolve
from appliance.store import deployments, job_records, jobs, models
from appliance.store.database import Database
from appliance.store.rows import DeploymentRow
from appliance.wiring.versions import VersionShelf
from train.event_log import read_events
from train.spec import TrainSpec
from weights import tiers
from weights.errors import VersionLeased, VersionNotFound, WeightsError
from weights.store import StoredVersion, WeightStore

log = logging.getLogger(__name__)

TIDY_EVERY_S = 10.0


class JobRuns:
    """Implements `scheduler.ray_effects.Jobs`; keeps the newest snapshot of every job on disk as well."""

    def __init__(
        self,
        db: Database,
        store: WeightStore,
        jobs_dir: Path,
        shm_root: Path,
        events: JobEvents,
        shelf: VersionShelf,
        on_change: Callable[[], None],
    ):
        self._db, self._store, self._jobs_dir, self._shm_root = db, store, jobs_dir, shm_root
        self._events, self._shelf, self._on_change = events, shelf, on_change
        self._saving: dict[str, asyncio.Task[None]] = {}

    def catch_up(self, job_id: str) -> None:
        """Take in the steps that were trained while no controller listened. Called before ranks start anew."""
        known = {row.step for row in job_records.list_metrics(self._db, job_id)}
        for event in read_events(self._jobs_dir / job_id):
            if event["event"] == "metrics" and event["step"] not in known:
                self._events.ingest(job_id, event)

    def spec(self, job_id: str) -> TrainSpec:
        """What the job's ranks are to do. Raises LookupError when the base model's bytes are gone."""
        row = jobs.get(self._db, job_id)
        assert row.resolved is not None, f"job {job_id} was scheduled before it was validated"
        folder = self._jobs_dir / job_id
        spec = TrainSpec.from_dict(
            {
                **row.resolved,
                "job_id": job_id,
                "base_model": row.model,
                "base_path": self._base_path(row.model),
                "train_path": str(folder / "train.jsonl"),
                "valid_path": str(folder / "valid.jsonl") if row.validation_file else None,
                "run_dir": str(folder),
                "shm_root": str(self._shm_root),
                # Else ranks would fill the tmpfs past the box's share, and everybody else would find it full.
                "shm_budget_bytes": self._store.budget_bytes,
                "output_model": row.output_model,
                "seed": row.seed,
            }
        )
        (folder / "spec.json").write_text(spec.to_json())
        return spec

    def _base_path(self, name: str) -> str:
        base = resolve(self._db, name)
        if base is None:
            raise LookupError(f"the base model {name} is not on this box any more")
        stored = self._store.find("version", base.model.id, base.version.version)
        if stored is not None:
            return str(stored.path)
        if base.version.disk_path is None or not Path(base.version.disk_path).is_dir():
            raise LookupError(f"{name} {base.version.version} is neither in shared memory nor on disk")
        return base.version.disk_path

    def newest_snapshot(self, job_id: str) -> Path | None:
        """The newest snapshot, from shared memory or else read in from disk. May be called from any thread."""
        # When shared memory is full, ranks write their snapshot into a store of the same form beside the job.
        own = self._jobs_dir / job_id / "snapshots"
        stores = [self._store, *([WeightStore(own, budget_bytes=None)] if (own / "snapshots").is_dir() else [])]
        written = [stored for store in stores for stored in store.list("snapshot") if stored.model == job_id]
        if written:
            return max(written, key=_step).path
        saved = self._saved_snapshots(job_id)
        if not saved:
            return None
        return self._store.import_dir(saved[-1], model=job_id, version=saved[-1].name, kind="snapshot").path

    def on_event(self, job_id: str, event: dict[str, Any]) -> None:
        """Record it; a snapshot is copied to disk and a published version reported, both in the background."""
        if event["event"] == "started":
            return  # the loop says the same with the devices' names
        self._events.ingest(job_id, event)
        if event["event"] == "published":
            self._published(job_id, event["version"])
        elif event["event"] == "snapshot":
            self._save_soon(job_id)

    def _published(self, job_id: str, version: str) -> None:
        row = jobs.get(self._db, job_id)
        self._shelf.save_soon(row.output_model, version)
        if row.resolved["publish"] == "epoch":
            # Asked for: each epoch's weights go live at once, into the engine that serves the model already.
            models.activate(self._db, row.output_model, version)
            if deployments.find(self._db, row.output_model) is None:
                deployments.insert(self._db, DeploymentRow(model=row.output_model, created_s=time.time()))
        self._on_change()

    def on_stopped(self, job_id: str) -> None:
        """Its ranks were ended by force: for a job to be cancelled, its end."""
        row = jobs.find(self._db, job_id)
        if row is not None and row.wanted == "cancel":
            self._events.cancelled(job_id)

    async def tidy(self) -> None:
        """Gives back, now and then, the snapshots of jobs that are over."""
        while True:
            for row in jobs.list_left_snapshots(self._db):
                if await asyncio.to_thread(self._forget, row.id):
                    jobs.update(self._db, row.id, snapshot=None)
            await asyncio.sleep(TIDY_EVERY_S)

    def _forget(self, job_id: str) -> bool:
        """Remove a job's snapshots, in shared memory and on disk; False while a rank still reads one."""
        try:
            for stored in self._store.list("snapshot"):
                if stored.model == job_id:
                    self._store.remove(stored)
        except VersionLeased:
            return False
        except VersionNotFound:
            return self._forget(job_id)  # the ending job removed it itself a moment ago
        shutil.rmtree(self._jobs_dir / job_id / "snapshots", ignore_errors=True)
        return True

    async def save_all(self) -> None:
        """Returns when the newest snapshot of every unfinished job is on disk. Called before the box ends."""
        await asyncio.gather(*self._saving.values())
        for row in jobs.list_unfinished(self._db):
            await self._save_newest(row.id)

    def _save_soon(self, job_id: str) -> None:
        running = self._saving.get(job_id)
        if running is None or running.done():
            self._saving[job_id] = asyncio.create_task(self._save_newest(job_id))

    async def _save_newest(self, job_id: str) -> None:
        try:
            await asyncio.to_thread(self._copy_newest, job_id)
        except (OSError, WeightsError) as error:
            log.error("the newest snapshot of job %s could not be saved: %s", job_id, error)

    def _copy_newest(self, job_id: str) -> None:
        in_memory = [stored for stored in self._store.list("snapshot") if stored.model == job_id]
        if not in_memory:
            return
        newest = max(in_memory, key=_step)
        target = self._jobs_dir / job_id / "snapshots" / newest.version
        tiers.persist(newest, target)
        for older in self._saved_snapshots(job_id)[:-1]:
            shutil.rmtree(older)

    def _saved_snapshots(self, job_id: str) -> list[Path]:
        found = (self._jobs_dir / job_id / "snapshots").glob("step-*")
        return sorted((path for path in found if path.name[5:].isdigit()), key=lambda path: int(path.name[5:]))


def _step(stored: StoredVersion) -> int:
    return int(stored.version.removeprefix("step-"))
