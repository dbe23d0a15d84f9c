"""The controller's Prometheus series, read from the store, the scheduler and the engines at each scrape.

Nothing is counted here: the store keeps the counters, so they survive restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import httpx
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.http.views import job_phase
from appliance.controller.interfaces.records import TRAINING_FAILED, SchedulerStatus
from appliance.paths import SHM_MOUNT
from appliance.store.objects import job_records, jobs, models
from appliance.store.rows import JobMetricRow, JobRow
from runtime.devices.kind import THROTTLES, Reading
from runtime.devices.published import peak_flops
from runtime.network.mutual_tls import http_options
from scheduler.core.workload import POLICIES
from scheduler.handover.ports import HandoverState

ENGINE_WAIT_S: Final = 0.5
"""For one engine; the gateway gives the whole scrape two seconds. One that computes for longer is left out of it."""

Samples = Iterable[tuple[Sequence[str], float | None]]
"""Values of labels, and the measured value; None is left out."""


Engines = Mapping[tuple[str, str], Mapping[str, float]]
"""By replica and model: vLLM's own figures, by its names, each summed up over its labels."""


async def read_engines(engines: Mapping[str, tuple[str, str]]) -> Engines:
    """What engines say of themselves, those that answer in time. engines: (model, address) by replica."""
    found = await asyncio.gather(*(_figures(address) for _, address in engines.values()))
    return {(replica, model): figures for (replica, (model, _)), figures in zip(engines.items(), found, strict=True)}


async def _figures(address: str) -> Counter[str]:
    base_url, options = http_options(address)
    figures = Counter[str]()
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with (
            asyncio.timeout(ENGINE_WAIT_S),
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(**options), base_url=base_url) as client,
        ):
            answer = await client.get("/metrics")
        for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", answer.text, re.MULTILINE):
            figures[name] += float(value)
    return figures


_ENGINE_METERS: tuple[tuple[str, str, str], ...] = (
    ("engine_kv_cache_ratio", "Share of an engine's KV cache in use.", "vllm:kv_cache_usage_perc"),
    ("engine_preemptions", "Requests that lost their place in the KV cache to others.", "vllm:num_preemptions_total"),
    ("engine_prefix_tokens", "Tokens of prompts looked for in the prefix cache.", "vllm:prefix_cache_queries_total"),
    ("engine_prefix_hit_tokens", "Those that were there.", "vllm:prefix_cache_hits_total"),
)
_REQUESTS = (("running", "vllm:num_requests_running"), ("waiting", "vllm:num_requests_waiting"))
_DEVICE_METERS: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("temperature_celsius", "Temperature of a device.", lambda one: one.temperature_c),
    ("slowdown_celsius", "Temperature at which its driver slows a device down.", lambda one: one.slowdown_c),
    ("power_watts", "Power that a device draws.", lambda one: one.power_w),
    ("power_limit_watts", "Power limit of a device.", lambda one: one.power_limit_w),
    ("utilization_ratio", "Share of the last moments in which a device computed.", lambda one: one.busy),
    ("memory_used_bytes", "Memory of a device in use, by whomever.", lambda one: one.memory_used_bytes),
    ("clock_hertz", "Clock of a device's processors.", lambda one: one.clock_hz),
)
_JOB_METERS: tuple[tuple[str, str, Callable[[JobRow], float | None]], ...] = (
    ("loss", "Training loss at the last step of a running job.", lambda row: row.loss),
    ("tokens_per_second", "Tokens that a running job trains on.", lambda row: row.tokens_per_s),
    ("step", "Last optimizer step of a running job.", lambda row: row.step),
    ("steps", "Optimizer steps that a running job will make.", lambda row: row.total_steps),
    ("devices", "Devices that a running job holds.", lambda row: len(row.devices)),
    ("energy_joules", "Energy that devices have counted for a running job so far.", lambda row: row.joules),
)
_STEP_METERS: tuple[tuple[str, str, Callable[[JobMetricRow], float | None]], ...] = (
    ("gradient_norm", "Norm of the gradient, before it is clipped, at the last step.", lambda step: step.grad_norm),
    ("learning_rate", "Learning rate of the last step of a running job.", lambda step: step.learning_rate),
)
_TIER_METERS = (
    ("tier_bytes", "bytes", "Bytes of versions and snapshots in a tier."),
    ("tier_limit_bytes", "limit_bytes", "Size limit of a tier."),
    ("tier_backlog_bytes", "backlog_bytes", "Bytes still to be copied into a tier."),
    ("tier_damaged", "damaged", "Damaged copies found in a tier."),
)


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


class ControllerCollector(Collector):
    """All series, with the process's memory, CPU time and descriptors. Made on the loop, whose state it takes, for one
    scrape that reads the store on a thread."""

    def __init__(self, context: ControllerContext, now: SchedulerStatus, engines: Engines):
        self._db, self._data, self._now, self._engines = context.db, context.files_dir, now, engines
        self._tiers, self._last_backup = context.tiers.status(), context.last_backup()
        self._readings = context.health.newest()
        troubles = [*context.background.degraded(), *context.main_troubles()]
        # A tracker's or a tier's name behind the colon is for operators.
        self._degraded = {trouble["name"].partition(":")[0] for trouble in troubles}

    def collect(self) -> Iterator[Metric]:
        yield from ProcessCollector(namespace="appliance_controller", registry=None).collect()
        yield from self._scheduler()
        yield from self._of_engines()
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
        for state in get_args(HandoverState):
            # A series that begins with its first failure has had no increase for Prometheus.
            ended.add_metric([state], *now["handovers_ended"].get(state, (0, 0.0)))
        yield ended
        running = self._db.value("SELECT count(*) FROM handovers WHERE ended_s IS NULL")
        yield _gauge("handovers_running", "Hand-overs in progress.", "", [((), running)])
        yield _gauge("scheduler_plan_seconds", "How long the last plan took.", "", [((), now["plan_s"])])
        counted = _counts((one["model"], one["version"], one["state"]) for one in replicas)
        yield _gauge("replicas", "Replicas by model, version and state.", "model version state", counted)
        resident = [((one["id"], one["model"]), one["rss_bytes"]) for one in replicas]
        yield _gauge("replica_resident_bytes", "Resident memory of a replica's processes.", "replica model", resident)
        text = "1 while a part of the box fails and is tried again; the part is no longer told once it is well."
        yield _gauge("degraded", text, "part", [([part], 1.0) for part in sorted(self._degraded)])

    def _of_engines(self) -> Iterator[Metric]:
        for name, text, figure in _ENGINE_METERS:
            samples = [(engine, figures.get(figure)) for engine, figures in self._engines.items()]
            yield (_counter if figure.endswith("_total") else _gauge)(name, text, "replica model", samples)
        queue = [
            ((*engine, state), figures.get(figure))
            for engine, figures in self._engines.items()
            for state, figure in _REQUESTS
        ]
        text = "Requests that an engine computes, and those in its queue."
        yield _gauge("engine_requests", text, "replica model state", queue)

    def _devices(self) -> Iterator[Metric]:
        devices = cordons.in_view(self._db, self._now["devices"])
        held = _counts((one["holder"]["kind"] if one["holder"] else "none", one["health"]) for one in devices)
        yield _gauge("devices", "Devices by who holds them (job, replica, none) and health.", "holder health", held)
        labels = [(one["id"], one["kind"]) for one in devices]
        healthy = zip(labels, (float(one["health"] == "ok") for one in devices), strict=True)
        yield _gauge("device_healthy", "1 while a device may get new work.", "device kind", healthy)
        memory = zip(labels, (one["memory_bytes"] for one in devices), strict=True)
        yield _gauge("device_memory_bytes", "Memory of a device.", "device kind", memory)
        readings = self._readings.items()
        for name, text, read in _DEVICE_METERS:
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
        yield _gauge("jobs", "Unfinished jobs by phase.", "phase", _counts([job_phase(row)] for row in rows))
        running = [row for row in rows if row.phase == "running"]
        text = "Unfinished jobs that hold no devices."
        yield _gauge("job_queue_length", text, "", [((), len(rows) - len(running))])
        failed = sorted({TRAINING_FAILED: 0, **jobs.failed_by_code(db)}.items())
        yield _gauge("jobs_failed", "Failed jobs that are kept, by error.", "code", [([c], n) for c, n in failed])

        def of_jobs(name: str, text: str, read: Callable[[JobRow], float | None]) -> Metric:
            return _gauge(f"job_{name}", text, "job model", [((row.id, row.model), read(row)) for row in running])

        for meter in _JOB_METERS:
            yield of_jobs(*meter)
        newest = [(row, step) for row in running for step in job_records.last_metrics(db, row.id, 1)]
        for name, text, of_step in _STEP_METERS:
            found = [((row.id, row.model), of_step(step)) for row, step in newest]
            yield _gauge(f"job_{name}", text, "job model", found)
        text = "Share of the time of its newest profiled steps in which a running job's first rank communicated."
        yield of_jobs("communication_ratio", text, lambda row: job_records.last_communication(db, row.id))
        text = "Share of its devices' bfloat16 rate, as their maker says it, that a running job's model uses."
        yield of_jobs("mfu_ratio", text, self._mfu)
        ranks = [
            ((row.id, row.model, str(rank), device), seconds)
            for row, step in newest
            # Another number of ranks: it has got other devices since that step.
            if step.rank_seconds is not None and len(step.rank_seconds) == len(row.devices)
            for rank, (seconds, device) in enumerate(zip(step.rank_seconds, row.devices, strict=True))
        ]
        text = "What a rank of a running job computed by itself in the last step: its forward passes."
        yield _gauge("job_rank_seconds", text, "job model rank device", ranks)

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
        for name, key, text in _TIER_METERS:
            yield _gauge(name, text, "tier", [([tier["name"]], tier[key]) for tier in tiers])
        disks = [([mount], shutil.disk_usage(folder)) for mount, folder in (("data", self._data), ("shm", SHM_MOUNT))]
        yield _gauge("disk_bytes", "Size of a file system of the box.", "mount", [(of, d.total) for of, d in disks])
        yield _gauge("disk_free_bytes", "Free bytes of it.", "mount", [(of, d.free) for of, d in disks])
