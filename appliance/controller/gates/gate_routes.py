"""/v1/gates: the gates that decide whether versions of the caller's models answer. A gate is made with its job."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.gates.runner import GateRunner
from appliance.controller.gates.views import gate_object
from appliance.controller.http.paging import After, WholeLimit, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.objects import gates
from appliance.store.rows import GateRow

Name = Annotated[str | None, Query(max_length=512)]


def routes(context: ControllerContext, runner: GateRunner) -> APIRouter:
    router = make_router("/v1/gates", FINE_TUNING)
    db = context.db

    def known(gate_id: str, caller: Principal) -> GateRow:
        if (row := gates.find_visible(db, gate_id, viewer=caller.viewer)) is None:
            raise NotFound(f"No gate found with id {shown(gate_id)}.", param="gate_id", code="gate_not_found")
        return row

    @router.get("")
    def list_gates(
        caller: Caller, after: After = None, limit: WholeLimit = 20, model: Name = None, job_id: Name = None
    ) -> dict[str, Any]:
        page = gates.page(db, viewer=caller.viewer, model=model, job_id=job_id, after=after, limit=limit)
        return list_object(page, lambda row: gate_object(row, caller))

    @router.get("/{gate_id}")
    def retrieve(gate_id: str, caller: Caller) -> dict[str, Any]:
        return gate_object(known(gate_id, caller), caller)

    @router.post("/{gate_id}/cancel")
    async def cancel(gate_id: str, caller: Caller) -> dict[str, Any]:
        runner.cancel(known(gate_id, caller).id)
        row = known(gate_id, caller)
        record(context, caller, "gate.cancel", row.id, model=row.model, version=row.version)
        return gate_object(row, caller)

    return router
