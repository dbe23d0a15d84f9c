"""/v1/sweeps: searches of hyperparameters."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http import idempotency
from appliance.controller.http.paging import After, WholeLimit, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.http.views import whose
from appliance.controller.interfaces.errors import LimitReached, NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.controller.sweeps import halving
from appliance.controller.sweeps.runner import SweepRunner, begun
from appliance.controller.sweeps.spec import SweepCreate, check_spec
from appliance.store.ids import new_id
from appliance.store.objects import jobs, sweeps
from appliance.store.rows import SweepRow, columns
from train.graders.hosts import GraderHosts

MAX_RUNNING = 4
"""How many sweeps one owner may run at the same time."""
ROUTE = "sweeps"
Id = Annotated[str, Path(max_length=256)]


def routes(context: ControllerContext, runner: SweepRunner, hosts: GraderHosts) -> APIRouter:
    router = make_router("/v1/sweeps", FINE_TUNING)
    db = context.db

    def known(sweep_id: str, caller: Principal) -> SweepRow:
        if (row := sweeps.find_visible(db, sweep_id, viewer=caller.viewer)) is None:
            raise NotFound(f"No sweep found with id {shown(sweep_id)}.", param="sweep_id", code="sweep_not_found")
        return row

    @router.post("")
    async def create(body: SweepCreate, request: Request, caller: Caller) -> dict[str, Any]:
        attempt = idempotency.Attempt.of(request, caller, ROUTE, body.model_dump(mode="json"))
        known_before = partial(sweeps.find_visible, db, viewer=caller.viewer)
        if (earlier := idempotency.earlier(db, context.config, attempt, known_before)) is not None:
            return sweep_object(context, earlier, caller)
        await check_spec(context, hosts, body.spec, caller)

        def make() -> SweepRow:
            if len(sweeps.running(db, caller.owner)) >= MAX_RUNNING and not caller.is_admin:
                text = f"{MAX_RUNNING} of your sweeps go on; wait for the end of one or cancel it."
                raise LimitReached(text, retry=True)
            row = SweepRow(
                new_id("sweep_"),
                body.spec.name,
                time.time(),
                caller.key_id,
                caller.owner,
                spec=body.spec.model_dump(exclude_none=True),
                trials=begun(body.spec),
            )
            sweeps.insert(db, row)
            record(context, caller, "sweep.create", row.id, trials=len(row.trials))
            return row

        row, _ = idempotency.once(db, context.config, attempt, known_before, make)
        return sweep_object(context, row, caller)

    @router.get("")
    def list_sweeps(caller: Caller, after: After = None, limit: WholeLimit = 20) -> dict[str, Any]:
        page = sweeps.page(db, viewer=caller.viewer, after=after, limit=limit)
        return list_object(page, lambda row: sweep_object(context, row, caller))

    @router.get("/{sweep_id}")
    def retrieve(sweep_id: Id, caller: Caller) -> dict[str, Any]:
        return sweep_object(context, known(sweep_id, caller), caller)

    @router.post("/{sweep_id}/cancel")
    async def cancel(sweep_id: Id, caller: Caller) -> dict[str, Any]:
        await runner.cancel(known(sweep_id, caller))
        row = known(sweep_id, caller)
        record(context, caller, "sweep.cancel", row.id, state=row.state)
        return sweep_object(context, row, caller)

    return router


def sweep_object(context: ControllerContext, row: SweepRow, caller: Principal) -> dict[str, Any]:
    """`rounds`: each round's share of the data and number of trials. `best`: parameters, loss and model of the best
    trial once the sweep has ended."""
    plan = halving.rounds(len(row.trials), row.spec["first"], row.spec["keep_one_in"])
    return {
        "id": row.id,
        "object": "sweep",
        "created_at": int(row.created_s),
        **columns(row, "name spec state round trials"),
        "reason": row.reason or None,
        "rounds": [{"share": one.share, "trials": one.trials} for one in plan],
        "best": _best(context, row),
        "device_hours": row.spent_s / 3600,
        "ended_at": None if row.ended_s is None else int(row.ended_s),
    } | whose(row, caller)


def _best(context: ControllerContext, row: SweepRow) -> dict[str, Any] | None:
    if row.best is None:
        return None
    trial = row.trials[row.best]
    last = next(one for one in reversed(trial["jobs"]) if one["loss"] is not None)
    job = jobs.find(context.db, trial["jobs"][-1]["job_id"])
    model = job.output_model if job is not None and job.phase == "succeeded" and row.state == "succeeded" else None
    return {"trial": row.best, "parameters": trial["parameters"], "loss": last["loss"], "model": model}
