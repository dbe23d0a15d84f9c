"""/v1/pipelines and /v1/pipeline_runs: the caller's pipelines, their schedules, and their runs."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.paging import After, WholeLimit, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.http.views import whose
from appliance.controller.interfaces.errors import BadRequest, Conflict, LimitReached, NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.controller.openai.new_job import check_judging
from appliance.controller.pipelines import new_data
from appliance.controller.pipelines.runner import PipelineRunner
from appliance.controller.pipelines.spec import PipelineSpec, check_spec, first_job_of
from appliance.store.ids import new_id
from appliance.store.objects import gates, pipelines
from appliance.store.rows import PipelineRow, PipelineRunRow, columns
from train.graders.hosts import GraderHosts

MAX_PIPELINES = 100
"""How many pipelines one owner may have."""
Name = Annotated[str, Path(max_length=256)]


class PipelineCreate(StrictBody):
    """Replaces the owner's pipeline of that name, if there is one."""

    spec: PipelineSpec


class PipelineSchedule(StrictBody):
    on: bool


def routes(context: ControllerContext, runner: PipelineRunner, hosts: GraderHosts) -> tuple[APIRouter, APIRouter]:
    return _pipelines(context, runner, hosts), _runs(context, runner)


def _pipelines(context: ControllerContext, runner: PipelineRunner, hosts: GraderHosts) -> APIRouter:
    router = make_router("/v1/pipelines", FINE_TUNING)
    db = context.db

    def known(name: str, caller: Principal) -> PipelineRow:
        if (row := pipelines.find(db, name, viewer=caller.viewer)) is None:
            raise NotFound(f"No pipeline called {shown(name)}.", param="name", code="pipeline_not_found")
        return row

    def view(row: PipelineRow, caller: Principal) -> dict[str, Any]:
        last = pipelines.last_of(db, row.id)
        return pipeline_object(row, caller) | {"last_run": None if last is None else run_object(context, last, caller)}

    @router.post("")
    async def put(body: PipelineCreate, caller: Caller) -> dict[str, Any]:
        check_spec(context, body.spec, caller)
        before = pipelines.of_owner(db, caller.owner, body.spec.name)
        if before is not None and before.scheduled and body.spec.schedule is not None:
            await _check_folder(body.spec)
        await check_judging(context, hosts, first_job_of(body.spec), caller)
        spec = body.spec.model_dump(exclude_none=True)
        with db.transaction():
            row = pipelines.of_owner(db, caller.owner, body.spec.name)
            if row is None:
                if pipelines.number_of(db, caller.owner) >= MAX_PIPELINES and not caller.is_admin:
                    raise LimitReached(f"You have {MAX_PIPELINES} pipelines; delete one first.")
                row = PipelineRow(new_id("pipe_"), body.spec.name, time.time(), caller.key_id, caller.owner, spec=spec)
                pipelines.insert(db, row)
            else:
                pipelines.update(db, row.id, spec=spec, key_id=caller.key_id)
                if row.scheduled:
                    runner.schedule(known(row.id, caller), body.spec.schedule is not None)
            record(context, caller, "pipeline.put", row.name, pipeline=row.id)
        return view(known(row.id, caller), caller)

    @router.get("")
    def list_pipelines(caller: Caller, after: After = None, limit: WholeLimit = 20) -> dict[str, Any]:
        page = pipelines.page(db, viewer=caller.viewer, after=after, limit=limit)
        return list_object(page, lambda row: view(row, caller))

    @router.get("/{name}")
    def retrieve(name: Name, caller: Caller) -> dict[str, Any]:
        return view(known(name, caller), caller)

    @router.delete("/{name}")
    async def delete(name: Name, caller: Caller) -> dict[str, Any]:
        row = known(name, caller)
        if (going := pipelines.running_of(db, row.id)) is not None:
            raise Conflict(f"{going.id} of {row.name} goes on; cancel it first.", param="name", code="pipeline_running")
        pipelines.delete(db, row.id)
        record(context, caller, "pipeline.delete", row.name, pipeline=row.id)
        return {"id": row.id, "object": "pipeline.deleted", "deleted": True}

    @router.post("/{name}/schedule")
    async def schedule(name: Name, body: PipelineSchedule, caller: Caller) -> dict[str, Any]:
        """Switch the schedule on, with the key that wrote the pipeline, or off: then it runs only when asked."""
        row = known(name, caller)
        if body.on:
            await _check_folder(PipelineSpec.model_validate(row.spec))
        runner.schedule(row, body.on)
        record(context, caller, "pipeline.schedule", row.name, on=body.on)
        return view(known(row.id, caller), caller)

    @router.post("/{name}/runs")
    async def run(name: Name, caller: Caller) -> dict[str, Any]:
        return run_object(context, runner.begin(known(name, caller), "request"), caller)

    @router.get("/{name}/runs")
    def list_runs(name: Name, caller: Caller, after: After = None, limit: WholeLimit = 20) -> dict[str, Any]:
        row = known(name, caller)
        page = pipelines.page_runs(db, row.id, viewer=caller.viewer, after=after, limit=limit)
        return list_object(page, lambda one: run_object(context, one, caller))

    return router


async def _check_folder(spec: PipelineSpec) -> None:
    """Whoever schedules a pipeline may never look at its runs. Raises BadRequest for a folder that cannot be read."""
    folder = spec.data.folder
    if folder is None:
        return
    try:
        await asyncio.to_thread(new_data.in_folder, folder, spec.data.pattern, time.time())
    except new_data.NoData as error:
        raise BadRequest(f"{error}.", param="data.folder", code="folder_not_readable") from error


def _runs(context: ControllerContext, runner: PipelineRunner) -> APIRouter:
    router = make_router("/v1/pipeline_runs", FINE_TUNING)
    db = context.db

    def known(run_id: str, caller: Principal) -> PipelineRunRow:
        if (row := pipelines.find_run_visible(db, run_id, viewer=caller.viewer)) is None:
            raise NotFound(f"No run of a pipeline with id {shown(run_id)}.", param="run_id", code="run_not_found")
        return row

    @router.get("/{run_id}")
    def retrieve(run_id: Name, caller: Caller) -> dict[str, Any]:
        return run_object(context, known(run_id, caller), caller)

    @router.post("/{run_id}/cancel")
    async def cancel(run_id: Name, caller: Caller) -> dict[str, Any]:
        runner.cancel(known(run_id, caller).id)
        row = known(run_id, caller)
        record(context, caller, "pipeline.cancel", row.id, state=row.state)
        return run_object(context, row, caller)

    return router


def pipeline_object(row: PipelineRow, caller: Principal) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "pipeline",
        "name": row.name,
        "created_at": int(row.created_s),
        "spec": row.spec,
        "scheduled": bool(row.scheduled),
        "next_at": None if row.next_s is None else int(row.next_s),
        "note": row.note or None,
    } | whose(row, caller)


def run_object(context: ControllerContext, row: PipelineRunRow, caller: Principal) -> dict[str, Any]:
    """`data`: how many files and bytes the run takes, without their names."""
    gate = gates.of_job(context.db, row.job_id) if row.job_id is not None else None
    return {
        "id": row.id,
        "object": "pipeline.run",
        "name": row.spec["name"],
        "created_at": int(row.created_s),
        "outcome": row.outcome or None,
        "reason": row.reason or None,
        "data": {"files": row.data_files, "bytes": row.data_bytes},
        **columns(row, "pipeline_id trigger state steps file_id job_id"),
        "gate_id": None if gate is None else gate.id,
        "ended_at": None if row.ended_s is None else int(row.ended_s),
    } | whose(row, caller)
