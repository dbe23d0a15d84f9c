"""Chooses the settings of a job, and its numbers of devices, from model, data and box. Requests, validation and
`plan job` call the same function, so that a plan and the job that follows cannot differ."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.controller.access.model_access import Resolved
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import cordons
from appliance.controller.interfaces.errors import BadRequest, InvalidValue
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts, Verdict
from appliance.store.objects import jobs, models
from appliance.store.rows import VersionRow
from runtime.devices.kinds import HOST, kind_of
from scheduler.core.config import SchedulerConfig
from train.data.check import DataReport
from train.data.formats import TEXT
from train.methods.method import Method
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ModelShape
from weights.format.foreign_json import config_in

DEFAULT_CONTEXT_TOKENS = 2048
TOKENIZER = "tokenizer.json"
_NEED_NO_VALIDATION = {
    "publish": ("checkpoints", "end", "epoch"),
    "early_stopping_patience": (0,),
    "eval_interval": (0,),
}


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """Devices per node: the most that a job, or an engine with tensor parallelism, can have, since neither spans nodes.
    Lost nodes count, which the box waits for; one that has yet to join does not.

    counts: devices of each node, of the box's own kind. Empty before the first observation: then nothing is
    refused. cores: of a node whose devices are logical ones, which share them; None for others."""

    counts: tuple[int, ...]
    cores: int | None = None

    @property
    def largest(self) -> int:
        return max(self.counts, default=0)

    @property
    def unasked(self) -> int:
        """The most devices of a job that asks for no number: ranks that share a core take longer than fewer ranks."""
        return max(1, self.largest if self.cores is None else min(self.largest, self.cores))

    def refuse_more(self, name: str, given: int, asked: str = "") -> None:
        """Raises BadRequest if no node has `given` devices. name: the field at fault, with value `asked`."""
        node = "the box" if len(self.counts) == 1 else "the largest node of the box"
        self._refuse(name, given, self.largest, f", which is all that {node} has", asked)

    def refuse_more_replicas(self, name: str, given: int, tensor_parallel: int) -> None:
        """Raises BadRequest if the nodes cannot hold `given` engines with this many devices each."""
        most = sum(count // tensor_parallel for count in self.counts)
        self._refuse(name, given, most, f": each replica takes {tensor_parallel} of {sum(self.counts)} devices")

    def _refuse(self, name: str, given: int, most: int, why: str, asked: str = "") -> None:
        if self.counts and given > most:
            raise BadRequest(
                f"{name} is {asked or given}; expected at most {most}{why}. Ask for less, or join a node with more "
                "devices first (`appliance join`).",
                param=name,
                code="insufficient_devices",
            )


def nodes_of(context: ControllerContext) -> NodeSizes:
    devices = cordons.in_view(context.db, context.scheduler.status()["devices"])
    if not devices:
        return NodeSizes(())
    # Home's devices come first: other nodes run what home prepared, for its kind of devices.
    kind = devices[0]["kind"]
    counts = Counter(d["node"] for d in devices if d["kind"] == kind)
    return NodeSizes(tuple(counts.values()), host_cores() if kind_of(kind).on_host else None)


def host_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class DeviceBounds:
    """The numbers of devices that a request allows, as a JobRow has them."""

    min_devices: int | None = None
    max_devices: int | None = None

    @property
    def least(self) -> int:
        return self.min_devices or 1

    def most(self, nodes: NodeSizes, together: int = 1) -> int:
        """The most devices that the job may take; it need not be there. together: ranks that compute one row."""
        return self.max_devices or max(nodes.unasked, self.least, together)

    def divided(self, resolved: dict[str, Any], nodes: NodeSizes) -> tuple[list[int], list[int]]:
        """Sizes that divide the work of a step, and the requested ones among them."""
        together = auto.ranks_of_row(resolved)
        most = self.most(nodes, together)
        by_batch = auto.allowed_sizes(resolved["batch_size"], most, resolved["micro_batch"], together)
        return by_batch, [size for size in by_batch if size >= self.least]

    def check(self, resolved: dict[str, Any] | None, nodes: NodeSizes) -> list[int]:
        """The requested ones of `divided`, including those that only a node yet to join could provide; none before the
        job is resolved. A `max_devices` that no node has only limits. Raises BadRequest when there is none, or none for
        the known nodes."""
        least, most = self.least, self.max_devices
        if most is not None and least > most:
            raise InvalidValue(f"min_devices is {least} and max_devices {most}; expected min <= max.", "min_devices")
        nodes.refuse_more("min_devices", least)
        if resolved is None:
            return []
        by_batch, fitting = self.divided(resolved, nodes)
        if not fitting:
            raise InvalidValue(no_size(resolved, by_batch), "min_devices")
        sizes = ", ".join(map(str, fitting))
        reason = f"such that a step of {resolved['batch_size']} sequences divides into {sizes} devices only"
        nodes.refuse_more("min_devices", fitting[0], reason)
        return fitting


def no_size(resolved: dict[str, Any], by_batch: list[int]) -> str:
    """The message for a job that has no valid number of devices."""
    together = auto.ranks_of_row(resolved)
    grouped = f", each over {together} devices (tensor_parallel, sequence_parallel)," if together > 1 else ""
    return (
        f"A step of {resolved['batch_size']} sequences in micro-batches of {resolved['micro_batch']}{grouped} divides "
        f"into {', '.join(map(str, by_batch)) or 'no allowed number of'} devices; min_devices and max_devices leave "
        "none of them."
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """resolved: fields of a TrainSpec. by_batch: numbers of devices that divide the work of a step. verdict: whether it
    fits, at which of the requested ones of them; None if there are none. layouts: that fit, the best first, which
    `resolved` has, as `capacity.described` has them."""

    resolved: dict[str, Any]
    by_batch: list[int]
    verdict: Verdict | None
    layouts: list[dict[str, Any]]


def resolve(
    context: ControllerContext,
    base: Resolved,
    method: Method,
    requested: dict[str, Any],
    dataset: auto.DatasetStats,
    bounds: DeviceBounds,
) -> dict[str, Any]:
    """The fields of a TrainSpec, before a layout is chosen. Raises InvalidHyperparameter."""
    nodes, model = nodes_of(context), model_stats(context, base)
    together = math.prod(
        n for name in ("tensor_parallel", "sequence_parallel") if type(n := requested.get(name)) is int
    )
    most = max(1, min(bounds.most(nodes, together), nodes.largest))
    resolved = method.resolve(requested, dataset, model, most)
    if bounds.min_devices and requested.get("batch_size", "auto") == "auto" and not bounds.divided(resolved, nodes)[1]:
        # An automatic batch follows the requested devices, not the other way round.
        rows = math.ceil(resolved["batch_size"] / bounds.min_devices) * bounds.min_devices
        resolved = method.resolve({**requested, "batch_size": rows}, dataset, model, most)
    return resolved


def choose(
    context: ControllerContext,
    base: Resolved,
    method: Method,
    requested: dict[str, Any],
    dataset: auto.DatasetStats,
    bounds: DeviceBounds,
) -> Settings:
    """As `resolve`, with the best layout that fits the box."""
    nodes, resolved = nodes_of(context), resolve(context, base, method, requested, dataset, bounds)
    by_batch, sizes = bounds.divided(resolved, nodes)
    if not sizes:
        return Settings(resolved, by_batch, None, [])
    speed, memory = jobs.factors(context.db, base.name, method.name, resolved["full"])
    box, shape, model = box_facts(context), shape_of(base), model_stats(context, base)
    box = replace(box, memory_factor=memory, speed_factor=speed)
    kept = [name for name in capacity.LAYOUT if requested.get(name, "auto") not in ("auto", None)]
    load, steps = method.load(dataset, resolved), auto.steps(method.rows(dataset), resolved)
    fitting, changed = list[capacity.Layout](), ""
    for parts in _row_parts(requested, method, model, resolved, box):
        shared = resolved | {"sequence_parallel": parts}
        sizes = bounds.divided(shared, nodes)[1]
        # A micro-batch that nobody asked for never costs a number of devices.
        by_micro = {n: bounds.divided({**shared, "micro_batch": n}, nodes)[1] for n in auto.micro_batches(shared)}
        by_micro = {n: of_micro for n, of_micro in by_micro.items() if of_micro and set(sizes) <= set(of_micro)}
        fitting, changed = capacity.fit(shape, shared, by_micro, box, method, load, kept) if by_micro else ([], "")
        if fitting:
            resolved = shared
            break
    resolved = resolved | (fitting[0].fields if fitting else capacity.leanest(resolved, box))
    by_batch, sizes = bounds.divided(resolved, nodes)
    verdict = capacity.job(shape, resolved, sizes, box, method)
    if changed:
        verdict = replace(verdict, warnings=(changed, *verdict.warnings))
    described = [capacity.described(one, resolved, box, method, load, steps) for one in fitting]
    return Settings(resolved, by_batch, verdict, described)


def _row_parts(
    requested: dict[str, Any], method: Method, model: auto.ModelStats, resolved: dict[str, Any], box: BoxFacts
) -> list[int]:
    """How many ranks may share a row: as asked for; or one, and more where nothing else fits."""
    own = resolved["sequence_parallel"]
    if requested.get("sequence_parallel", "auto") != "auto" or not method.sums or box.on_host:
        return [own]
    parts = [n for n in (2, 4, 8, 16, 32) if n <= box.node_devices and not resolved["lora_dropout"]]
    return [own, *(n for n in parts if auto.shares_rows(model, resolved | {"sequence_parallel": n}))]


def model_stats(context: ControllerContext, base: Resolved) -> auto.ModelStats:
    """What `train.plan.auto` asks of a base model and of the box."""
    devices = context.scheduler.status()["devices"]
    kind = devices[0]["kind"] if devices else HOST.name
    return auto.ModelStats(
        shape=shape_of(base),
        max_position_embeddings=base.model.max_model_len or DEFAULT_CONTEXT_TOKENS,
        device_kind=kind,
        # Training on an adapter uses merged weights below it, which no engine serves.
        adapter_max_rank=0 if base.version.meta.get("adapter") else context.sizes.adapter_rank_limit(base.model),
        computes_bf16=kind_of(kind).computes_bf16(),
        quantised=base.quantization is not None,
    )


def shape_of(base: Resolved) -> ModelShape:
    """From the version's config.json; if the model's files are not available, only the number of parameters counts."""
    config = config_in(base.version.disk_path, base.version.shm_path)
    return ModelShape(base.model.params) if config is None else ModelShape.from_config(config, base.model.params)


def dataset_of(report: DataReport) -> auto.DatasetStats:
    return auto.DatasetStats(
        n_examples=max(1, report.n_rows, report.n_examples),
        n_tokens=max(1, report.n_tokens_estimate),
        longest_example_tokens=max(1, report.longest_example_tokens),
        lengths=tuple(report.example_tokens),
        documents=report.shape == TEXT,
    )


def box_facts(context: ControllerContext) -> BoxFacts:
    now = context.scheduler.status()
    # Home's devices come first; an engine or a job is on devices of home's kind.
    devices = [device for device in now["devices"] if device["kind"] == now["devices"][0]["kind"]]
    budget, room = now["memory"]["budget_bytes"], now["memory"].get("room_bytes")
    return BoxFacts(
        devices=max(1, len(devices)),
        node_devices=max(1, nodes_of(context).largest),
        device_kind=devices[0]["kind"] if devices else HOST.name,
        device_memory_bytes=min((d["memory_bytes"] for d in devices), default=0),
        device_name=devices[0]["name"] if devices else "",
        store_budget_bytes=budget,
        host_memory_bytes=now["memory"].get("host_bytes"),
        asleep_per_device=now["memory"].get("asleep_per_device", SchedulerConfig().max_asleep_per_device),
        store_room_bytes=room if room is not None else (budget or 0) - (now["memory"]["used_bytes"] or 0),
    )


def refuse_without_validation(resolved: dict[str, Any]) -> None:
    """Refuse settings that only a validation file can decide. Raises InvalidHyperparameter."""
    for name, needs_none in _NEED_NO_VALIDATION.items():
        if resolved[name] not in needs_none:
            expected = "another value, or a `validation_file` in the request, which this is measured on"
            raise InvalidHyperparameter(name, resolved[name], expected)


def cut_warning(method: Method, dataset: auto.DatasetStats, resolved: dict[str, Any]) -> list[str]:
    """Of examples of a counted dataset that max_length cuts; prompts and documents are never cut."""
    longest, most = dataset.longest_example_tokens, resolved["max_length"]
    if longest <= most or method.rolls_out or dataset.documents:
        return []
    return [
        f"The longest example has {longest:,} tokens and max_length is {most:,}: what is beyond is cut off, and an "
        "example with nothing left to learn is left out, or refused by the method."
    ]


def tokenizer_of(context: ControllerContext, base: Resolved) -> Path | None:
    """The directory whose tokenizer and chat template ranks will use; None while its files are elsewhere."""
    version = _weights_of(context, base)
    folders = (version.disk_path, version.shm_path) if version is not None else ()
    return next((Path(folder) for folder in folders if folder and Path(folder, TOKENIZER).is_file()), None)


def _weights_of(context: ControllerContext, base: Resolved) -> VersionRow | None:
    """The version itself, or that below an adapter; None if it was deleted."""
    below = base.version.meta.get("adapter")
    return base.version if below is None else models.find_version(context.db, below["base"], below["base_version"])
