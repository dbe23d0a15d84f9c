"""/admin/v1/mode: the mode that divides the devices, its schedule, and a preview of what a mode would do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices.mode import (
    floor_notes,
    mode_in_force,
    mode_windows,
    policy_of,
    read_mode,
    window_of,
    write_mode,
)
from appliance.controller.http.routers import unaudited
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.http.views import handover_by_id
from appliance.controller.interfaces.errors import ApiError, BadRequest, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.interfaces.records import Mode
from appliance.store.ids import new_id
from appliance.store.records import windows
from appliance.store.rows import WindowRow, columns
from scheduler.core.errors import InvalidSchedule
from scheduler.core.workload import Policy, PolicyKind
from scheduler.loop.mode_schedule import Window, preview

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

    @router.get("/mode")
    async def get_mode() -> dict[str, Any]:
        return _mode_view(context)

    @router.put("/mode")
    async def set_mode(
        body: ModeSet, caller: Caller, wait: bool = False, timeout_s: Annotated[float | None, Query(gt=0)] = None
    ) -> dict[str, Any]:
        _check(context, body)
        by = name_of(context, caller)
        with db.transaction():
            wanted = write_mode(db, Mode(**body.model_dump(), by=by))
            record(context, caller, "mode.set", body.policy, **columns(body, "train_devices serving_floor"))
        limit_s = min(timeout_s or context.config.mode_wait_s, context.config.mode_wait_s)
        try:
            async with asyncio.timeout(limit_s):
                handover_id = await context.scheduler.set_mode(wanted, wait=wait)
        except TimeoutError as error:
            raise ApiError(
                504,
                f"The mode is set, but the hand-over to it did not end within {limit_s:.0f} s; it continues. "
                "`appliance mode history` shows how far it is.",
                kind="server_error",
                code="wait_timeout",
                headers={"x-should-retry": "false"},
            ) from error
        return _mode_view(context) | {"handover": handover_by_id(db, handover_id)}

    @router.post("/mode/plan")
    @unaudited  # a preview
    async def plan(body: ModeSet | None = None) -> dict[str, Any]:
        """What this mode would do now (without a body: the current mode), and why. Changes nothing."""
        if body is None:
            return context.scheduler.explain(None)
        _check(context, body)
        return context.scheduler.explain(policy_of(Mode(**body.model_dump()), _floor(context)))

    @router.get("/mode/schedule")
    async def list_windows() -> dict[str, Any]:
        return {"object": "list", "data": [_row(context, row) for row in windows.list_all(db)]}

    @router.post("/mode/schedule")
    async def add_window(body: WindowCreate, caller: Caller) -> dict[str, Any]:
        _check(context, body)
        row = WindowRow(id=new_id("win_", 8), created_s=time.time(), **body.model_dump())
        try:
            window_of(row, _floor(context))
        except InvalidSchedule as error:
            raise BadRequest(f"{error}.", param=error.param, code="invalid_schedule") from error

        with db.transaction():
            windows.insert(db, row)
            record(context, caller, "mode.schedule.add", row.id, **body.model_dump())
        context.scheduler.nudge(f"window {row.id} was added", name_of(context, caller))
        return _row(context, row)

    @router.get("/mode/schedule/preview")
    async def show_preview(hours: Annotated[float, Query(gt=0, le=24 * 31)] = 24.0) -> dict[str, Any]:
        """The modes of the coming hours, one entry per change."""
        mode, floor = read_mode(db), _floor(context)
        by_hand = policy_of(mode, floor), mode.since_s
        # Seconds, where a window comes each minute.
        segments = await asyncio.to_thread(preview, mode_windows(db, floor), *by_hand, time.time(), hours)
        return {
            "object": "list",
            "data": [
                {
                    "from_s": holds.since_s,
                    "to_s": holds.until_s,
                    **_policy(holds.policy),
                    "window": holds.window.id if holds.window else None,
                    "overridden": holds.overridden.id if holds.overridden else None,
                }
                for holds in segments
            ],
        }

    @router.delete("/mode/schedule/{window_id}")
    async def remove_window(window_id: str, caller: Caller) -> dict[str, Any]:
        with db.transaction():
            if not windows.delete(db, window_id):
                raise NotFound(
                    f"No window {shown(window_id)}; `appliance mode schedule list` shows all.",
                    param="window_id",
                    code="window_not_found",
                )
            record(context, caller, "mode.schedule.remove", window_id)
        context.scheduler.nudge(f"window {window_id} was removed", name_of(context, caller))
        return {"id": window_id, "deleted": True}


def _floor(context: ControllerContext) -> int:
    return context.scheduler.status()["serving_floor"]


def _mode_view(context: ControllerContext) -> dict[str, Any]:
    now, by_hand = context.scheduler.status(), read_mode(context.db)
    holds = mode_in_force(context.db, now["serving_floor"], time.time())
    return {
        **_policy(holds.policy),
        "since_s": holds.since_s,
        "until_s": holds.until_s,
        "set_by": "window" if holds.window else "hand",
        "window": holds.window and _window(holds.window),
        "overridden": holds.overridden and _window(holds.overridden),
        "by_hand": asdict(by_hand),
        "notes": floor_notes(holds.policy, len(now["devices"])),
    }


def _policy(policy: Policy) -> dict[str, Any]:
    return {"policy": policy.kind, **columns(policy, "train_devices serving_floor")}


def _row(context: ControllerContext, row: WindowRow) -> dict[str, Any]:
    window = window_of(row, _floor(context))
    return {**_window(window), "created_s": row.created_s, "next_s": window.next_s(time.time())}


def _window(window: Window) -> dict[str, Any]:
    return {**columns(window, "id cron tz until for_s"), **_policy(window.policy)}


def _check(context: ControllerContext, body: ModeSet) -> None:
    device_count = len(context.scheduler.status()["devices"])
    for name, value in (("serving_floor", body.serving_floor), ("train_devices", body.train_devices)):
        if value is not None and value > device_count:
            raise InvalidValue(
                f"{name} is {value}; this box has {device_count} devices. Give 0 to {device_count}.", name
            )
    if body.policy == "split":
        if body.train_devices is None:
            raise BadRequest(
                "The mode 'split' needs train_devices: how many devices training may have at most.",
                param="train_devices",
                code="missing_required_parameter",
            )
    elif body.train_devices is not None:
        raise InvalidValue(f"train_devices belongs to the mode 'split', not to '{body.policy}'.", "train_devices")
