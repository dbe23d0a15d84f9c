"""What a verdict on a job is made from: the box's resources and the shape of a model."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.controller.access.naming import Resolved
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import node_sizes
from appliance.controller.models.capacity import BoxFacts
from runtime.devices.kinds import HOST
from scheduler.core.config import SchedulerConfig
from train.plan.estimate import ModelShape

MAX_CONFIG_BYTES = 4 * 2**20


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
    for folder in (base.version.disk_path, base.version.shm_path):
        path = Path(folder, "config.json") if folder else None
        if path is not None and path.is_file() and path.stat().st_size <= MAX_CONFIG_BYTES:
            return ModelShape.from_config(json.loads(path.read_text()), base.model.params)
    return ModelShape(base.model.params)
