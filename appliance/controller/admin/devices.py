"""/admin/v1/devices: list devices and their holders, take one out of use; /admin/v1/nodes: ask the nodes, forget a lost
one."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import StringConstraints

from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import cordons, lost_nodes
from appliance.controller.devices.meters import metered
from appliance.controller.http.presence import while_present
from appliance.controller.http.reading import Readings, Status
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict, NotFound, OperationFailed, shown
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.jobs.events import add_message
from appliance.store.objects import jobs


class Check(StrictBody):
    """new_baseline: what is measured now is what later checks compare with."""

    new_baseline: bool = False


class Undrain(StrictBody):
    """check: measure it first, and leave it where it is if it fails."""

    check: bool = False


class Drain(StrictBody):
    reason: Annotated[str, StringConstraints(max_length=512)] = ""


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""
    db = context.db

    @router.get("/devices")
    def devices(now: Status, readings: Readings) -> dict[str, Any]:
        checks = context.deep_checks.results()
        shown_devices = metered(lost_nodes.in_view(db, now["devices"]), readings)
        return {"object": "list", "data": [{**one, "check": checks.get(one["id"])} for one in shown_devices]}

    @router.post("/devices/{device_id:path}/check")
    async def check(device_id: str, request: Request, caller: Caller, body: Check | None = None) -> dict[str, Any]:
        """Measures a device that can be spared: drains it, compares copies, products of matrices and an all-reduce with
        its own baseline and with what is published, and gives it back; also if the client leaves. One that fails stays
        out of use."""
        return await _checked(context, request, device_id, caller, bool(body and body.new_baseline))

    @router.post("/devices/{device_id:path}/drain")
    async def drain(device_id: str, caller: Caller, body: Drain | None = None) -> dict[str, Any]:
        """The device's holder moves elsewhere, and no new holder gets it until `undrain`. Idempotent; GET /devices
        shows when it is free."""
        _drain(context, _known(context, device_id), body.reason if body else "", caller)
        return _known(context, device_id)

    @router.post("/devices/{device_id:path}/undrain")
    async def undrain(device_id: str, request: Request, caller: Caller, body: Undrain | None = None) -> dict[str, Any]:
        """Return the device to use. Idempotent."""
        _known(context, device_id)
        if body is not None and body.check:
            await _refuse_failing(context, request, device_id, caller)
        with db.transaction():
            cordons.undrain(db, device_id)
            record(context, caller, "device.undrain", device_id)
        context.scheduler.nudge(f"undrain of {device_id}", name_of(context, caller))
        return _known(context, device_id)

    @router.get("/nodes")
    async def nodes() -> dict[str, Any]:
        """Asks each node: one that does not answer within a second has `answered_s` null."""
        return {"object": "list", "data": await context.nodes.poll()}

    @router.delete("/nodes/{name}")
    async def forget_node(name: str, caller: Caller) -> dict[str, Any]:
        """Remove a lost node's devices from the list. The node may still join again."""
        with db.transaction():
            devices = lost_nodes.forget(db, name)
            if devices is None:
                raise NotFound(
                    f"The box has lost no node {shown(name)}; `appliance gpu list` shows those of "
                    "lost ones. A node that is there leaves with Ctrl-C or SIGTERM.",
                    param="name",
                    code="node_not_lost",
                )
            record(context, caller, "node.forget", name, devices=devices)
        return {"id": name, "deleted": True, "devices": devices}


def _known(context: ControllerContext, device_id: str) -> dict[str, Any]:
    """Raises NotFound."""
    for device in lost_nodes.in_view(context.db, context.scheduler.status()["devices"]):
        if device["id"] == device_id:
            return device
    raise NotFound(
        f"The box has no device {shown(device_id)}; `appliance gpu list` shows them.",
        param="device_id",
        code="device_not_found",
    )


def _drain(context: ControllerContext, device: dict[str, Any], reason: str, caller: Principal) -> None:
    db, device_id, holder = context.db, device["id"], device["holder"]
    by = name_of(context, caller)
    with db.transaction():
        fresh = cordons.drain(db, device_id, reason, by, time.time())
        record(context, caller, "device.drain", device_id, reason=reason, holder=holder)
        if fresh and holder and holder["kind"] == "job" and jobs.find(db, holder["id"]):
            # Its owner reads this, and knows no names of others' keys.
            why = f": {reason}" if reason else ""
            text = f"Device {device_id} is drained by an operator{why}; the job moves off it."
            add_message(db, holder["id"], text, level="warn", data={"device": device_id, "reason": reason})
    context.scheduler.nudge(f"drain of {device_id}", by)


async def _checked(
    context: ControllerContext, request: Request, device_id: str, caller: Principal, new_baseline: bool = False
) -> dict[str, Any]:
    """The result; the device goes back when whoever asked has left. Raises NotFound, Conflict."""
    _known(context, device_id)
    by = name_of(context, caller)
    try:
        return await while_present(request, context.deep_checks.check(device_id, by, new_baseline=new_baseline))
    except OperationFailed as error:
        record(context, caller, "device.check", device_id, outcome="refused", reason=str(error))
        raise Conflict(f"{str(error)[0].upper()}{str(error)[1:]}.", param="device_id", code=error.code) from error


async def _refuse_failing(context: ControllerContext, request: Request, device_id: str, caller: Principal) -> None:
    """Measures the device. Raises Conflict if it fails."""
    result = await _checked(context, request, device_id, caller)
    record(context, caller, "device.check", device_id, state=result["state"])
    wrong = [one for one in result["found"] if one["state"] == "fail"]
    if wrong:
        text = "; ".join(f"{one['measure']} is {one['found']}, wanted {one['wanted']}" for one in wrong)
        raise Conflict(
            f"{device_id} stays out of use: {text}. Without a check it goes back all the same.",
            param="device_id",
            code="device_fails",
        )
