"""/admin/v1/devices: list devices and their holders, take one out of use; /admin/v1/power: their energy;
/admin/v1/nodes: ask the nodes, forget a lost one."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from appliance.controller.context.context import ControllerContext, name_of
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import of_job
from appliance.controller.http.routers import Readings, Status, audited
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.jobs.events import add_message
from appliance.store.objects import jobs


class Drain(StrictBody):
    reason: Annotated[str, StringConstraints(max_length=512)] = ""


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    def known(device_id: str) -> dict[str, Any]:
        """Raises NotFound."""
        for device in cordons.in_view(db, context.scheduler.status()["devices"]):
            if device["id"] == device_id:
                return device
        message = f"The box has no device {shown(device_id)}; `appliance gpu list` shows them."
        raise NotFound(message, "device_id", "device_not_found")

    @router.get("/devices")
    def devices(now: Status, readings: Readings) -> dict[str, Any]:
        return {"object": "list", "data": cordons.metered(cordons.in_view(db, now["devices"]), readings)}

    @router.post("/devices/{device_id:path}/drain")
    @audited("device.drain", "holder")
    async def drain(device_id: str, caller: Caller, body: Drain | None = None) -> dict[str, Any]:
        """The device's holder moves elsewhere, and no new holder gets it until `undrain`. Idempotent; GET /devices
        shows when it is free."""
        device, reason = known(device_id), body.reason if body else ""
        holder, by = device["holder"], name_of(context, caller)
        with db.transaction():
            fresh = cordons.drain(db, device, reason, by, time.time())
            if fresh and holder and holder["kind"] == "job" and jobs.find(db, holder["id"]):
                # Its owner reads this, and knows no names of others' keys.
                why = f": {reason}" if reason else ""
                text = f"Device {device_id} is drained by an operator{why}; the job moves off it."
                add_message(db, holder["id"], text, level="warn", data={"device": device_id, "reason": reason})
        context.scheduler.nudge(f"drain of {device_id}", by)
        return known(device_id)

    @router.post("/devices/{device_id:path}/undrain")
    @audited("device.undrain")
    async def undrain(device_id: str, caller: Caller) -> dict[str, Any]:
        """Return the device to use. Idempotent."""
        cordons.undrain(db, known(device_id))
        context.scheduler.nudge(f"undrain of {device_id}", name_of(context, caller))
        return known(device_id)

    @router.get("/power")
    def power(
        readings: Readings, since_s: Annotated[float, Query(ge=0, le=1e11, description="Unix time")] = 0.0
    ) -> dict[str, Any]:
        """The power limit in force, and the energy of each job that had not ended by `since_s`, in all its time.
        `meters`: how many devices count energy at all."""
        now_s = time.time()
        return {
            "object": "list",
            "limits": context.power.status(),
            "meters": sum(one.energy_j is not None for one in readings.values()),
            "since_s": since_s,
            "until_s": now_s,
            "data": [
                {"job": row.id, "metered_s": row.metered_s, **(of_job(db, row, now_s) or {})}
                for row in jobs.list_metered(db, since_s)
            ],
        }

    @router.get("/nodes")
    async def nodes() -> dict[str, Any]:
        """Each node: one that does not answer within a second has `answered_s` null."""
        return {"object": "list", "data": context.nodes.status()}

    @router.delete("/nodes/{name}")
    @audited("node.forget", "devices")
    async def forget_node(name: str, caller: Caller) -> dict[str, Any]:
        """Remove a lost node's devices from the list. The node may still join again."""
        if (devices := cordons.forget(db, name)) is None:
            message = f"The box has lost no node {shown(name)}; `appliance gpu list` shows those of lost ones. A node"
            raise NotFound(f"{message} that is there leaves with Ctrl-C or SIGTERM.", "name", "node_not_lost")
        return {"id": name, "deleted": True, "devices": devices}
