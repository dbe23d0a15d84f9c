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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import httpx
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from appliance.controller.context.context import ControllerContext, SchedulerStatus
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.jobs.events import TRAINING_FAILED
from appliance.controller.openai.job_routes import job_phase
from appliance.paths import SHM_MOUNT
from appliance.store import jobs, models
from appliance.store.rows import JobRow
from runtime.devices.kind import THROTTLES
from runtime.devices.kinds import accelerator
from runtime.network import http_options
from scheduler.core.workload import POLICIES
from scheduler.handover.effects import HandoverState

ENGINE_WAIT_S: Final = 0.5
"""For one engine; the gateway gives the whole scrape two seconds. One that computes for longer is left out of it."""
Engines = Mapping[tuple[str, str], Mapping[str, float]]
"""By replica and model: vLLM's own figures, by its names, each summed up over its labels."""

# Each row: the series, its help text, and the name of the figure or of a field of `Reading`, `JobRow` or a tier.
_ENGINE_METERS = (
    ("engine_kv_cache_ratio", "Share of an engine's KV cache in use.", "kv_cache_usage_perc"),
    ("engine_preemptions_total", "Requests that lost their place in the KV cache to others.", "num_preemptions_total"),
    ("engine_prefix_tokens_total", "Prompt tokens looked for in the prefix cache.", "prefix_cache_queries_total"),
    ("engine_prefix_hit_tokens_total", "Those that were there.", "prefix_cache_hits_total"),
)
_DEVICE_METERS = (
    ("device_temperature_celsius", "Temperature of a device.", "temperature_c"),
    ("device_slowdown_celsius", "Temperature at which its driver slows a device down.", "slowdown_c"),
    ("device_power_watts", "Power that a device draws.", "power_w"),
    ("device_utilization_ratio", "Share of the last moments in which a device computed.", "busy"),
    ("device_memory_used_bytes", "Memory of a device in use, by whomever.", "memory_used_bytes"),
    ("device_clock_hertz", "Clock of a device's processors.", "clock_hz"),
    ("device_energy_joules_total", "Energy that a device has drawn.", "energy_j"),
)
_JOB_METERS = (
    ("job_loss", "Training loss at the last step of a running job.", "loss"),
    ("job_tokens_per_second", "Tokens that a running job trains on.", "tokens_per_s"),
    ("job_step", "Last optimizer step of a running job.", "step"),
    ("job_steps", "Optimizer steps that a running job will make.", "total_steps"),
    ("job_energy_joules", "Energy that devices have counted for a running job so far.", "joules"),
)
_STEP_METERS = (
    ("job_gradient_norm", "Norm of the gradient, before it is clipped, at the last step.", "grad_norm"),
    ("job_learning_rate", "Learning rate of the last step of a running job.", "learning_rate"),
)
_TIER_METERS = (
    ("tier_bytes", "Bytes of versions and snapshots in a tier.", "bytes"),
    ("tier_backlog_bytes", "Bytes still to be copied into a tier.", "backlog_bytes"),
    ("tier_damaged", "Damaged copies found in a tier.", "damaged"),
)


def series(name: str, text: str, labels: str, samples: Iterable[tuple[Sequence[str], float | None]]) -> Metric:
    """Make a series. name: without `appliance_`; a counter's name ends in `_total`. labels: names separated by spaces.
    samples: values of the labels, then the measured value; a sample with None is omitted."""
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family: Metric = kind(f"appliance_{name}", text, labels=labels.split())
    for label_values, value in samples:
        if value is not None:
            family.add_metric(list(label_values), float(value))  # type: ignore[attr-defined]
    return family


def _counted(name: str, text: str, labels: str, rows: Iterable[Sequence[str]]) -> Metric:
    return series(name, text, labels, sorted(Counter(map(tuple, rows)).items()))


async def read_engines(engines: Mapping[str, tuple[str, str]]) -> Engines:
    """Read the figures of the engines that answer in time. engines: {replica: (model, address)}."""
    answers = await asyncio.gather(*(_figures(address) for _, address in engines.values()))
    return {(replica, model): figures for (replica, (model, _)), figures in zip(engines.items(), answers, strict=True)}


async def _figures(address: str) -> Counter[str]:
    base_url, options = http_options(address)
    figures = Counter[str]()
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with (
            asyncio.timeout(ENGINE_WAIT_S),
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(**options), base_url=base_url) as client,
        ):
            answer = await client.get("/metrics")
        for name, value in re.findall(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", answer.text, re.MULTILINE):
            figures[name] += float(value)
    return figures


class ControllerCollector(Collector):
    """All series, with the process's memory, CPU time and descriptors. Made on the loop, from which it copies state,
    for one scrape, which reads the store on a thread."""

    def __init__(self, context: ControllerContext, now: SchedulerStatus, engines: Engines):
        self._db, self._data, self._now, self._engines = context.db, context.files_dir, now, engines
        self._tiers, self._last_backup = context.tiers.status, context.last_backup()
        self._readings = context.health.newest()
        troubles = [*context.background.degraded(), *context.main_troubles()]
        # Only operators may see the name of a tracker or tier, which follows the colon.
        self._degraded = {trouble["name"].partition(":")[0] for trouble in troubles}

    def collect(self) -> Iterator[Metric]:
        yield from ProcessCollector(namespace="appliance_controller", registry=None).collect()
        ended = SummaryMetricFamily("appliance_handover_seconds", "Ended hand-overs, by outcome.", labels=["outcome"])
        for state in get_args(HandoverState):
            # Samples of all outcomes from the start: Prometheus sees no increase if a series begins with a failure.
            ended.add_metric([state], *self._now["handovers_ended"].get(state, (0, 0.0)))
        yield ended
        for part in (self._of_scheduler, self._of_engines, self._of_devices, self._of_jobs, self._of_storage):
            yield from part()

    def _of_scheduler(self) -> Iterator[Metric]:
        now, replicas = self._now, self._now["replicas"]
        holds = mode_in_force(self._db, now["serving_floor"], time.time()).policy.kind
        yield series("mode", "1 for the mode in force.", "policy", [([policy], policy == holds) for policy in POLICIES])
        running = self._db.value("SELECT count(*) FROM handovers WHERE ended_s IS NULL")
        yield series("handovers_running", "Hand-overs in progress.", "", [((), running)])
        yield series("scheduler_plan_seconds", "How long the last plan took.", "", [((), now["plan_s"])])
        named = ((replica["model"], replica["version"], replica["state"]) for replica in replicas)
        yield _counted("replicas", "Replicas by model, version and state.", "model version state", named)
        resident = [((replica["id"], replica["model"]), replica["rss_bytes"]) for replica in replicas]
        yield series("replica_resident_bytes", "Resident memory of a replica's processes.", "replica model", resident)
        text = "1 while a part of the box fails and is tried again; the part is no longer told once it is well."
        yield series("degraded", text, "part", [([part], 1) for part in sorted(self._degraded)])

    def _of_engines(self) -> Iterator[Metric]:
        for name, text, figure in _ENGINE_METERS:
            samples = [(engine, figures.get(figure)) for engine, figures in self._engines.items()]
            yield series(name, text, "replica model", samples)
        queue = [
            ((*engine, state), figures.get(f"num_requests_{state}"))
            for engine, figures in self._engines.items()
            for state in ("running", "waiting")
        ]
        text = "Requests that an engine computes, and those in its queue."
        yield series("engine_requests", text, "replica model state", queue)

    def _of_devices(self) -> Iterator[Metric]:
        devices = cordons.in_view(self._db, self._now["devices"])
        held = ((device["holder"]["kind"] if device["holder"] else "none", device["health"]) for device in devices)
        yield _counted("devices", "Devices by who holds them (job, replica, none) and health.", "holder health", held)
        labels = [(device["id"], device["kind"]) for device in devices]
        healthy = zip(labels, (device["health"] == "ok" for device in devices), strict=True)
        yield series("device_healthy", "1 while a device may get new work.", "device kind", healthy)
        readings = self._readings.items()
        for name, text, field in _DEVICE_METERS:
            yield series(name, text, "device", [([device], getattr(reading, field)) for device, reading in readings])
        throttled = [
            ((device, reason), reason in reading.throttled)
            for device, reading in readings
            if reading.power_w is not None
            for reason in THROTTLES
        ]
        yield series("device_throttled", "1 while a device is slower for this reason.", "device reason", throttled)

    def _of_jobs(self) -> Iterator[Metric]:
        db, rows = self._db, jobs.list_unfinished(self._db)
        yield _counted("jobs", "Unfinished jobs by phase.", "phase", ([job_phase(row)] for row in rows))
        running = [row for row in rows if row.phase == "running"]
        waiting = len(rows) - len(running)
        yield series("job_queue_length", "Unfinished jobs that hold no devices.", "", [((), waiting)])
        failed = sorted({TRAINING_FAILED: 0, **jobs.failed_by_code(db)}.items())
        yield series("jobs_failed", "Failed jobs that are kept, by error.", "code", [([c], n) for c, n in failed])
        newest = {row.id: step for row in running for step in jobs.last_metrics(db, row.id, 1)}
        labels = [(row.id, row.model) for row in running]
        for name, text, field in _JOB_METERS:
            yield series(name, text, "job model", zip(labels, (getattr(row, field) for row in running), strict=True))
        for name, text, field in _STEP_METERS:
            steps = (getattr(newest.get(row.id), field, None) for row in running)
            yield series(name, text, "job model", zip(labels, steps, strict=True))
        held = zip(labels, (len(row.devices) for row in running), strict=True)
        yield series("job_devices", "Devices that a running job holds.", "job model", held)
        text = "Share of its devices' bfloat16 rate, as their maker says it, that a running job's model uses."
        yield series("job_mfu_ratio", text, "job model", zip(labels, map(self._mfu, running), strict=True))
        ranks = [
            ((row.id, row.model, str(rank), device), seconds)
            for row in running
            if (step := newest.get(row.id)) is not None and step.rank_seconds is not None
            # Skip steps from before the job moved to another number of ranks.
            if len(step.rank_seconds) == len(row.devices)
            for rank, (seconds, device) in enumerate(zip(step.rank_seconds, row.devices, strict=True))
        ]
        text = "What a rank of a running job computed by itself in the last step: its forward passes."
        yield series("job_rank_seconds", text, "job model rank device", ranks)

    def _mfu(self, row: JobRow) -> float | None:
        """Return model FLOPs utilisation: six operations per weight and token (four with adapters, whose frozen weights
        need no gradient), divided by the device's peak. None for other methods, mixtures of experts and float32."""
        name = next((device["name"] for device in self._now["devices"] if device["id"] in row.devices), "")
        device, model, chosen = accelerator(name), models.find(self._db, row.model), row.resolved or {}
        if device is None or model is None or row.tokens_per_s is None or chosen.get("precision") != "bf16":
            return None
        if row.method != "supervised" or re.search("moe|mixtral", model.arch, re.IGNORECASE):
            return None
        flops = (6 if chosen.get("full") else 4) * model.params * row.tokens_per_s
        return flops / (len(row.devices) * device.peak_flops)

    def _of_storage(self) -> Iterator[Metric]:
        memory, tiers = self._now["memory"], self._tiers()
        shared = [([what], memory.get(f"{what}_bytes")) for what in ("used", "budget", "room")]
        yield series("weight_store_bytes", "Shared memory of the weight store.", "what", shared)
        for name, text, field in _TIER_METERS:
            yield series(name, text, "tier", [([tier["name"]], tier[field]) for tier in tiers])
        disks = [([mount], shutil.disk_usage(folder)) for mount, folder in (("data", self._data), ("shm", SHM_MOUNT))]
        yield series("disk_bytes", "Size of a file system of the box.", "mount", [(of, d.total) for of, d in disks])
        yield series("disk_free_bytes", "Free bytes of it.", "mount", [(of, d.free) for of, d in disks])
        if (last := self._last_backup) is not None:
            text = "Unix time of the newest backup that was taken."
            yield series("backup_last_success_timestamp_seconds", text, "", [((), last.made_s)])
