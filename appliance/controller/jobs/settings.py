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
from appliance.controller.models.capacity import BoxFacts, Estimator, Verdict
from appliance.store import jobs, models
from appliance.store.rows import VersionRow
from runtime.devices.kinds import kind_of
from train.data.formats import TEXT
from train.data_checks.check import DataReport
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

    counts: devices of each node, of the box's own kind. default_most: limit of a job whose request has none."""

    counts: tuple[int, ...]
    default_most: int

    @property
    def largest(self) -> int:
        return max(self.counts)

    def refuse_more(self, name: str, devices: int, shown: str = "") -> None:
        """Raise BadRequest if no node has as many devices. name: the field at fault. shown: its value, in words."""
        node = "the box" if len(self.counts) == 1 else "the largest node of the box"
        _refuse_more(name, devices, self.largest, f", which is all that {node} has", shown)

    def refuse_more_replicas(self, name: str, engines: int, tensor_parallel: int) -> None:
        """Raise BadRequest if the nodes cannot hold as many engines of `tensor_parallel` devices each."""
        most = sum(count // tensor_parallel for count in self.counts)
        _refuse_more(name, engines, most, f": each replica takes {tensor_parallel} of {sum(self.counts)} devices")


def _refuse_more(name: str, value: int, most: int, why: str, shown: str = "") -> None:
    if value > most:
        raise BadRequest(
            f"{name} is {shown or value}; expected at most {most}{why}. Ask for less, or join a node with more devices "
            "first (`appliance join`).",
            param=name,
            code="insufficient_devices",
        )


def nodes_of(context: ControllerContext) -> NodeSizes:
    devices = cordons.in_view(context.db, context.scheduler.status()["devices"])
    # Home's devices come first: other nodes run what home prepared, for its kind of devices.
    kind = devices[0]["kind"]
    counts = tuple(Counter(d["node"] for d in devices if d["kind"] == kind).values())
    # Ranks that share a core take longer than fewer ranks.
    return NodeSizes(counts, min(max(counts), host_cores()) if kind_of(kind).on_host else max(counts))


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
        """The most devices that the job may take, present or not. together: ranks that compute one row."""
        return self.max_devices or max(nodes.default_most, self.least, together)

    def divided(self, resolved: dict[str, Any], nodes: NodeSizes) -> tuple[list[int], list[int]]:
        """Numbers of devices that divide the work of a step, and those of them within the bounds."""
        together = auto.ranks_of_row(resolved)
        most = self.most(nodes, together)
        by_batch = auto.allowed_sizes(resolved["batch_size"], most, resolved["micro_batch"], together)
        return by_batch, [size for size in by_batch if size >= self.least]

    def check(self, resolved: dict[str, Any] | None, nodes: NodeSizes) -> list[int]:
        """The numbers of `divided` within the bounds, also those that only a node yet to join could provide; none
        before the job is resolved. A `max_devices` that no node has only limits. Raises BadRequest if there is none, or
        none for the known nodes."""
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
    """The settings of a job, chosen.

    resolved: fields of a TrainSpec. verdict: whether it fits, and on how many devices. layouts: those that fit as
    `Estimator.described` has them, the best first: `resolved` has that one.
    """

    resolved: dict[str, Any]
    verdict: Verdict
    layouts: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SettingsRequest:
    """The settings that a request has for a job. hyperparameters: "auto" or absent where the box chooses."""

    context: ControllerContext
    base: Resolved
    method: Method
    hyperparameters: dict[str, Any]
    dataset: auto.DatasetStats
    bounds: DeviceBounds

    def resolve(self) -> dict[str, Any]:
        """The fields of a TrainSpec, before a layout is chosen. Raises InvalidHyperparameter."""
        requested, bounds, nodes = self.hyperparameters, self.bounds, nodes_of(self.context)
        model = model_stats(self.context, self.base)
        together = math.prod(
            n for name in ("tensor_parallel", "sequence_parallel") if type(n := requested.get(name)) is int
        )
        most = max(1, min(bounds.most(nodes, together), nodes.largest))
        resolved = self.method.resolve(requested, self.dataset, model, most)
        if bounds.min_devices and not self._is_set("batch_size") and not bounds.divided(resolved, nodes)[1]:
            # An automatic batch follows the requested devices, not the other way round.
            rows = math.ceil(resolved["batch_size"] / bounds.min_devices) * bounds.min_devices
            resolved = self.method.resolve({**requested, "batch_size": rows}, self.dataset, model, most)
        return resolved

    def choose(self) -> Settings:
        """Resolve the settings and choose the best layout that fits the box. Raises InvalidHyperparameter; BadRequest
        if no number of devices within the bounds divides a step."""
        bounds, method, dataset, resolved = self.bounds, self.method, self.dataset, self.resolve()
        nodes = nodes_of(self.context)
        by_batch, sizes = bounds.divided(resolved, nodes)
        if not sizes:
            raise BadRequest(no_size(resolved, by_batch), param="min_devices", code="invalid_devices")
        speed, memory = jobs.factors(self.context.db, self.base.name, method.name, resolved["full"])
        box = replace(box_facts(self.context), memory_factor=memory, speed_factor=speed)
        kept = [name for name in capacity.LAYOUT if self._is_set(name)]
        estimator = Estimator(shape_of(self.base), box, method, method.load(dataset, resolved))
        steps = auto.steps(method.rows(dataset), resolved)
        layouts, warning = list[capacity.Layout](), ""
        for parts in self._row_parts(resolved, box):
            shared = resolved | {"sequence_parallel": parts}
            sizes = bounds.divided(shared, nodes)[1]
            by_micro = {n: bounds.divided({**shared, "micro_batch": n}, nodes)[1] for n in auto.micro_batches(shared)}
            # A micro-batch that the box chooses never costs a number of devices.
            by_micro = {n: possible for n, possible in by_micro.items() if possible and set(sizes) <= set(possible)}
            layouts, warning = estimator.fit(shared, by_micro, kept) if by_micro else ([], "")
            if layouts:
                resolved = shared
                break
        resolved = resolved | (layouts[0].fields if layouts else estimator.leanest())
        verdict = estimator.verdict(resolved, bounds.divided(resolved, nodes)[1])
        if warning:
            verdict = replace(verdict, warnings=(warning, *verdict.warnings))
        return Settings(resolved, verdict, [estimator.described(layout, resolved, steps) for layout in layouts])

    def _row_parts(self, resolved: dict[str, Any], box: BoxFacts) -> list[int]:
        """Numbers of ranks to share a row, in the order to try: the requested one; or one, then more."""
        first = resolved["sequence_parallel"]
        if self._is_set("sequence_parallel") or not self.method.sums or box.on_host:
            return [first]
        parts = [n for n in (2, 4, 8, 16, 32) if n <= box.node_devices and not resolved["lora_dropout"]]
        model = model_stats(self.context, self.base)
        return [first, *(n for n in parts if auto.shares_rows(model, resolved | {"sequence_parallel": n}))]

    def _is_set(self, name: str) -> bool:
        return self.hyperparameters.get(name, "auto") not in ("auto", None)


def model_stats(context: ControllerContext, base: Resolved) -> auto.ModelStats:
    """Facts of a base model and of the box that `train.plan.auto` needs."""
    kind = context.scheduler.status()["devices"][0]["kind"]
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
    memory, home = now["memory"], now["devices"][0]
    # An engine or a job is on devices of home's kind.
    devices = [device for device in now["devices"] if device["kind"] == home["kind"]]
    return BoxFacts(
        devices=len(devices),
        node_devices=nodes_of(context).largest,
        device_kind=home["kind"],
        device_memory_bytes=min(device["memory_bytes"] for device in devices),
        device_name=home["name"],
        store_budget_bytes=memory["budget_bytes"],
        host_memory_bytes=memory["host_bytes"],
        asleep_per_device=memory["asleep_per_device"],
        store_room_bytes=memory["room_bytes"],
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
    version: VersionRow | None = base.version
    if (below := base.version.meta.get("adapter")) is not None:
        version = models.find_version(context.db, below["base"], below["base_version"])
    folders = (version.disk_path, version.shm_path) if version is not None else ()
    return next((Path(folder) for folder in folders if folder and Path(folder, TOKENIZER).is_file()), None)
