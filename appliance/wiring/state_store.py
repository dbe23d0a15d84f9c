"""The scheduler's view of the store: jobs, deployments and the mode in, phases and reasons out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from appliance.controller.devices.cordons import CORDONED
from appliance.controller.devices.mode import mode_windows, policy_of, read_mode
from appliance.controller.jobs import devices as job_devices
from appliance.controller.jobs import pauses
from appliance.controller.jobs.events import JobEvents
from appliance.store.database import Database
from appliance.store.objects import adapters as adapter_rows
from appliance.store.objects import job_records, jobs, models
from appliance.store.objects.adapters import AdapterRow
from appliance.store.records import box, canaries, deployments, usage
from appliance.store.rows import CanaryRow, DeploymentRow, JobRow
from scheduler.autoscale.idle import CHECKPOINT_IDLE_S
from scheduler.core.failures import Trouble
from scheduler.core.workload import Demand, DeploymentView, JobView, Workload
from scheduler.devices.discovery import HEAD_NODE
from scheduler.handover.ports import Outcome


@dataclass(frozen=True, slots=True)
class BoxSize:
    """serving_floor: devices that serving keeps in every mode. devices: of the box when it started. max_replicas: of a
    deployment that names no bound."""

    serving_floor: int
    devices: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class Live:
    """What a round has to know that is not in the store.

    demand: of a model. job_lacks: why a job cannot begin now, in a sentence; "" where it can. bounded: deployments with
    what is learned of their traffic, within what memory allows. job_nodes: nodes on which jobs can run. max_asleep:
    sleeping engines that may stay as processes; None: as configured."""

    demand: Callable[[str], Demand]
    job_lacks: Callable[[JobRow], str] = lambda row: ""
    bounded: Callable[[tuple[DeploymentView, ...]], tuple[DeploymentView, ...]] = lambda deployments: deployments
    job_nodes: Callable[[], tuple[str, ...]] = lambda: (HEAD_NODE,)
    max_asleep: Callable[[], int | None] = lambda: None


class SqliteStateStore:
    """Implements `scheduler.handover.ports.StateStore`. Every call is a few short statements on the database.

    models_changed: called when a model can be called, or cannot be any more."""

    def __init__(self, db: Database, events: JobEvents, size: BoxSize, live: Live, models_changed: Callable[[], Any]):
        self._db, self._events, self._size, self._live = db, events, size, live
        self._models_changed = models_changed
        self._remaining_device_s: dict[str, float] = {}  # as far as known: what a job said when it ran last

    def after_restart(self, adopted: Collection[str] = ()) -> None:
        """Jobs that a crash left "running" wait for devices again, but for those whose ranks run on (`adopted`)."""
        usage.close_left_open(self._db, set(adopted))
        for row in jobs.list_in_phase(self._db, "running"):
            if row.id in adopted:
                continue
            self.job_waiting(row.id, "the box was restarted", suspended=row.snapshot is not None)

    def load(self) -> Workload:
        self._finish_cancelled()
        mode = read_mode(self._db)
        active = {row.id: row.active_version for row in models.list_callable(self._db)}
        deployed = [row for row in deployments.list_all(self._db) if row.model in active]
        adapters = {row.name: row for row in adapter_rows.list_callable(self._db)}
        return Workload(
            policy=policy_of(mode, self._size.serving_floor),
            policy_since_s=mode.since_s,
            windows=mode_windows(self._db, self._size.serving_floor),
            jobs=tuple(
                self._job(row)
                for row in jobs.list_unfinished(self._db)
                if row.phase != "validating" and row.wanted != "cancel"
            ),
            deployments=self._live.bounded(
                (
                    *self._own_engines(deployed, active, adapters),
                    *(view for view in self._checkpoints() if view.model not in adapters),
                )
            ),
            cordoned=frozenset(box.get(self._db, CORDONED, [])),
            max_asleep=self._live.max_asleep(),
        )

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        row = self._open(job_id)
        if row is not None:
            usage.devices_held(self._db, job_id, len(devices), time.time())
        if row is not None and (row.phase != "running" or row.devices != list(devices)):
            self._events.started(job_id, list(devices), resumed=row.snapshot is not None)

    def job_waiting(self, job_id: str, reason: str, suspended: bool) -> None:
        usage.devices_held(self._db, job_id, 0, time.time())
        row = self._open(job_id)
        if row is None:
            return
        reason = pauses.reason(self._db, row) or reason
        if row.snapshot is None:
            jobs.set_phase(self._db, job_id, "queued", reason=reason)
        elif row.phase == "running":
            self._events.suspended(job_id, row.snapshot["step"], row.snapshot["path"], reason=reason)
        else:
            jobs.set_phase(self._db, job_id, "suspended", reason=reason)

    def job_ended(self, job_id: str, outcome: Outcome, error: str) -> None:
        self._remaining_device_s.pop(job_id, None)
        usage.devices_held(self._db, job_id, 0, time.time())
        if self._open(job_id) is None:
            return
        match outcome:
            case "succeeded":
                self._events.succeeded(job_id)
                self._models_changed()  # its model can be called the moment the job says so
            case "failed":
                self._events.failed(job_id, "training_failed", error)
            case "cancelled":
                self._events.cancelled(job_id)

    def model_trouble(self, model: str, trouble: Trouble | None) -> None:
        """Kept by the loop alone: what failed before a restart says nothing of what is tried after it."""
        self._models_changed()

    def _finish_cancelled(self) -> None:
        """Jobs that are to be cancelled and hold nothing any more; one that runs is stopped first, by not being
        in the workload, and finished when its ranks are gone."""
        for row in jobs.list_unfinished(self._db):
            if row.wanted == "cancel" and row.phase != "running":
                self._events.cancelled(row.id)

    def _own_engines(
        self, deployed: list[DeploymentRow], active: Mapping[str, str], adapters: Mapping[str, AdapterRow]
    ) -> list[DeploymentView]:
        """Deployments that need engines of their own. What an adapter asks for, it asks of its host."""
        views = {row.model: self._deployment(row, active[row.model]) for row in deployed if row.model not in adapters}
        for adapter in adapters.values():
            if adapter.host not in views:
                # Its base serves another version now, or is not deployed: engines for the version it was trained on.
                base = views.get(adapter.base, DeploymentView(adapter.base, adapter.base_version))
                views[adapter.host] = replace(
                    base,
                    model=adapter.host,
                    version=adapter.base_version,
                    min_replicas=0,
                    pinned=False,
                    demand=self._live.demand(adapter.host),
                    idle_sleep_s=None,
                    idle_limit_s=CHECKPOINT_IDLE_S,
                )
        for row in deployed:
            if row.model in adapters and (row.pinned or row.min_replicas):
                host = views[adapters[row.model].host]
                views[host.model] = replace(
                    host,
                    pinned=host.pinned or bool(row.pinned),
                    min_replicas=min(max(host.min_replicas, row.min_replicas), host.max_replicas),
                )
        for canary in canaries.list_running(self._db):
            # One of an adapter needs none: the engines of its host serve both versions.
            if canary.model in views and canary.name not in adapters:
                views[canary.name] = self._canary(canary, views[canary.model])
        return list(views.values())

    def _canary(self, row: CanaryRow, stable: DeploymentView) -> DeploymentView:
        """One engine at least for as long as it runs: it is never waited for, so demand alone would not start one."""
        return replace(
            stable,
            model=row.name,
            version=row.version,
            min_replicas=1,
            max_replicas=max(1, stable.max_replicas),
            demand=self._live.demand(row.name),
            idle_sleep_s=None,
            idle_limit_s=None,
            pinned=False,
        )

    def _checkpoints(self) -> list[DeploymentView]:
        """A checkpoint can be called by its name; it gets an engine while somebody does."""
        return [
            DeploymentView(row.name, row.version, demand=self._live.demand(row.name), idle_limit_s=CHECKPOINT_IDLE_S)
            for row in job_records.list_checkpoints(self._db)
        ]

    def _open(self, job_id: str) -> JobRow | None:
        """The job if it can still change: a person may have cancelled or deleted it a moment ago."""
        row = jobs.find(self._db, job_id)
        return row if row is not None and not row.finished else None

    def _job(self, row: JobRow) -> JobView:
        least, most, sizes = job_devices.bounds(row, self._size.devices)
        if row.eta_s is not None and row.devices:
            self._remaining_device_s[row.id] = row.eta_s * len(row.devices)
        return JobView(
            id=row.id,
            min_devices=least,
            max_devices=most,
            allowed_sizes=sizes,
            remaining_device_s=self._remaining_device_s.get(row.id),
            nodes=self._live.job_nodes(),
            priority=row.priority,
            submitted_s=row.created_s,
            phase="paused" if row.wanted == "pause" else "suspended" if row.phase == "suspended" else "wanted",
            preemptible=bool(row.preemptible),
            held=bool(row.held),
            deadline_s=row.deadline_s,
            owner=row.owner,
            lacks=self._live.job_lacks(row),
        )

    def _deployment(self, row: DeploymentRow, version: str) -> DeploymentView:
        return DeploymentView(
            model=row.model,
            version=version,
            tensor_parallel=row.tensor_parallel,
            min_replicas=row.min_replicas,
            max_replicas=max(row.min_replicas, self._size.max_replicas)
            if row.max_replicas is None
            else row.max_replicas,
            demand=self._live.demand(row.model),
            ttft_target_s=row.ttft_p95_s,
            tpot_target_s=None if row.tpot_p95_ms is None else row.tpot_p95_ms / 1000,
            idle_sleep_s=row.idle_sleep_s,
            pinned=bool(row.pinned),
        )
