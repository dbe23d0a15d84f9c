"""/v1/evals: evaluations, their runs, and the result of each item
(https://platform.openai.com/docs/api-reference/evals)."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request

from appliance.controller.access.model_access import check_may_ask
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals import views
from appliance.controller.evals.requests import (
    EvalCreate,
    EvalUpdate,
    FileId,
    Jsonl,
    RunCreate,
    Sampled,
    check_sampled,
    fields_of,
)
from appliance.controller.evals.runner import EvalRunner, insert_run
from appliance.controller.files.storage import FILES
from appliance.controller.grading.given import check_asked, check_code, check_form, check_schema, grader_of
from appliance.controller.http.paging import list_object, part
from appliance.controller.http.resource import Resource
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.database import Database, Part
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.rows import EvalRow, EvalRunRow
from train.graders.errors import InvalidGrader
from train.graders.graders import judge_models
from train.graders.hosts import GraderHosts

RunStatus = Annotated[Literal["queued", "in_progress", "completed", "canceled", "failed"] | None, Query()]
ItemStatus = Annotated[Literal["pass", "fail", "error"] | None, Query()]
EVALS = Resource(
    "eval",
    "/v1/evals",
    (FINE_TUNING,),
    evals.find,
    fields=("name",),
)
RUNS = Resource(
    "eval_run",
    "/v1/evals/{eval_id}/runs",
    (FINE_TUNING,),
    evals.find_run,
    id_name="run_id",
    missing="No eval run found with id {}.",
    fields=("eval_id", "model", "status"),
)


def routes(context: ControllerContext, runner: EvalRunner, hosts: GraderHosts) -> list[APIRouter]:
    return [_evals(context, runner, hosts), _runs(context, runner, hosts), _items(context.db)]


def _known_run(db: Database, eval_id: str, run_id: str, caller: Principal) -> EvalRunRow:
    row = RUNS.known(db, run_id, caller)
    if row.eval_id != eval_id:
        raise RUNS.absent(run_id)
    return row


def _order(order_by: Annotated[Literal["created_at", "updated_at"], Query()] = "created_at") -> dict[str, Any]:
    return {"order_by": "updated_s" if order_by == "updated_at" else ""}


def _evals(context: ControllerContext, runner: EvalRunner, hosts: GraderHosts) -> APIRouter:
    router, db = EVALS.serve(context, views.eval_object, evals.page, part(20, order="asc"), _order), context.db

    @router.post("", status_code=201)
    async def create(body: EvalCreate, request: Request, caller: Caller) -> dict[str, Any]:
        attempt = EVALS.attempt(request, caller, await request.body())
        if (earlier := attempt.earlier()) is not None:
            return views.eval_object(earlier)
        criteria = await _criteria(context, hosts, body, caller)
        await _check_schema(hosts, body.data_source_config.item_schema, caller)
        row, _ = attempt.once(lambda: _insert_eval(context, body, criteria, caller))
        return views.eval_object(row)

    @router.post("/{eval_id}")
    async def update(eval_id: str, body: EvalUpdate, caller: Caller) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        changes = {name: getattr(body, name) for name in body.model_fields_set}
        if "name" in changes:
            changes["name"] = changes["name"] or ""
        evals.update(db, eval_id, **changes, updated_s=time.time())
        return views.eval_object(EVALS.known(db, eval_id, caller))

    @router.delete("/{eval_id}")
    async def delete(eval_id: str, caller: Caller) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        await runner.delete(eval_id)
        return {"object": "eval.deleted", "deleted": True, "eval_id": eval_id}

    return router


def _insert_eval(
    context: ControllerContext,
    body: EvalCreate,
    criteria: list[dict[str, Any]],
    caller: Principal,
) -> EvalRow:
    source, now_s = body.data_source_config, time.time()
    size = len(orjson.dumps([source.item_schema, criteria]))
    context.quotas.check(caller, size)
    row = EvalRow(
        id=new_id("eval_"),
        name=body.name or "",
        created_s=now_s,
        updated_s=now_s,
        key_id=caller.key_id,
        owner=caller.owner,
        item_schema=source.item_schema,
        include_sample=int(source.include_sample_schema),
        criteria=criteria,
        metadata=body.metadata,
        bytes=size,
    )
    evals.insert(context.db, row)
    return row


def _runs(context: ControllerContext, runner: EvalRunner, hosts: GraderHosts) -> APIRouter:
    # The address that browsers see, if the box knows it: behind a proxy, or at 0.0.0.0, its own address is of no use to
    # them.
    router, db, url = RUNS.router(), context.db, context.box.get("public_url", "")

    def view(row: EvalRunRow) -> dict[str, Any]:
        return views.run_object(row, url, runner.waits_for(row))

    @router.post("", status_code=201)
    async def create_run(eval_id: str, body: RunCreate, request: Request, caller: Caller) -> dict[str, Any]:
        of = EVALS.known(db, eval_id, caller)
        attempt = RUNS.attempt(request, caller, of.id.encode() + await request.body())
        if (earlier := attempt.earlier()) is not None:
            return view(earlier)
        await _check_run(context, hosts, of, body.data_source, caller)
        data_source = body.data_source.model_dump(mode="json", exclude_unset=True)

        def make() -> EvalRunRow:
            return insert_run(context, of, caller, data_source, name=body.name or "", metadata=body.metadata)

        row, _ = attempt.once(make)
        return view(row)

    @router.get("")
    def list_runs(
        eval_id: str, caller: Caller, part: Annotated[Part, part(20, order="asc")], status: RunStatus = None
    ) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        return list_object(evals.page_runs(db, eval_id, viewer=caller.viewer, status=status, **part), view)

    @router.get("/{run_id}")
    def retrieve_run(eval_id: str, run_id: str, caller: Caller) -> dict[str, Any]:
        return view(_known_run(db, eval_id, run_id, caller))

    # The SDK has the first URL, OpenAI's specification the second.
    @router.post("/{run_id}/cancel")
    @router.post("/{run_id}")
    async def cancel_run(eval_id: str, run_id: str, caller: Caller) -> dict[str, Any]:
        _known_run(db, eval_id, run_id, caller)
        runner.cancel(run_id)
        return view(_known_run(db, eval_id, run_id, caller))

    @router.delete("/{run_id}")
    async def delete_run(eval_id: str, run_id: str, caller: Caller) -> dict[str, Any]:
        _known_run(db, eval_id, run_id, caller)
        await runner.delete(run_id)
        return {"object": "eval.run.deleted", "deleted": True, "run_id": run_id}

    return router


def _items(db: Database) -> APIRouter:
    router = make_router(f"{RUNS.prefix}/{{run_id}}/output_items", *RUNS.scopes)

    @router.get("")
    def list_items(
        eval_id: str,
        run_id: str,
        caller: Caller,
        part: Annotated[Part, part(20, order="asc")],
        status: ItemStatus = None,
    ) -> dict[str, Any]:
        run = _known_run(db, eval_id, run_id, caller)
        return list_object(evals.page_items(db, run_id, status=status, **part), lambda row: views.item_object(row, run))

    @router.get("/{item_id}")
    def retrieve_item(eval_id: str, run_id: str, item_id: str, caller: Caller) -> dict[str, Any]:
        run = _known_run(db, eval_id, run_id, caller)
        if (row := evals.find_item(db, run_id, item_id)) is None:
            raise NotFound(
                f"No output item found with id {shown(item_id)}.", param="output_item_id", code="output_item_not_found"
            )
        return views.item_object(row, run)

    return router


async def _check_run(
    context: ControllerContext, hosts: GraderHosts, of: EvalRow, given: Jsonl | Sampled, caller: Principal
) -> None:
    """of: the eval; another key may have made it. Raises ApiError."""
    param = "data_source"
    for model in sorted(set[str]().union(*map(judge_models, of.criteria))):
        check_may_ask(context.db, caller, model)
    if isinstance(given.source, FileId):
        FILES.known(context.db, given.source.id, caller, f"{param}.source.id")
    if isinstance(given, Jsonl):
        return
    check_may_ask(context.db, caller, given.model, param=f"{param}.model")
    try:
        check_sampled(given)
    except InvalidGrader as error:
        where = f"{param}.{error.param}"
        raise InvalidValue(f"Invalid '{where}': {error.message}.", where) from None
    # On a thread: the schema of its answers may have 25,000 parts.
    await asyncio.to_thread(check_asked, fields_of(given), f"{param}.sampling_params")
    if (sampling := given.sampling_params) is not None:
        await check_form(hosts, sampling.response_format, caller, f"{param}.sampling_params.response_format")
        if sampling.text is not None:
            await check_form(hosts, sampling.text.format, caller, f"{param}.sampling_params.text.format")


async def _check_schema(hosts: GraderHosts, schema: dict[str, Any], caller: Principal) -> None:
    """Raises BadRequest for a schema that no item can follow, ApiError where the box could not check it."""
    param, kinds = "data_source_config.item_schema", schema.get("type", "object")
    await check_schema(hosts, schema, caller, param)
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        refused = f"is of type {kinds!r}, and an item is an object"
        raise BadRequest(f"Invalid '{param}': {refused}.", param=param, code="invalid_json_schema")


async def _criteria(
    context: ControllerContext, hosts: GraderHosts, body: EvalCreate, caller: Principal
) -> list[dict[str, Any]]:
    """The graders in their stored form. Raises BadRequest, NotFound."""
    kept: dict[str, dict[str, Any]] = {}
    for place, given in enumerate(body.testing_criteria):
        grader = grader_of(context, given, caller, f"testing_criteria.{place}")
        await check_code(hosts, grader, caller, f"testing_criteria.{place}")
        if grader.name in kept:
            raise BadRequest(
                f"Two testing criteria are called {shown(grader.name)}; results are listed by name.",
                param=f"testing_criteria.{place}.name",
                code="invalid_grader",
            )
        kept[grader.name] = grader.as_given()
        if grader.type == "text_similarity":
            kept[grader.name].setdefault("pass_threshold", grader.default_threshold)
    return list(kept.values())
