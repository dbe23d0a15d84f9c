"""/admin/v1: status, metrics, tiers, doctor, audit, hand-overs: the routes for operating the box as a whole."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse

from appliance.controller.access.spending import ending_soon
from appliance.controller.admin.metrics import ControllerCollector, read_engines
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import floor_notes, mode_in_force
from appliance.controller.http.paging import RECENT, list_object, part
from appliance.controller.http.reading import Status, answer
from appliance.controller.http.routers import needs
from appliance.controller.http.views import handover_by_id, handover_object, job_object
from appliance.controller.interfaces.errors import ApiError, NotFound, OperationFailed, shown
from appliance.controller.interfaces.principal import ADMIN, METRICS, READ, Caller
from appliance.store.database import Part
from appliance.store.objects import jobs
from appliance.store.records import audit, keys
from appliance.store.rows import HANDOVERS, AuditRow, columns


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    @router.get("/status", response_model=dict[str, Any])
    async def status(now: Status, caller: Caller) -> Response:
        load, last = context.bus.load(), context.last_backup()
        readings = context.health.newest()
        of_loop = {
            "box": {
                **context.box,
                "started_s": context.started_s,
                "certificate_expires_s": load.certificate_expires_s,
                "backup": None if last is None else asdict(last),
            },
            "power": context.power.status(),
            "replicas": now["replicas"],
            "requests": {
                name: {"inflight": one.inflight, "held": one.held}
                for name, one in load.models.items()
                if one.inflight or one.held
            },
            "memory": now["memory"],
            "degraded": [*context.background.degraded(), *context.main_troubles()],
            "troubles": now["troubles"],
        }

        def of_store() -> dict[str, Any]:
            holds = mode_in_force(db, now["serving_floor"], time.time()).policy
            expiring = ending_soon(db, time.time()) if caller.is_admin else []
            return {
                **of_loop,
                "mode": {"policy": holds.kind, "train_devices": holds.train_devices},
                "devices": cordons.metered(cordons.in_view(db, now["devices"]), readings),
                "jobs": [job_object(row, context.config.organization) for row in jobs.list_unfinished(db)],
                "handover": handover_by_id(db, now["handover"]),
                "notes": [*now["notes"], *floor_notes(holds, len(now["devices"])), *load.notes, *expiring],
            }

        return await answer(of_store)

    # Not by `response_class`: the OpenAPI document would then say that errors are plain text too.
    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    @needs(READ, METRICS)
    async def prometheus_metrics(now: Status, caller: Caller) -> Response:
        """The controller's own series in Prometheus' text format; the gateway's /metrics merges them with its own."""
        collector = ControllerCollector(context, now, await read_engines(context.routing.open_engines()))

        def scraped() -> Response:
            return PlainTextResponse(generate_latest(collector), media_type=CONTENT_TYPE_LATEST)

        return await answer(scraped)

    @router.get("/tiers", response_model=dict[str, Any])
    async def tiers(caller: Caller) -> Response:
        listed = context.tiers.status()
        return await answer(lambda: {"object": "list", "data": listed()})

    @router.get("/doctor")
    async def doctor(caller: Caller) -> dict[str, Any]:
        """What `appliance doctor` says of this machine and the box on it, at most half a minute old; `read` does not
        see the names of keys."""
        try:
            found = await context.doctor.look()
        except OperationFailed as error:
            raise ApiError(500, str(error), kind="server_error", code=error.code) from error
        data = [finding for finding in found["data"] if caller.is_admin or finding["check"] != "keys"]
        return {"object": "list", **found, "data": data}

    @router.get("/audit")
    @needs(ADMIN)
    def list_audit(part: Annotated[Part, RECENT]) -> dict[str, Any]:
        names = {row.id: row.name for row in keys.list_all(db)}

        def view(row: AuditRow) -> dict[str, Any]:
            """`by`: the key's name, "box" for actions that needed none."""
            by = names.get(row.key_id or "", row.key_id or "box")
            return {"by": by, **columns(row, "id key_id action target outcome detail request_id created_s")}

        return list_object(audit.page(db, **part), view)

    @router.get("/handovers")
    def list_handovers(part: Annotated[Part, part(20, most=1000)]) -> dict[str, Any]:
        return list_object(HANDOVERS.page(db, **part), handover_object)

    @router.get("/handovers/{handover_id}")
    def show_handover(handover_id: str) -> dict[str, Any]:
        found = handover_by_id(db, handover_id)
        if found is None:
            raise NotFound(
                f"No hand-over {shown(handover_id)}; `appliance mode history` lists the newest.",
                param="handover_id",
                code="handover_not_found",
            )
        return found
