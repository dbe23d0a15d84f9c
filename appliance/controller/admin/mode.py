"""/admin/v1/mode: the mode that divides the devices, its schedule, and what a mode would do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from appliance.controller.admin.box import handover_by_id
from appliance.controller.context.context import ControllerContext, name_of, record
from appliance.controller.devices.mode import (
    Mode,
    floor_notes,
    mode_in_force,
    policy_of,
    read_mode,
    window_of,
    write_mode,
)
from appliance.controller.http.routers import StrictBody, audited, unaudited
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, BadRequest, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import Caller
from appliance.store.ids import new_id
from appliance.store.records import windows
from appliance.store.rows import WindowRow, columns
from scheduler.core.errors import InvalidSchedule
from scheduler.core.workload import Policy, PolicyKind
from scheduler.loop.mode_schedule import Window

LONGEST_WAIT_S = 900.0
Cron = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class ModeSet(StrictBody):
    """serving_floor: devices that serving keeps; if omitted, the box's default."""

    policy: PolicyKind
    train_devices: Annotated[int, Field(ge=0)] | None = None
    serving_floor: Annotated[int, Field(ge=0)] | None = None


class WindowCreate(ModeSet):
    """A window begins when `cron` fires; it ends when `until` fires, or after `for_s`, or when another begins."""

    cron: Cron
    tz: Annotated[str, StringConstraints(min_length=1, max_length=64)] = "UTC"
    until: Cron | None = None
    for_s: float | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    def floor() -> int:
        return context.scheduler.status()["serving_floor"]

    def row_view(row: WindowRow) -> dict[str, Any]:
        window = window_of(row, floor())
        return {**_window(window), "created_s": row.created_s, "next_s": window.next_s(time.time())}

    def mode_view() -> dict[str, Any]:
        holds = mode_in_force(db, floor(), time.time())
        return {
            **_policy(holds.policy),
            **columns(holds, "since_s until_s"),
            "set_by": "window" if holds.window else "hand",
            "window": holds.window and _window(holds.window),
            "overridden": holds.overridden and _window(holds.overridden),
            "by_hand": asdict(read_mode(db)),
            "notes": floor_notes(holds.policy, len(context.scheduler.status()["devices"])),
        }

    @router.get("/mode")
    async def get_mode() -> dict[str, Any]:
        return mode_view()

    @router.put("/mode")
    async def set_mode(
        body: ModeSet, caller: Caller, wait: bool = False, timeout_s: Annotated[float | None, Query(gt=0)] = None
    ) -> dict[str, Any]:
        _check(context, body)
        with db.transaction():
            wanted = write_mode(db, Mode(**body.model_dump(), by=name_of(context, caller)))
            # Now, for the answer may wait for minutes.
            record(context, caller, "mode.set", body.policy, **columns(body, "train_devices serving_floor"))
        limit_s = min(timeout_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
        try:
            async with asyncio.timeout(limit_s):
                handover_id = await context.scheduler.set_mode(wanted, wait=wait)
        except TimeoutError as error:
            message = (
                f"The mode is set, but the hand-over to it did not end within {limit_s:.0f} s; it continues. "
                "`appliance mode history` shows how far it is."
            )
            raise ApiError(504, message, code="wait_timeout", kind="server_error", headers=NEVER_RETRY) from error
        return mode_view() | {"handover": handover_by_id(db, handover_id)}

    @router.post("/mode/plan")
    @unaudited  # a preview
    async def plan(body: ModeSet | None = None) -> dict[str, Any]:
        """What this mode would do now (without a body: the current mode), and why. Changes nothing."""
        if body is None:
            return context.scheduler.explain(None)
        _check(context, body)
        return context.scheduler.explain(policy_of(Mode(**body.model_dump()), floor()))

    @router.get("/mode/schedule")
    async def list_windows() -> dict[str, Any]:
        return {"object": "list", "data": [row_view(row) for row in windows.list_all(db)]}

    @router.post("/mode/schedule")
    @audited("mode.schedule.add")
    async def add_window(body: WindowCreate, caller: Caller) -> dict[str, Any]:
        _check(context, body)
        row = WindowRow(id=new_id("win_", 8), created_s=time.time(), **body.model_dump())
        try:
            window_of(row, floor())
        except InvalidSchedule as error:
            raise BadRequest(f"{error}.", error.param, "invalid_schedule") from error
        windows.insert(db, row)
        context.scheduler.nudge(f"window {row.id} was added", name_of(context, caller))
        return row_view(row)

    @router.delete("/mode/schedule/{window_id}")
    @audited("mode.schedule.remove")
    async def remove_window(window_id: str, caller: Caller) -> dict[str, Any]:
        if not windows.delete(db, window_id):
            message = f"No window {shown(window_id)}; `appliance mode schedule list` shows all."
            raise NotFound(message, "window_id", "window_not_found")
        context.scheduler.nudge(f"window {window_id} was removed", name_of(context, caller))
        return {"id": window_id, "deleted": True}


def _policy(policy: Policy) -> dict[str, Any]:
    return {"policy": policy.kind, **columns(policy, "train_devices serving_floor")}


def _window(window: Window) -> dict[str, Any]:
    return {**columns(window, "id cron tz until for_s"), **_policy(window.policy)}


def _check(context: ControllerContext, body: ModeSet) -> None:
    devices = len(context.scheduler.status()["devices"])
    for name, value in (("serving_floor", body.serving_floor), ("train_devices", body.train_devices)):
        if value is not None and value > devices:
            raise InvalidValue(f"{name} is {value}; this box has {devices} devices. Give 0 to {devices}.", name)
    if body.policy == "split" and body.train_devices is None:
        message = "The mode 'split' needs train_devices: how many devices training may have at most."
        raise BadRequest(message, "train_devices", "missing_required_parameter")
    if body.policy != "split" and body.train_devices is not None:
        raise InvalidValue(f"train_devices belongs to the mode 'split', not to '{body.policy}'.", "train_devices")
