"""Chooses the settings of a job from model, data and box. Requests, validation and `plan job` call the same function,
so that a plan and the job that follows cannot differ."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.controller.access.naming import Resolved
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.jobs import devices
from appliance.controller.models import capacity, node_sizes
from appliance.controller.models.capacity import BoxFacts, Verdict
from appliance.controller.models.node_sizes import NodeSizes
from appliance.store.objects import models
from appliance.store.rows import JobRow
from runtime.devices.kinds import HOST, kind_of
from scheduler.core.config import SchedulerConfig
from train.data.check import DataReport
from train.methods.method import Method
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ModelShape
from weights.checkpoint.errors import CheckpointRefused
from weights.checkpoint.folder import may_open
from weights.format.errors import VersionNotFound
from weights.format.foreign_json import config_in

DEFAULT_CONTEXT_TOKENS = 2048
TOKENIZER = "tokenizer.json"
_NEED_NO_VALIDATION = {
    "publish": ("checkpoints", "end", "epoch"),
    "early_stopping_patience": (0,),
    "eval_interval": (0,),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """resolved: fields of a TrainSpec. by_batch: numbers of devices that divide the work of a step; sizes: those of
    them that were asked for."""

    resolved: dict[str, Any]
    by_batch: list[int]
    sizes: list[int]


def box_facts(context: ControllerContext) -> BoxFacts:
    now = context.scheduler.status()
    # Home's devices come first; an engine or a job is on devices of home's kind.
    devices = [device for device in now["devices"] if device["kind"] == now["devices"][0]["kind"]]
    nodes = node_sizes.known(context)
    budget = now["memory"]["budget_bytes"]
    room = now["memory"].get("room_bytes")
    return BoxFacts(
        devices=max(1, len(devices)),
        node_devices=max(1, nodes.largest),
        device_kind=devices[0]["kind"] if devices else HOST.name,
        device_memory_bytes=min((d["memory_bytes"] for d in devices), default=0),
        store_budget_bytes=budget,
        host_memory_bytes=now["memory"].get("host_bytes"),
        asleep_per_device=now["memory"].get("asleep_per_device", SchedulerConfig().max_asleep_per_device),
        store_room_bytes=room if room is not None else (budget or 0) - (now["memory"]["used_bytes"] or 0),
    )


def shape_of(base: Resolved) -> ModelShape:
    """From the version's config.json; if the model's files are not available, only the number of parameters counts."""
    config = config_in(base.version.disk_path, base.version.shm_path)
    return ModelShape(base.model.params) if config is None else ModelShape.from_config(config, base.model.params)


def of_model(context: ControllerContext, base: Resolved) -> auto.ModelStats:
    """What `train.plan.auto` asks of a base model and of the box."""
    found = context.scheduler.status()["devices"]
    # Training on an adapter uses merged weights below it, which no engine serves.
    rank = 0 if base.version.meta.get("adapter") else context.sizes.adapter_rank_limit(base.model)
    kind = found[0]["kind"] if found else HOST.name
    return of_shape(shape_of(base), base.model.max_model_len, kind, rank)


def of_shape(
    shape: ModelShape,
    context_tokens: int | None,
    device_kind: str,
    adapter_max_rank: int,
    computes_bf16: bool | None = None,
) -> auto.ModelStats:
    """computes_bf16: None asks the devices of this machine."""
    return auto.ModelStats(
        n_parameters=shape.n_parameters,
        max_position_embeddings=context_tokens or DEFAULT_CONTEXT_TOKENS,
        device_kind=device_kind,
        adapter_max_rank=adapter_max_rank,
        computes_bf16=kind_of(device_kind).computes_bf16() if computes_bf16 is None else computes_bf16,
        tensor_slices=shape.tensor_slices,
        hidden=shape.hidden,
    )


def dataset_of(report: DataReport) -> auto.DatasetStats:
    return auto.DatasetStats(
        n_examples=max(1, report.n_rows, report.n_examples),
        n_tokens=max(1, report.n_tokens_estimate),
        longest_example_tokens=max(1, report.longest_example_tokens),
        lengths=tuple(report.example_tokens),
    )


def choose(
    method: Method,
    given: dict[str, Any],
    dataset: auto.DatasetStats,
    model: auto.ModelStats,
    wish: devices.Wish | JobRow,
    nodes: NodeSizes,
) -> Settings:
    """Raises train.plan.errors.InvalidHyperparameter."""
    shards = given.get("tensor_parallel")
    wished = devices.most_devices(wish, nodes, shards if isinstance(shards, int) else 1)
    most = max(1, min(wished, nodes.largest))
    resolved = method.resolve(given, dataset, model, most)
    by_batch, sizes = devices.sizes(wish, resolved, nodes)
    least = next((size for size in sorted(wish.asked_sizes or ()) if size >= (wish.min_devices or 1)), wish.min_devices)
    if not sizes and least and given.get("batch_size", "auto") == "auto":
        # An automatic batch follows the requested devices, not the other way round.
        rows = math.ceil(resolved["batch_size"] / least) * least
        resolved = method.resolve({**given, "batch_size": rows}, dataset, model, most)
        by_batch, sizes = devices.sizes(wish, resolved, nodes)
    return Settings(resolved, by_batch, sizes)


def refuse_without_validation(resolved: dict[str, Any]) -> None:
    """Refuse settings that only a validation file can decide. Raises InvalidHyperparameter."""
    for name, needs_none in _NEED_NO_VALIDATION.items():
        if resolved[name] not in needs_none:
            expected = "another value, or a `validation_file` in the request, which this is measured on"
            raise InvalidHyperparameter(name, resolved[name], expected)


def cut_examples(method: Method, dataset: auto.DatasetStats, resolved: dict[str, Any]) -> list[str]:
    """A warning where max_length cuts examples of a counted dataset; prompts are never cut."""
    longest, most = dataset.longest_example_tokens, resolved["max_length"]
    if method.rolls_out or longest <= most:
        return []
    return [
        f"The longest example has {longest:,} tokens and max_length is {most:,}: what is beyond is cut off, and an "
        "example with nothing left to learn is left out, or refused by the method."
    ]


def high_rate(
    context: ControllerContext,
    base: Resolved,
    method: Method,
    given: dict[str, Any],
    dataset: auto.DatasetStats,
    resolved: dict[str, Any],
) -> list[str]:
    """A warning where the requested learning rate is far above the automatic one; `auto` refuses still higher ones."""
    others = {name: value for name, value in given.items() if name not in auto.RATES}
    unasked = node_sizes.known(context).unasked
    usual = method.resolve(others, dataset, of_model(context, base), unasked)["learning_rate"]
    rate = resolved["learning_rate"]
    if rate <= auto.HIGH_RATE * usual:
        return []
    return [
        f"learning_rate {rate:.1e} is {rate / usual:.0f} times the automatic {usual:.1e}: the model may lose what it "
        "knows. Lower it if the loss jumps or the answers get worse."
    ]


def choose_on_box(
    context: ControllerContext,
    base: Resolved,
    method: Method,
    given: dict[str, Any],
    dataset: auto.DatasetStats,
    wish: devices.Wish | JobRow,
) -> Settings:
    """As `choose`, on this box."""
    return choose(method, given, dataset, of_model(context, base), wish, node_sizes.known(context))


def verdict_on_box(context: ControllerContext, base: Resolved, settings: Settings, method: Method) -> Verdict:
    """Whether it fits, at which of the sizes; `settings` has at least one."""
    return capacity.job(shape_of(base), settings.resolved, settings.sizes, box_facts(context), method)


async def check_opening(context: ControllerContext, base: Resolved) -> None:
    """Check that ranks and token counts may open the local files of `base`. Raises CheckpointRefused."""
    below = base.version.meta.get("adapter")
    under = None if below is None else models.find_version(context.db, below["base"], below["base_version"])
    for version in (base.version, *([] if under is None else [under])):
        folder = next((f for f in (version.disk_path, version.shm_path) if f and Path(f).is_dir()), None)
        if folder is not None:
            with suppress(VersionNotFound):  # it has left shared memory; who reads it finds it where else it is
                await asyncio.to_thread(may_open, folder, version.model)


async def refuse_unsafe(context: ControllerContext, base: Resolved) -> None:
    """`check_opening` for a client that waits. Raises BadRequest."""
    try:
        await check_opening(context, base)
    except CheckpointRefused as error:
        raise BadRequest(str(error), param="model", code="model_refused") from error


def tokenizer_of(context: ControllerContext, base: Resolved) -> Path | None:
    """The directory whose tokenizer and chat template ranks will use; None while its files are elsewhere. That of an
    adapter is its base's."""
    version, below = base.version, base.version.meta.get("adapter")
    if below is not None:
        found = models.find_version(context.db, below["base"], below["base_version"])
        if found is None:
            return None
        version = found
    for folder in (version.disk_path, version.shm_path):
        if folder and Path(folder, TOKENIZER).is_file():
            return Path(folder)
    return None
