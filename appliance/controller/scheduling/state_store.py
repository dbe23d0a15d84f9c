"""The scheduler's view of the store: reads jobs, deployments, the mode and, from the gateways' reports, the demand;
writes phases and reasons."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import mode_in_force, mode_windows, policy_of, read_mode
from appliance.controller.engines.routing_table import BusRouting, Traffic
from appliance.controller.jobs.events import TRAINING_FAILED, JobEvents, add_message, fail, pause_reason
from appliance.controller.models import capacity
from appliance.gateway.core.table import BUCKETS_PER_DOUBLING, OPEN
from appliance.memory.box_memory import BoxMemory
from appliance.store import jobs, models, usage
from appliance.store.database import Database
from appliance.store.models import callable_adapters
from appliance.store.rows import AUDIT, DEPLOYMENTS, JOBS, MODEL_SETTINGS, AuditRow, DeploymentRow, JobRow
from scheduler.core.config import SchedulerConfig
from scheduler.core.failures import Failure
from scheduler.core.workload import Build, Demand, DeploymentView, JobView, Workload
from scheduler.handover.effects import Outcome
from scheduler.plan import autoscaler
from scheduler.plan.autoscaler import Bounds, StandbyLearner
from weights.format.names import policy_name
from weights.memory.store import WeightStore

_DIGITS = re.compile(r"[0-9]+")

CHECKPOINT_IDLE_S = 300.0
"""Idle limit of undeployed models: checkpoints called by name, and hosts of adapters."""
POLICY_IDLE_S = 1.0
"""Idle limit of models in training, whose jobs may wait for the devices."""
LEARN_EVERY_S = 0.25
"""Least time between two steps of learning: reports come more often."""
MOST_REPLICAS = 64
"""Largest standby that is learned: all numbers up to it are simulated, so its cost grows with its square."""


def job_host_bytes(row: JobRow) -> dict[int, int]:
    """Return the host memory that a job takes at its start, for each allowed number of devices, ascending."""
    by_size = (row.estimate or {}).get("memory", {}).get("host_bytes", {})
    return {size: by_size.get(str(size), 0) for size in row.allowed_sizes or (1,)}


@dataclass(eq=False)
class SqliteStateStore:
    """Implements `scheduler.handover.effects.StateStore`. Every call is a few short statements on the database.

    serving_floor: number of devices that serving keeps in every mode. max_replicas: limit for deployments without one.
    starved: whether a job's ranks wait for samples (Rollouts.starved).
    """

    db: Database
    events: JobEvents
    serving_floor: int
    max_replicas: int
    routing: BusRouting
    queued_demand: QueuedDemand
    learning: DemandLearning
    memory: BoxMemory
    store: WeightStore
    starved: Callable[[JobRow], bool]
    _settings: dict[str, str] = field(default_factory=dict)
    _demand: Callable[[str], Demand] = lambda model: Demand()  # until the first round
    _remaining_device_s: dict[str, float] = field(default_factory=dict)  # {job: value last reported}

    def after_restart(self, adopted: Collection[str] = ()) -> None:
        """Requeue jobs that a crash left "running", except those whose ranks still run (`adopted`)."""
        usage.close_left_open(self.db, set(adopted))
        for row in JOBS.list_all(self.db, "phase = 'running'"):
            if row.id not in adopted:
                self.job_waiting(row.id, "the box was restarted")

    def load(self, *, free_devices: int) -> Workload:
        planned = list[JobRow]()
        for row in jobs.list_unfinished(self.db):
            if row.wanted != "cancel":
                planned += [row] if row.phase != "validating" else []
            elif row.phase != "running":  # a running job stops first, because the workload leaves it out
                self.events.cancelled(row.id)
        mode = read_mode(self.db)
        self._settings = {model: row.digest for model, row in models.settings_in_force(self.db).items()}
        self._demand = self.queued_demand.demands(free_devices)
        return Workload(
            policy=policy_of(mode, self.serving_floor),
            policy_since_s=mode.since_s,
            windows=mode_windows(self.db, self.serving_floor),
            jobs=tuple(map(self._job, planned)),
            deployments=self.learning.learned(self._deployments()),
            cordoned=frozenset(cordons.read(self.db)),
            max_asleep=self.memory.max_asleep(),
        )

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        row = jobs.find_unfinished(self.db, job_id)
        if row is None:
            return
        usage.devices_held(self.db, job_id, len(devices), time.time())
        if row.phase != "running" or row.devices != list(devices):
            self.events.started(job_id, list(devices))

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None:
        row = jobs.find_unfinished(self.db, job_id)
        if row is None:
            return
        devices_text = f"{len(devices)} device{'s' * (len(devices) > 1)} ({', '.join(devices)})"
        after = f" once the engines on {answering} of them have finished their requests" if answering else ""
        reason = f"The job gets {devices_text}: its ranks start{after}."
        self._add_event(row, reason, reason)
        jobs.update(self.db, job_id, reason=reason)

    def job_waiting(self, job_id: str, reason: str) -> None:
        usage.devices_held(self.db, job_id, 0, time.time())
        row = jobs.find_unfinished(self.db, job_id)
        if row is None:
            return
        reason = pause_reason(self.db, row) or reason
        if row.wanted == "run":
            self._add_event(row, reason, f"The job waits: {reason}")
        if row.snapshot is None:
            jobs.set_phase(self.db, job_id, "queued", reason=reason)
        elif row.phase == "running":
            self.events.suspended(job_id, row.snapshot["step"], reason)
        else:
            jobs.set_phase(self.db, job_id, "suspended", reason=reason)

    def _add_event(self, row: JobRow, reason: str, text: str) -> None:
        """Add an event to a job that has not begun if its reason changed in more than numbers: OpenAI's clients see
        the reason nowhere else, and a suspended job has an event of its own."""
        if row.phase == "queued" and _DIGITS.sub("", reason) != _DIGITS.sub("", row.reason or ""):
            add_message(self.db, row.id, text)

    def job_ended(self, job_id: str, outcome: Outcome, error: str) -> None:
        self._remaining_device_s.pop(job_id, None)
        usage.devices_held(self.db, job_id, 0, time.time())
        if jobs.find_unfinished(self.db, job_id) is None:
            return
        match outcome:
            case "succeeded":
                self.events.succeeded(job_id)
                self.routing.models_changed()  # its model must be callable as soon as the job is reported as done
            case "failed":
                fail(self.db, job_id, TRAINING_FAILED, error)
            case "cancelled":
                self.events.cancelled(job_id)

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        """Hold a model's trouble in memory only: failures before a restart predict nothing about tries after it."""
        self.routing.trouble(model, trouble)

    def model_served(self, model: str, build: Build) -> None:
        DEPLOYMENTS.update(self.db, model, served=asdict(build))

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        with self.db.transaction():
            rows = MODEL_SETTINGS.list_all(self.db, "model = ?", model)
            if (rows[0].digest if rows else "") != failed.settings:
                return True
            before = next((row for row in rows if row.digest == served.settings), None)
            if before is None and served.settings:
                return False
            number, settings = (before.number, before.settings) if before is not None else (0, {})
            note = f"no engine starts with settings {rows[0].number}, so those before, {number}, serve again: {reason}"
            models.add_settings(self.db, model, settings, served.settings, "box", time.time(), note)
            detail = {"failed": rows[0].number, "back_to": number, "reason": reason}
            AUDIT.insert(self.db, AuditRow("model.settings", model, detail=detail))
        self.routing.models_changed()  # the gateways' table holds the model's context length
        return True

    def _deployments(self) -> tuple[DeploymentView, ...]:
        """Return all names that need their own engines. The demand for an adapter counts for its host."""
        # From an index alone: whole rows of 2,400 models take 50 ms.
        active = dict(self.db.execute("SELECT id, active_version FROM models WHERE active_version IS NOT NULL"))
        adapters = {row.name: row for row in callable_adapters(self.db)} | self.routing.policy_adapters()
        deployed = [row for row in DEPLOYMENTS.list_all(self.db) if row.model in active]
        views = {row.model: self._deployment(row, active[row.model]) for row in deployed if row.model not in adapters}
        for adapter in adapters.values():
            if adapter.host not in views:  # its base serves another version or is not deployed
                like = views.get(adapter.base)
                views[adapter.host] = self._on_demand(adapter.host, adapter.base, adapter.base_version, like)
        for row in deployed:
            if row.model in adapters and (row.pinned or row.min_replicas):
                host = views[adapters[row.model].host]
                least = min(max(host.min_replicas, row.min_replicas), host.max_replicas)
                views[host.model] = replace(host, pinned=host.pinned or bool(row.pinned), min_replicas=least)
        for canary in models.running_canaries(self.db):
            # An adapter's canary needs none: the engines of its host serve both versions.
            if canary.model in views and canary.name not in adapters:
                like = views[canary.model]
                # No request waits for its engine, so demand alone would not start one.
                own = {"min_replicas": 1, "max_replicas": max(1, like.max_replicas), "idle_limit_s": None}
                views[canary.name] = self._on_demand(canary.name, canary.model, canary.version, like, **own)
        for name, model, version in models.checkpoint_names(self.db):
            if name not in adapters:
                views[name] = self._on_demand(name, model, version)
        for name, policy in self.routing.policies.items():
            if policy.version:  # its engine stops as soon as the samples are there
                views[name] = self._on_demand(name, policy.base, policy.version, idle_limit_s=POLICY_IDLE_S)
        return tuple(views.values())

    def _on_demand(
        self, name: str, model: str, version: str, like: DeploymentView | None = None, **changes: Any
    ) -> DeploymentView:
        """A version of `model` that is not deployed under this name and has an engine only while in use. like: the
        deployment whose engine settings it gets; None: the settings of `model`."""
        view = like or DeploymentView(name, version, settings=self._settings.get(model, ""))
        own: dict[str, Any] = {"min_replicas": 0, "pinned": False, "served": None, "idle_sleep_s": None}
        own |= {"idle_limit_s": CHECKPOINT_IDLE_S, "demand": self._demand(name)}
        return replace(view, model=name, version=version, **own | changes)

    def _job(self, row: JobRow) -> JobView:
        # A job too large for the box now keeps its sizes and waits, because devices may return.
        sizes, with_memory = tuple(row.allowed_sizes or (1,)), self.memory.job_sizes(row)
        sizes = tuple(size for size in sizes if size in with_memory) or sizes
        lacks = self.memory.waits_for(row)
        if not lacks and row.phase == "queued" and row.snapshot is None:
            needed = (row.estimate or {}).get("memory", {}).get("store_bytes", 0)
            lacks = capacity.store_full(needed, room) if needed > (room := self.store.room_bytes()) else ""
        if row.eta_s is not None and row.devices:
            self._remaining_device_s[row.id] = row.eta_s * len(row.devices)
        return JobView(
            id=row.id,
            sizes=sizes,
            remaining_device_s=self._remaining_device_s.get(row.id),
            nodes=self.memory.job_nodes(row),
            priority=row.priority,
            submitted_s=row.created_s,
            phase="paused" if row.wanted == "pause" else "suspended" if row.phase == "suspended" else "wanted",
            preemptible=bool(row.preemptible),
            deadline_s=row.deadline_s,
            owner=row.owner,
            sampled_by=self.routing.host(policy) if (policy := policy_name(row.id)) in self.routing.policies else "",
            starved=self.starved(row),
            lacks=lacks,
        )

    def _deployment(self, row: DeploymentRow, version: str) -> DeploymentView:
        most = max(row.min_replicas, self.max_replicas) if row.max_replicas is None else row.max_replicas
        return DeploymentView(
            model=row.model,
            version=version,
            tensor_parallel=row.tensor_parallel,
            min_replicas=row.min_replicas,
            max_replicas=most,
            demand=self._demand(row.model),
            ttft_target_s=row.ttft_p95_s,
            tpot_target_s=None if row.tpot_p95_ms is None else row.tpot_p95_ms / 1000,
            idle_sleep_s=row.idle_sleep_s,
            pinned=bool(row.pinned),
            settings=self._settings.get(row.model, ""),
            served=Build(**row.served),
        )


class QueuedDemand:
    """Decides which models may be woken for work without a client; an awake engine works on it in every mode.

    A model is woken only while no other model has requests or a device is free, never in mode train, and in mode auto
    only while no job wants devices. Engines that write or judge the samples of a training job are woken in every mode,
    and stay awake while the job runs. Where there is no device for both, the job gives way (scheduler.plan.plan).
    """

    def __init__(self, db: Database, bus: Bus, routing: BusRouting, asking: Asking):
        self._db, self._bus, self._routing, self._asking = db, bus, routing, asking

    def demands(self, free_devices: int) -> Callable[[str], Demand]:
        """Return each model's demand for one round of the scheduler: the gateways' reports, and this work. The work is
        one more request to a sleeping model; an awake model counts as just used, so it does not idle to sleep but
        claims nothing. free_devices: number of devices without a holder."""
        routing, queued = self._routing, dict[str, str]()
        for name in self._asking.models:
            queued.setdefault(routing.host(name), name)
        running = [policy_name(row.id) for row in JOBS.list_all(self._db, "phase = 'running'")]
        policies = [name for name in routing.policies if name in running or name in self._asking.models]
        sampled = {routing.host(name) for name in [*policies, *jobs.teachers_of_running(self._db)]}
        requested = {name for name, row in self._bus.load().models.items() if row.inflight or row.held}

        @cache
        def training_comes_first() -> bool:
            kind = mode_in_force(self._db, 0, time.time()).policy.kind
            wants_devices = "phase IN ('queued', 'running', 'suspended') AND wanted = 'run'"
            return kind == "train" or (kind == "auto" and JOBS.first(self._db, wants_devices) is not None)

        def demand(host: str) -> Demand:
            reported, name = routing.demand(host), queued.get(host)
            if (name is None and host not in sampled) or reported.requests:
                return reported
            row = self._bus.table["models"].get(name or host, {})
            awake = any(replica["state"] == OPEN for replica in row.get("replicas", ()))
            in_the_way = bool(requested - {host, name or host}) and not free_devices
            for_samples = host in sampled and (awake or name is not None)
            if not for_samples and (name is None or training_comes_first() or in_the_way):
                return reported
            return replace(reported, last_request_s=time.time()) if awake else replace(reported, held=reported.held + 1)

        return demand


class DemandLearning:
    """Adds to deployments the measured prefill rate, and the standby learned from each model's traffic; neither while
    the rate is unknown or there is no target for the first token. A learner restarts when its bounds change.

    Args:
        arrivals: returns {name: requests since the last call by bucket of prompt tokens}. devices: number that serving
        may have.
    """

    def __init__(
        self,
        traffic: Callable[[str], Traffic],
        arrivals: Callable[[], Mapping[str, Counter[int]]],
        config: SchedulerConfig,
        devices: int,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._traffic, self._arrivals, self._config = traffic, arrivals, config
        self._devices, self._now_s = devices, now_s
        self._learners: dict[str, StandbyLearner] = {}
        self._learned_s = now_s()

    def learned(self, deployments: tuple[DeploymentView, ...]) -> tuple[DeploymentView, ...]:
        """Return the deployments with their learned values, for the planner."""
        now_s, arrived = self._now_s(), None
        if now_s - self._learned_s >= LEARN_EVERY_S:
            self._learned_s, arrived = now_s, self._arrivals()
            names = {d.model for d in deployments}
            self._learners = {name: known for name, known in self._learners.items() if name in names}
        return tuple(self._with_standby(d, now_s, arrived) for d in deployments)

    def _with_standby(
        self, deployment: DeploymentView, now_s: float, arrived: Mapping[str, Counter[int]] | None
    ) -> DeploymentView:
        """Return the deployment with its standby. arrived: new requests; None: learn nothing."""
        traffic = self._traffic(deployment.model)
        rate, target_s = traffic.prefill_tokens_per_s, deployment.ttft_target_s
        deployment = replace(deployment, kv_tokens=traffic.kv_tokens)
        if not rate or not target_s or not deployment.max_replicas:
            self._learners.pop(deployment.model, None)
            return deployment
        deployment = replace(deployment, prefill_tokens_per_s=rate)
        replicas = self._devices // deployment.tensor_parallel  # with tensor parallelism a replica has several devices
        bounds = Bounds(replicas, deployment.floor_replicas, min(deployment.max_replicas, MOST_REPLICAS), target_s)
        learner = self._learners.get(deployment.model)
        if learner is None or learner.bounds != bounds:
            learner = self._learners[deployment.model] = StandbyLearner(self._config, bounds)
        if arrived is not None:
            works_s = [
                2 ** ((bucket - 0.5) / BUCKETS_PER_DOUBLING) / rate
                for name in traffic.names
                for bucket in arrived.get(name, Counter()).elements()
            ]
            learner.seen(now_s, works_s, autoscaler.load(deployment, self._config))
        return replace(deployment, standby=learner.best)
