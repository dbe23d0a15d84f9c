"""Collects what a verdict on a job needs: the box's resources and the shape of a model."""

from __future__ import annotations

from appliance.controller.access.naming import Resolved
from appliance.controller.context.context import ControllerContext
from appliance.controller.models import node_sizes
from appliance.controller.models.capacity import BoxFacts
from runtime.devices.kinds import HOST
from scheduler.core.config import SchedulerConfig
from train.plan.estimate import ModelShape
from weights.format.foreign_json import config_in


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
        reserve_bytes=now["memory"].get("reserve_bytes"),
        asleep_per_device=now["memory"].get("asleep_per_device", SchedulerConfig().max_asleep_per_device),
        store_room_bytes=room if room is not None else (budget or 0) - (now["memory"]["used_bytes"] or 0),
    )


def shape_of(base: Resolved) -> ModelShape:
    """From the version's config.json; if the model's files are not available, only the number of parameters counts."""
    config = config_in(base.version.disk_path, base.version.shm_path)
    return ModelShape(base.model.params) if config is None else ModelShape.from_config(config, base.model.params)
