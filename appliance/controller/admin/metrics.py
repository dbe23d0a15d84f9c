"""The controller's Prometheus series, read from the store and the scheduler at each scrape.

Nothing is counted here: the store keeps the counters, so they survive restarts.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from appliance.controller.admin import engine_meters
from appliance.controller.admin.engine_meters import EngineReading
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import lost_nodes
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.http.views import job_phase
from appliance.controller.interfaces.records import TRAINING_FAILED, SchedulerStatus
from appliance.paths import SHM_MOUNT
from appliance.store.objects import job_records, jobs, models, responses
from appliance.store.records import handovers
from appliance.store.rows import JobRow
from runtime.devices.kind import THROTTLES, Reading
from runtime.devices.published import peak_flops
from scheduler.core.workload import POLICIES
from scheduler.handover.journal import HandoverState


def registry_of(collector: ControllerCollector) -> CollectorRegistry:
    """A registry of one scrape, with the process's memory, CPU time and descriptors."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(namespace="appliance_controller", registry=registry)
    return registry


Samples = Iterable[tuple[Sequence[str], float | None]]
"""Values of labels, and the measured value; None is left out."""


def _gauge(name: str, text: str, labels: str, samples: Samples) -> Metric:
    """labels: separated by spaces."""
    return _filled(GaugeMetricFamily(f"appliance_{name}", text, labels=labels.split()), samples)


def _counter(name: str, text: str, labels: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"appliance_{name}", text, labels=labels.split()), samples)


def _filled(family: Any, samples: Samples) -> Metric:
    for labels, value in samples:
        if value is not None:
            family.add_metric(list(labels), float(value))
    made: Metric = family
    return made


def _counts(found: Iterable[Sequence[str]]) -> Samples:
    return sorted(Counter(tuple(one) for one in found).items())


class ControllerCollector:
    """Implements `prometheus_client.registry.Collector`. Made on the loop, whose state it takes, for one scrape that
    reads the store on a thread. engines: what they say of themselves."""

    def __init__(self, context: ControllerContext, now: SchedulerStatus, engines: list[EngineReading]):
        self._db, self._data, self._now, self._engines = context.db, context.files_dir, now, engines
        self._tiers, self._last_backup = context.tiers.status(), context.last_backup()
        self._readings = context.health.newest()
        troubles = [*context.background.degraded(), *context.main_troubles()]
        # A tracker's or a tier's name behind the colon is for operators.
        self._degraded = {trouble["name"].partition(":")[0] for trouble in troubles}

    def describe(self) -> list[Metric]:
        # Without this the registry would collect at registration too.
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._scheduler()
        yield from engine_meters.families(self._engines)
        yield from self._devices()
        yield from self._training()
        yield from self._stored()
        if (last := self._last_backup) is not None:
            text = "Unix time of the newest backup that was taken."
            yield _gauge("backup_last_success_timestamp_seconds", text, "", [((), last.made_s)])

    def _scheduler(self) -> Iterator[Metric]:
        now, replicas = self._now, self._now["replicas"]
        holds = mode_in_force(self._db, now["serving_floor"], time.time()).policy.kind
        yield _gauge("mode", "1 for the mode in force.", "policy", [([one], float(one == holds)) for one in POLICIES])
        ended = SummaryMetricFamily("appliance_handover_seconds", "Ended hand-overs, by outcome.", labels=["outcome"])
        totals = {total.state: total for total in handovers.totals(self._db)}
        for state in get_args(HandoverState):
            # A series that begins with its first failure has had no increase for Prometheus.
            if state != "running":
                total = totals.get(state)
                ended.add_metric([state], total.count if total else 0, total.seconds if total else 0.0)
        yield ended
        yield _gauge("handovers_running", "Hand-overs in progress.", "", [((), len(handovers.list_open(self._db)))])
        yield _gauge("scheduler_plan_seconds", "How long the last plan took.", "", [((), now["plan_s"])])
        counted = _counts((one["model"], one["version"], one["state"]) for one in replicas)
        yield _gauge("replicas", "Replicas by model, version and state.", "model version state", counted)
        resident = [((one["id"], one["model"]), one["rss_bytes"]) for one in replicas]
        yield _gauge("replica_resident_bytes", "Resident memory of a replica's processes.", "replica model", resident)
        text = "1 while a part of the box fails and is tried again; the part is no longer told once it is well."
        yield _gauge("degraded", text, "part", [([part], 1.0) for part in sorted(self._degraded)])

    def _devices(self) -> Iterator[Metric]:
        devices = lost_nodes.in_view(self._db, self._now["devices"])
        held = _counts((one["holder"]["kind"] if one["holder"] else "none", one["health"]) for one in devices)
        yield _gauge("devices", "Devices by who holds them (job, replica, none) and health.", "holder health", held)
        for name, text, value in (
            ("device_healthy", "1 while a device may get new work.", lambda one: one["health"] == "ok"),
            ("device_memory_bytes", "Memory of a device.", lambda one: one["memory_bytes"]),
        ):
            yield _gauge(name, text, "device kind", [((one["id"], one["kind"]), value(one)) for one in devices])
        readings = self._readings.items()
        for name, text, read in _METERS:
            yield _gauge(f"device_{name}", text, "device", [([device], read(one)) for device, one in readings])
        drawn = [([device], one.energy_j) for device, one in readings]
        yield _counter("device_energy_joules", "Energy that a device has drawn.", "device", drawn)
        errors = [([device], one.ecc_uncorrected) for device, one in readings]
        text = "Uncorrected memory errors since the driver's start."
        yield _counter("device_ecc_uncorrected", text, "device", errors)
        throttled = [
            ((device, reason), float(reason in one.throttled))
            for device, one in readings
            if one.power_w is not None
            for reason in THROTTLES
        ]
        yield _gauge("device_throttled", "1 while a device is slower for this reason.", "device reason", throttled)
        told = [((device, str(code)), count) for device, one in readings for code, count in one.driver_errors]
        text = "Errors that a device's driver has told, by their number."
        yield _counter("device_driver_errors", text, "device code", told)

    def _training(self) -> Iterator[Metric]:
        db, rows = self._db, jobs.list_unfinished(self._db)
        phases = _counts([job_phase(row)] for row in rows)
        yield _gauge("jobs", "Unfinished jobs by phase.", "phase", phases)
        waiting = sum(row.phase != "running" for row in rows)
        yield _gauge("job_queue_length", "Unfinished jobs that hold no devices.", "", [((), waiting)])
        failed = sorted({TRAINING_FAILED: 0, **jobs.failed_by_code(db)}.items())
        yield _gauge("jobs_failed", "Failed jobs that are kept, by error.", "code", [([c], n) for c, n in failed])
        running = [row for row in rows if row.phase == "running"]
        newest = {row.id: next(iter(job_records.last_metrics(db, row.id, 1)), None) for row in running}

        def of_step(column: str) -> Callable[[JobRow], float | None]:
            return lambda row: getattr(newest[row.id], column, None)

        meters: tuple[tuple[str, str, Callable[[JobRow], float | None]], ...] = (
            ("loss", "Training loss at the last step of a running job.", lambda row: row.loss),
            ("tokens_per_second", "Tokens that a running job trains on.", lambda row: row.tokens_per_s),
            ("step", "Last optimizer step of a running job.", lambda row: row.step),
            ("steps", "Optimizer steps that a running job will make.", lambda row: row.total_steps),
            ("devices", "Devices that a running job holds.", lambda row: len(row.devices)),
            (
                "gradient_norm",
                "Norm of the gradient, before it is clipped, at the last step of a running job.",
                of_step("grad_norm"),
            ),
            ("learning_rate", "Learning rate of the last step of a running job.", of_step("learning_rate")),
            (
                "communication_ratio",
                "Share of the time of its newest profiled steps in which a running job's first rank communicated.",
                lambda row: job_records.last_communication(db, row.id),
            ),
            (
                "mfu_ratio",
                "Share of its devices' bfloat16 rate, as their maker says it, that a running job's model uses.",
                self._mfu,
            ),
            ("energy_joules", "Energy that devices have counted for a running job so far.", lambda row: row.joules),
        )
        for name, text, value in meters:
            yield _gauge(f"job_{name}", text, "job model", [((row.id, row.model), value(row)) for row in running])
        yield _gauge(
            "job_rank_seconds",
            "What a rank of a running job computed by itself in the last step: its forward passes.",
            "job model rank device",
            [
                ((row.id, row.model, str(rank), device), seconds)
                for row in running
                # Another number of ranks: it has got other devices since that step.
                if len(spent := of_step("rank_seconds")(row) or ()) == len(row.devices)  # type: ignore[arg-type]
                for rank, (seconds, device) in enumerate(zip(spent, row.devices, strict=True))  # type: ignore[arg-type]
            ],
        )

    def _mfu(self, row: JobRow) -> float | None:
        """The share of the device's peak that the arithmetic of the weights takes: six operations of each weight for
        each token (four with adapters, because what is frozen needs no gradient). None where other arithmetic counts
        too: other methods ask other models, a token meets only some experts, and float32 has other rates."""
        name = next((one["name"] for one in self._now["devices"] if one["id"] in row.devices), "")
        peak, model, chosen = peak_flops(name), models.find(self._db, row.model), row.resolved or {}
        if peak is None or model is None or row.tokens_per_s is None or chosen.get("precision") != "bf16":
            return None
        if row.method != "supervised" or re.search("moe|mixtral", model.arch, re.IGNORECASE):
            return None
        return (6 if chosen.get("full") else 4) * model.params * row.tokens_per_s / (len(row.devices) * peak)

    def _stored(self) -> Iterator[Metric]:
        memory = self._now["memory"]
        shared = [([what], memory.get(f"{what}_bytes")) for what in ("used", "budget", "room")]
        yield _gauge("weight_store_bytes", "Shared memory of the weight store.", "what", shared)
        tiers = self._tiers()
        for name, key, text in (
            ("tier_bytes", "bytes", "Bytes of versions and snapshots in a tier."),
            ("tier_limit_bytes", "limit_bytes", "Size limit of a tier."),
            ("tier_backlog_bytes", "backlog_bytes", "Bytes still to be copied into a tier."),
            ("tier_damaged", "damaged", "Damaged copies found in a tier."),
        ):
            yield _gauge(name, text, "tier", [([tier["name"]], tier[key]) for tier in tiers])
        number, size = responses.totals(self._db)
        yield _gauge("stored_responses", "Stored responses and chat completions.", "", [((), number)])
        yield _gauge("stored_response_bytes", "Bytes of stored responses and chat completions.", "", [((), size)])
        disks = [([mount], shutil.disk_usage(folder)) for mount, folder in (("data", self._data), ("shm", SHM_MOUNT))]
        yield _gauge("disk_bytes", "Size of a file system of the box.", "mount", [(of, d.total) for of, d in disks])
        yield _gauge("disk_free_bytes", "Free bytes of it.", "mount", [(of, d.free) for of, d in disks])


_METERS: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("temperature_celsius", "Temperature of a device.", lambda one: one.temperature_c),
    ("slowdown_celsius", "Temperature at which its driver slows a device down.", lambda one: one.slowdown_c),
    ("power_watts", "Power that a device draws.", lambda one: one.power_w),
    ("power_limit_watts", "Power limit of a device.", lambda one: one.power_limit_w),
    ("utilization_ratio", "Share of the last moments in which a device computed.", lambda one: one.busy),
    ("memory_used_bytes", "Memory of a device in use, by whomever.", lambda one: one.memory_used_bytes),
    ("clock_hertz", "Clock of a device's processors.", lambda one: one.clock_hz),
)
