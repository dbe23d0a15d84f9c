"""The controller's Prometheus series, read from the store and the scheduler at each scrape.

Nothing is counted here: the store keeps the counters, so they survive restarts.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

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
from appliance.store.records import energy, handovers
from appliance.store.rows import JobMetricRow, JobRow
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
        now = self._now
        yield from self._scheduler(now)
        yield from engine_meters.families(self._engines)
        yield from self._devices(now)
        yield from self._training()
        yield from self._weights(now)
        yield from self._responses()
        yield from self._disks()
        yield from self._health()
        if (last := self._last_backup) is not None:
            text = "Unix time of the newest backup that was taken."
            yield GaugeMetricFamily("appliance_backup_last_success_timestamp_seconds", text, last.made_s)

    def _scheduler(self, now: SchedulerStatus) -> Iterator[Metric]:
        holds = mode_in_force(self._db, now["serving_floor"], time.time()).policy.kind
        mode = GaugeMetricFamily("appliance_mode", "1 for the mode in force.", labels=["policy"])
        for policy in POLICIES:
            mode.add_metric([policy], float(policy == holds))
        yield mode
        ended = SummaryMetricFamily("appliance_handover_seconds", "Ended hand-overs, by outcome.", labels=["outcome"])
        totals = {total.state: total for total in handovers.totals(self._db)}
        for state in get_args(HandoverState):
            # A series that begins with its first failure has had no increase for Prometheus.
            if state != "running":
                total = totals.get(state)
                ended.add_metric([state], total.count if total else 0, total.seconds if total else 0.0)
        yield ended
        running = float(len(handovers.list_open(self._db)))
        yield GaugeMetricFamily("appliance_handovers_running", "Hand-overs in progress.", running)
        yield GaugeMetricFamily("appliance_scheduler_plan_seconds", "How long the last plan took.", now["plan_s"])
        replicas = GaugeMetricFamily(
            "appliance_replicas", "Replicas by model, version and state.", labels=["model", "version", "state"]
        )
        counted = Counter((r["model"], r["version"], r["state"]) for r in now["replicas"])
        for labels, count in sorted(counted.items()):
            replicas.add_metric(list(labels), count)
        yield replicas
        memory = GaugeMetricFamily(
            "appliance_replica_resident_bytes", "Resident memory of a replica's processes.", labels=["replica", "model"]
        )
        for replica in now["replicas"]:
            memory.add_metric([replica["id"], replica["model"]], replica["rss_bytes"])
        yield memory

    def _devices(self, now: SchedulerStatus) -> Iterator[Metric]:
        shown = lost_nodes.in_view(self._db, now["devices"])
        held = GaugeMetricFamily(
            "appliance_devices",
            "Devices by who holds them (job, replica, none) and health.",
            labels=["holder", "health"],
        )
        counted = Counter((d["holder"]["kind"] if d["holder"] else "none", d["health"]) for d in shown)
        for labels, count in sorted(counted.items()):
            held.add_metric(list(labels), count)
        yield held
        health = GaugeMetricFamily(
            "appliance_device_healthy", "1 while a device may get new work.", labels=["device", "kind"]
        )
        memory = GaugeMetricFamily("appliance_device_memory_bytes", "Memory of a device.", labels=["device", "kind"])
        for device in shown:
            health.add_metric([device["id"], device["kind"]], float(device["health"] == "ok"))
            memory.add_metric([device["id"], device["kind"]], device["memory_bytes"])
        yield health
        yield memory
        yield from _metered(self._readings)

    def _training(self) -> Iterator[Metric]:
        rows = jobs.list_unfinished(self._db)
        phases = GaugeMetricFamily("appliance_jobs", "Unfinished jobs by phase.", labels=["phase"])
        for phase, count in sorted(Counter(job_phase(row) for row in rows).items()):
            phases.add_metric([phase], count)
        yield phases
        waiting = float(sum(row.phase != "running" for row in rows))
        yield GaugeMetricFamily("appliance_job_queue_length", "Unfinished jobs that hold no devices.", waiting)
        failed = GaugeMetricFamily("appliance_jobs_failed", "Failed jobs that are kept, by error.", labels=["code"])
        for code, count in sorted({TRAINING_FAILED: 0, **jobs.failed_by_code(self._db)}.items()):
            failed.add_metric([code], count)
        yield failed
        running = [row for row in rows if row.phase == "running"]
        for name, text, value in (
            ("appliance_job_loss", "Training loss at the last step of a running job.", lambda row: row.loss),
            ("appliance_job_tokens_per_second", "Tokens that a running job trains on.", lambda row: row.tokens_per_s),
            ("appliance_job_step", "Last optimizer step of a running job.", lambda row: row.step),
            ("appliance_job_steps", "Optimizer steps that a running job will make.", lambda row: row.total_steps),
            ("appliance_job_devices", "Devices that a running job holds.", lambda row: len(row.devices)),
        ):
            yield _by_job(name, text, [(row, value(row)) for row in running])
        newest = [(row, next(iter(job_records.last_metrics(self._db, row.id, 1)), None)) for row in running]
        text = "Norm of the gradient, before it is clipped, at the last step of a running job."
        norms = [(row, step.grad_norm if step else None) for row, step in newest]
        yield _by_job("appliance_job_gradient_norm", text, norms)
        rates = [(row, step.learning_rate if step else None) for row, step in newest]
        yield _by_job("appliance_job_learning_rate", "Learning rate of the last step of a running job.", rates)
        yield _by_rank(newest)
        text = "Share of the time of its newest profiled steps in which a running job's first rank communicated."
        spent = [(row, job_records.last_communication(self._db, row.id)) for row in running]
        yield _by_job("appliance_job_communication_ratio", text, spent)
        text = "Share of its devices' bfloat16 rate, as their maker says it, that a running job's model uses."
        yield _by_job("appliance_job_mfu_ratio", text, [(row, self._mfu(row)) for row in running])
        text = "Energy that devices have counted for a running job so far."
        drawn = [(row, energy.of_job(self._db, row.id)) for row in running]
        yield _by_job("appliance_job_energy_joules", text, [(row, one.joules if one else None) for row, one in drawn])

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

    def _responses(self) -> Iterator[Metric]:
        number, size = responses.totals(self._db)
        yield GaugeMetricFamily("appliance_stored_responses", "Stored responses and chat completions.", number)
        yield GaugeMetricFamily(
            "appliance_stored_response_bytes",
            "Bytes of stored responses and chat completions.",
            size,
        )

    def _disks(self) -> Iterator[Metric]:
        size = GaugeMetricFamily("appliance_disk_bytes", "Size of a file system of the box.", labels=["mount"])
        free = GaugeMetricFamily("appliance_disk_free_bytes", "Free bytes of it.", labels=["mount"])
        for mount, folder in (("data", self._data), ("shm", SHM_MOUNT)):
            found = shutil.disk_usage(folder)
            size.add_metric([mount], found.total)
            free.add_metric([mount], found.free)
        yield size
        yield free

    def _health(self) -> Iterator[Metric]:
        text = "1 while a part of the box fails and is tried again; the part is no longer told once it is well."
        degraded = GaugeMetricFamily("appliance_degraded", text, labels=["part"])
        for part in sorted(self._degraded):
            degraded.add_metric([part], 1.0)
        yield degraded

    def _weights(self, now: SchedulerStatus) -> Iterator[Metric]:
        used = GaugeMetricFamily("appliance_weight_store_bytes", "Shared memory of the weight store.", labels=["what"])
        for what in ("used", "budget", "room"):
            value = now["memory"].get(f"{what}_bytes")
            if value is not None:
                used.add_metric([what], value)
        yield used
        tiers = self._tiers()
        for name, key, text in (
            ("appliance_tier_bytes", "bytes", "Bytes of versions and snapshots in a tier."),
            ("appliance_tier_limit_bytes", "limit_bytes", "Size limit of a tier."),
            ("appliance_tier_backlog_bytes", "backlog_bytes", "Bytes still to be copied into a tier."),
            ("appliance_tier_damaged", "damaged", "Damaged copies found in a tier."),
        ):
            family = GaugeMetricFamily(name, text, labels=["tier"])
            for tier in tiers:
                if tier[key] is not None:
                    family.add_metric([tier["name"]], tier[key])
            yield family


_METERS: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("temperature_celsius", "Temperature of a device.", lambda one: one.temperature_c),
    ("slowdown_celsius", "Temperature at which its driver slows a device down.", lambda one: one.slowdown_c),
    ("power_watts", "Power that a device draws.", lambda one: one.power_w),
    ("power_limit_watts", "Power limit of a device.", lambda one: one.power_limit_w),
    ("utilization_ratio", "Share of the last moments in which a device computed.", lambda one: one.busy),
    ("memory_used_bytes", "Memory of a device in use, by whomever.", lambda one: one.memory_used_bytes),
    ("clock_hertz", "Clock of a device's processors.", lambda one: one.clock_hz),
)


def _metered(readings: Mapping[str, Reading]) -> Iterator[Metric]:
    """Meters of devices whose driver has them."""
    for name, text, value in _METERS:
        family = GaugeMetricFamily(f"appliance_device_{name}", text, labels=["device"])
        for device_id, reading in readings.items():
            if (measured := value(reading)) is not None:
                family.add_metric([device_id], measured)
        yield family
    counted = CounterMetricFamily(
        "appliance_device_energy_joules", "Energy that a device has drawn.", labels=["device"]
    )
    errors = CounterMetricFamily(
        "appliance_device_ecc_uncorrected", "Uncorrected memory errors since the driver's start.", labels=["device"]
    )
    throttled = GaugeMetricFamily(
        "appliance_device_throttled", "1 while a device is slower for this reason.", labels=["device", "reason"]
    )
    driver = CounterMetricFamily(
        "appliance_device_driver_errors",
        "Errors that a device's driver has told, by their number.",
        labels=["device", "code"],
    )
    for device_id, reading in readings.items():
        for code, count in reading.driver_errors:
            driver.add_metric([device_id, str(code)], count)
        if reading.energy_j is not None:
            counted.add_metric([device_id], reading.energy_j)
        if reading.ecc_uncorrected is not None:
            errors.add_metric([device_id], reading.ecc_uncorrected)
        if reading.power_w is not None:
            for reason in THROTTLES:
                throttled.add_metric([device_id, reason], float(reason in reading.throttled))
    yield from (counted, errors, throttled, driver)


def _by_rank(newest: list[tuple[JobRow, JobMetricRow | None]]) -> Metric:
    """A metric of running jobs, from their last steps."""
    text = "What a rank of a running job computed by itself in the last step: its forward passes."
    family = GaugeMetricFamily("appliance_job_rank_seconds", text, labels=["job", "model", "rank", "device"])
    for row, step in newest:
        rank_seconds = (step and step.rank_seconds) or []
        if len(rank_seconds) == len(row.devices):  # else it has got other devices since that step
            for rank, (seconds, device) in enumerate(zip(rank_seconds, row.devices, strict=True)):
                family.add_metric([row.id, row.model, str(rank), device], seconds)
    return family


def _by_job(name: str, text: str, rows: list[tuple[JobRow, float | None]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["job", "model"])
    for row, value in rows:
        if value is not None:
            family.add_metric([row.id, row.model], value)
    return family
