"""/admin/v1: routes for operating the whole box: status, metrics, tiers, doctor, audit, hand-overs, logs; devices and
their holders, energy, nodes; the mode that divides the devices, its schedule, and previews of modes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field, StringConstraints
from starlette.responses import PlainTextResponse

from appliance.controller.admin.metrics import ControllerCollector, read_engines
from appliance.controller.context.context import ControllerContext, name_of, record
from appliance.controller.devices import cordons, mode
from appliance.controller.http.resource import RECENT, list_object, listed, part
from appliance.controller.http.routers import Readings, Status, StrictBody, answer, audited, needs, unaudited
from appliance.controller.interfaces.errors import (
    NEVER_RETRY,
    ApiError,
    BadRequest,
    InvalidValue,
    NotFound,
    OperationFailed,
    shown,
)
from appliance.controller.interfaces.principal import ADMIN, METRICS, READ, Caller
from appliance.controller.jobs.events import add_message
from appliance.controller.openai.job_routes import job_object
from appliance.store import jobs, keys
from appliance.store.database import Database, Part
from appliance.store.rows import AUDIT, HANDOVERS, WINDOWS, AuditRow, HandoverRow, WindowRow, columns, new_id
from runtime.logs import end_of, logs_in
from scheduler.core.errors import InvalidSchedule
from scheduler.core.workload import Policy, PolicyKind
from scheduler.handover.effects import StepRecord
from scheduler.loop.mode_schedule import Window

_LOG_BYTES = 256 * 1024
LONGEST_WAIT_S = 900.0


def routes(context: ControllerContext, router: APIRouter) -> None:
    db, logs = context.db, Path(context.box["data_dir"]) / "logs"
    _device_routes(context, router)
    _mode_routes(context, router)

    @router.get("/status", response_model=dict[str, Any])
    async def status(now: Status, caller: Caller) -> Response:
        load, last, readings = context.bus.load(), context.last_backup(), context.health.newest()
        of_box = {"started_s": context.started_s, "certificate_expires_s": load.certificate_expires_s}
        of_loop = {
            "box": {**context.box, **of_box, "backup": None if last is None else asdict(last)},
            "power": context.power.status(),
            "requests": {
                name: {"inflight": model.inflight, "held": model.held}
                for name, model in load.models.items()
                if model.inflight or model.held
            },
            "degraded": [*context.background.degraded(), *context.main_troubles()],
            **{name: now[name] for name in ("replicas", "memory", "troubles")},
        }

        def of_store() -> dict[str, Any]:
            holds = mode.mode_in_force(db, now["serving_floor"], time.time()).policy
            return {
                **of_loop,
                "mode": {"policy": holds.kind, "train_devices": holds.train_devices},
                "devices": cordons.metered(cordons.in_view(db, now["devices"]), readings),
                "jobs": [job_object(row, context.config.organization) for row in jobs.list_unfinished(db)],
                "handover": handover_by_id(db, now["handover"]),
                "notes": [*now["notes"], *mode.floor_notes(holds, len(now["devices"])), *load.notes],
            }

        return await answer(of_store)

    # No `response_class` here: it would also declare errors as plain text in the OpenAPI document.
    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    @needs(READ, METRICS)
    async def prometheus_metrics(now: Status, caller: Caller) -> Response:
        """Return the controller's series in Prometheus' text format; the gateway's /metrics adds its own."""
        collector = ControllerCollector(context, now, await read_engines(context.routing.open_engines()))
        return await answer(lambda: PlainTextResponse(generate_latest(collector), media_type=CONTENT_TYPE_LATEST))

    @router.get("/tiers")
    def tiers() -> dict[str, Any]:
        return {"object": "list", "data": context.tiers.status()}

    @router.get("/doctor")
    async def doctor(caller: Caller) -> dict[str, Any]:
        """Return the findings of `appliance doctor` for the box and its machine, at most half a minute old; the scope
        `read` does not see names of keys."""
        try:
            report = await context.doctor.look()
        except OperationFailed as error:
            raise ApiError(500, str(error), code=error.code, kind="server_error") from error
        data = [finding for finding in report["data"] if caller.is_admin or finding["check"] != "keys"]
        return {"object": "list", **report, "data": data}

    @router.get("/audit")
    @needs(ADMIN)
    def list_audit(part: Annotated[Part, RECENT]) -> dict[str, Any]:
        names = {row.id: row.name for row in keys.list_all(db)}

        def view(row: AuditRow) -> dict[str, Any]:
            """Return an audit entry as the API shows it. `by`: the key's name, "box" for actions without a key."""
            by = names.get(row.key_id or "", row.key_id or "box")
            return {"by": by, **columns(row, "id key_id action target outcome detail request_id created_s")}

        return list_object(AUDIT.page(db, **part), view)

    @router.get("/handovers")
    def list_handovers(part: Annotated[Part, part(20, most=1000)]) -> dict[str, Any]:
        return list_object(HANDOVERS.page(db, **part), _handover)

    @router.get("/handovers/{handover_id}")
    def show_handover(handover_id: str) -> dict[str, Any]:
        if (handover := handover_by_id(db, handover_id)) is None:
            message = f"No hand-over {shown(handover_id)}; `appliance mode history` lists the newest."
            raise NotFound(message, "handover_id", "handover_not_found")
        return handover

    # Only administrators may read logs, because logs name people and their requests.
    @router.get("/logs")
    @needs(ADMIN)
    def list_logs() -> dict[str, Any]:
        """List the readable logs, most recently written first."""
        return {"object": "list", "data": logs_in(logs)[:500]}

    @router.get("/logs/{name:path}")
    @needs(ADMIN)
    def show_log(name: str, lines: Annotated[int, Query(ge=1, le=5000)] = 500) -> dict[str, Any]:
        """Return the last `lines` lines of a log, 256 KiB at most."""
        # Only listed names are opened: a client's text is never used as a path.
        if name not in {log["name"] for log in logs_in(logs)}:
            raise NotFound(f"No log {shown(name)}; GET /admin/v1/logs lists them.", "name", "log_not_found")
        return {"name": name, "lines": end_of(logs / name, _LOG_BYTES)[-lines:]}


# --- hand-overs; the CLI and scripts rely on the views' keys


def handover_by_id(db: Database, handover_id: str | None) -> dict[str, Any] | None:
    """Return the view of the hand-over with this id; None if it does not exist."""
    row = HANDOVERS.find(db, handover_id) if handover_id else None
    return _handover(row) if row else None


def _handover(row: HandoverRow) -> dict[str, Any]:
    """`bytes`: sum over all steps; `asked_by`: a key's name, "box" (a local command), "window ID" or "scheduler"."""
    steps = [step_view(StepRecord(**step)) for step in row.steps]
    return {
        "id": str(row.id),
        **columns(row, "reason state started_s ended_s"),
        **{name: getattr(row, name) or None for name in ("asked_by", "asked_for", "error")},
        "seconds": None if row.ended_s is None else row.ended_s - row.started_s,
        "bytes": sum(s["bytes"] or 0 for s in steps),
        "steps": steps,
    }


def step_view(row: StepRecord) -> dict[str, Any]:
    """`seconds`: duration of the step. `bytes`: bytes moved in `moved_s` seconds (None for starts of processes, which
    mostly do not copy). `path`: how weights were loaded ("in place", "layerwise"), or where they are ("shared memory").
    These three are None for a step that moves nothing."""
    detail, parts = row.detail, row.detail.get("seconds")
    count = sum(detail.get("bytes_read") or ()) or detail.get("bytes")
    moved_s = detail.get("load_s", parts.get("snapshot") if isinstance(parts, dict) else None)
    return {
        **columns(row, "verb target state started_s ended_s undoes detail"),
        "seconds": None if row.started_s is None or row.ended_s is None else row.ended_s - row.started_s,
        "bytes": count,
        "moved_s": moved_s,
        "bytes_per_s": count / moved_s if count and moved_s else None,
        "path": detail["how"].replace("-", " ") if detail.get("how") else "shared memory" if count else None,
    }


# --- devices, power and nodes


class Drain(StrictBody):
    reason: Annotated[str, StringConstraints(max_length=512)] = ""


def _device_routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    def known(device_id: str) -> dict[str, Any]:
        """Return the device with this id. Raises NotFound."""
        for device in cordons.in_view(db, context.scheduler.status()["devices"]):
            if device["id"] == device_id:
                return device
        message = f"The box has no device {shown(device_id)}; `appliance gpu list` shows them."
        raise NotFound(message, "device_id", "device_not_found")

    @router.get("/devices")
    def devices(now: Status, readings: Readings) -> dict[str, Any]:
        return listed(cordons.metered(cordons.in_view(db, now["devices"]), readings))

    @router.post("/devices/{device_id:path}/drain")
    @audited("device.drain", "holder")
    async def drain(device_id: str, caller: Caller, body: Drain | None = None) -> dict[str, Any]:
        """Move the device's holder elsewhere, and refuse new holders until `undrain`. Idempotent; GET /devices shows
        when the device is free."""
        device, reason = known(device_id), body.reason if body else ""
        holder, by = device["holder"], name_of(context, caller)
        with db.transaction():
            fresh = cordons.drain(db, device, reason, by, time.time())
            if fresh and holder and holder["kind"] == "job" and jobs.find(db, holder["id"]):
                # The holder's owner reads this reason, and may not see the names of other owners' keys.
                why = f": {reason}" if reason else ""
                text = f"Device {device_id} is drained by an operator{why}; the job moves off it."
                add_message(db, holder["id"], text, level="warn", data={"device": device_id, "reason": reason})
        context.scheduler.nudge(f"drain of {device_id}", by)
        return known(device_id)

    @router.post("/devices/{device_id:path}/undrain")
    @audited("device.undrain")
    async def undrain(device_id: str, caller: Caller) -> dict[str, Any]:
        """Put the device back into use. Idempotent."""
        cordons.undrain(db, known(device_id))
        context.scheduler.nudge(f"undrain of {device_id}", name_of(context, caller))
        return known(device_id)

    @router.get("/power")
    def power(
        readings: Readings, since_s: Annotated[float, Query(ge=0, le=1e11, description="Unix time")] = 0.0
    ) -> dict[str, Any]:
        """Return the power limit in force, and the total energy of each job that was running after `since_s`. `meters`:
        number of devices that count energy."""
        now_s = time.time()
        return {
            "object": "list",
            "limits": context.power.status(),
            "meters": sum(reading.energy_j is not None for reading in readings.values()),
            "since_s": since_s,
            "until_s": now_s,
            "data": [
                {"job": row.id, "metered_s": row.metered_s, **(mode.of_job(db, row, now_s) or {})}
                for row in jobs.list_metered(db, since_s)
            ],
        }

    @router.get("/nodes")
    async def nodes() -> dict[str, Any]:
        """List the nodes; `answered_s` is null for a node that does not answer within a second."""
        return listed(context.nodes.status())

    @router.delete("/nodes/{name}")
    @audited("node.forget", "devices")
    async def forget_node(name: str, caller: Caller) -> dict[str, Any]:
        """Remove a lost node's devices from the list. The node may still join again."""
        if (devices := cordons.forget(db, name)) is None:
            message = f"The box has lost no node {shown(name)}; `appliance gpu list` shows those of lost ones. A node"
            raise NotFound(f"{message} that is there leaves with Ctrl-C or SIGTERM.", "name", "node_not_lost")
        return {"id": name, "deleted": True, "devices": devices}


# --- the mode and the mode windows

Cron = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class ModeSet(StrictBody):
    """serving_floor: number of devices that serving keeps; if omitted, the box's default."""

    policy: PolicyKind
    train_devices: Annotated[int, Field(ge=0)] | None = None
    serving_floor: Annotated[int, Field(ge=0)] | None = None


class WindowCreate(ModeSet):
    """A window begins when `cron` fires; it ends when `until` fires, after `for_s` seconds, or when another window
    begins."""

    cron: Cron
    tz: Annotated[str, StringConstraints(min_length=1, max_length=64)] = "UTC"
    until: Cron | None = None
    for_s: float | None = None


def _mode_routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    def floor() -> int:
        return context.scheduler.status()["serving_floor"]

    def row_view(row: WindowRow) -> dict[str, Any]:
        window = mode.window_of(row, floor())
        return {**_window(window), "created_s": row.created_s, "next_s": window.next_s(time.time())}

    def mode_view() -> dict[str, Any]:
        holds = mode.mode_in_force(db, floor(), time.time())
        return {
            **_policy(holds.policy),
            **columns(holds, "since_s until_s"),
            "set_by": "window" if holds.window else "hand",
            "window": holds.window and _window(holds.window),
            "overridden": holds.overridden and _window(holds.overridden),
            "by_hand": asdict(mode.read_mode(db)),
            "notes": mode.floor_notes(holds.policy, len(context.scheduler.status()["devices"])),
        }

    @router.get("/mode")
    async def get_mode() -> dict[str, Any]:
        return mode_view()

    @router.put("/mode")
    async def set_mode(
        body: ModeSet, caller: Caller, wait: bool = False, timeout_s: Annotated[float | None, Query(gt=0)] = None
    ) -> dict[str, Any]:
        _check(context, body)
        by_hand = mode.Mode(**body.model_dump(), since_s=time.time(), by=name_of(context, caller))
        with db.transaction():
            mode.write_mode(db, by_hand)
            # Recorded before waiting for the change, which may take minutes.
            record(context, caller, "mode.set", body.policy, **columns(body, "train_devices serving_floor"))
        limit_s = min(timeout_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
        try:
            async with asyncio.timeout(limit_s):
                handover_id = await context.scheduler.set_mode(by_hand, wait=wait)
        except TimeoutError as error:
            text = f"The mode is set, but its hand-over did not end within {limit_s:.0f} s; it continues."
            message = f"{text} `appliance mode history` shows how far it is."
            raise ApiError(504, message, code="wait_timeout", kind="server_error", headers=NEVER_RETRY) from error
        return mode_view() | {"handover": handover_by_id(db, handover_id)}

    @router.post("/mode/plan")
    @unaudited  # a POST because it has a body; it changes nothing
    async def plan(body: ModeSet | None = None) -> dict[str, Any]:
        """Show what a mode (without a body: the current mode) would do now, and why. Changes nothing."""
        if body is not None:
            _check(context, body)
        return context.scheduler.loop.explain(body and mode.policy_of(mode.Mode(**body.model_dump()), floor()))

    @router.get("/mode/schedule")
    async def list_windows() -> dict[str, Any]:
        return listed([row_view(row) for row in WINDOWS.list_all(db)])

    @router.post("/mode/schedule")
    @audited("mode.schedule.add")
    async def add_window(body: WindowCreate, caller: Caller) -> dict[str, Any]:
        _check(context, body)
        row = WindowRow(id=new_id("win_", 8), created_s=time.time(), **body.model_dump())
        try:
            mode.window_of(row, floor())
        except InvalidSchedule as error:
            raise BadRequest(f"{error}.", error.param, "invalid_schedule") from error
        WINDOWS.insert(db, row)
        context.scheduler.nudge(f"window {row.id} was added", name_of(context, caller))
        return row_view(row)

    @router.delete("/mode/schedule/{window_id}")
    @audited("mode.schedule.remove")
    async def remove_window(window_id: str, caller: Caller) -> dict[str, Any]:
        if not WINDOWS.delete(db, window_id):
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
