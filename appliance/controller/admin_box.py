"""/admin/v1: status, devices, mode, hand-overs, jobs, audit: what runs the box as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from appliance.controller import admin_views
from appliance.controller.audit import record
from appliance.controller.context import ControllerContext
from appliance.controller.errors import ApiError, BadRequest
from appliance.controller.jobs import known_job
from appliance.controller.mode import read_mode, write_mode
from appliance.controller.paging import After, list_object
from appliance.controller.principal import Caller
from appliance.store import audit, handovers, job_records, jobs

RecentLimit = Annotated[int, Query(ge=1, le=1000)]


class ModeSet(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    policy: Literal["serve", "train", "split", "auto"]
    train_devices: Annotated[int, Field(ge=0)] | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""
    db = context.db

    def mode_view() -> dict[str, Any]:
        return asdict(read_mode(db)) | {"serving_floor": context.scheduler.status()["serving_floor"]}

    def handover_view(handover_id: str | None) -> dict[str, Any] | None:
        row = handovers.find(db, handover_id) if handover_id else None
        return admin_views.handover(db, row) if row else None

    @router.get("/status")
    async def status() -> dict[str, Any]:
        now = context.scheduler.status()
        return {
            "box": {**context.box, "started_s": context.started_s},
            "mode": {key: value for key, value in mode_view().items() if key in ("policy", "train_devices")},
            "devices": now["devices"],
            "replicas": now["replicas"],
            "jobs": [admin_views.job(row) for row in jobs.list_unfinished(db)],
            "memory": now["memory"],
            "handover": handover_view(now["handover"]),
            "notes": now["notes"],
        }

    @router.get("/devices")
    async def devices() -> dict[str, Any]:
        return {"object": "list", "data": context.scheduler.status()["devices"]}

    @router.get("/mode")
    async def get_mode() -> dict[str, Any]:
        return mode_view()

    @router.put("/mode")
    async def set_mode(
        body: ModeSet,
        caller: Caller,
        wait: bool = False,
        timeout_s: Annotated[float | None, Query(gt=0)] = None,
    ) -> dict[str, Any]:
        _check_mode(body, len(context.scheduler.status()["devices"]))
        with db.transaction():
            wanted = write_mode(db, body.policy, body.train_devices)
            record(context, caller, "mode.set", body.policy, train_devices=body.train_devices)
        limit_s = min(timeout_s or context.config.mode_wait_s, context.config.mode_wait_s)
        handover_id = None
        try:
            async with asyncio.timeout(limit_s):
                handover_id = await context.scheduler.set_mode(wanted)
                if wait and handover_id is not None:
                    await context.scheduler.wait_handover(handover_id)
        except TimeoutError as error:
            raise ApiError(
                504,
                f"The mode is set, but the hand-over to it did not end within {limit_s:.0f} s; it goes on. "
                "GET /admin/v1/handovers shows how far it is.",
                kind="server_error",
                code="wait_timeout",
                headers={"x-should-retry": "false"},
            ) from error
        return mode_view() | {"handover": handover_view(handover_id)}

    @router.get("/handovers")
    async def list_handovers(limit: RecentLimit = 20) -> dict[str, Any]:
        rows = handovers.list_recent(db, limit)
        return {"object": "list", "data": [admin_views.handover(db, row) for row in rows]}

    @router.get("/jobs")
    async def list_jobs(limit: RecentLimit = 100) -> dict[str, Any]:
        return {"object": "list", "data": [admin_views.job(row) for row in jobs.list_recent(db, limit)]}

    @router.get("/jobs/{job_id}")
    async def show_job(job_id: str) -> dict[str, Any]:
        return admin_views.job(known_job(context, job_id))

    @router.get("/jobs/{job_id}/metrics")
    async def metrics(
        job_id: str,
        after_step: Annotated[int, Query(ge=-1, lt=2**62)] = -1,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> dict[str, Any]:
        known_job(context, job_id)
        rows = job_records.list_metrics(db, job_id, after_step=after_step, limit=limit + 1)
        data = [asdict(row) for row in rows[:limit]]
        return {"object": "list", "data": data, "has_more": len(rows) > limit}

    @router.get("/audit")
    async def list_audit(after: After = None, limit: RecentLimit = 100) -> dict[str, Any]:
        return list_object(audit.page(db, after=after, limit=limit), admin_views.audit)


def _check_mode(body: ModeSet, device_count: int) -> None:
    if body.policy == "split":
        if body.train_devices is None:
            raise BadRequest("The mode 'split' needs train_devices: how many devices training may have at most.",
                             param="train_devices", code="missing_required_parameter")  # fmt: skip
        if body.train_devices > device_count:
            raise BadRequest(f"train_devices is {body.train_devices}, the box has {device_count} devices.",
                             param="train_devices", code="invalid_value")  # fmt: skip
    elif body.train_devices is not None:
        raise BadRequest(f"train_devices belongs to the mode 'split', not to '{body.policy}'.",
                         param="train_devices", code="invalid_value")  # fmt: skip
