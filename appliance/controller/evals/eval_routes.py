"""/v1/evals: evaluations, their runs, and the result of each item
(https://platform.openai.com/docs/api-reference/evals)."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request

from appliance.controller.access.model_access import check_may_ask
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals import shapes
from appliance.controller.evals.runner import EvalRunner, insert_run
from appliance.controller.evals.shapes import (
    EvalCreate,
    EvalUpdate,
    FileId,
    Jsonl,
    RunCreate,
    Sampled,
    check_sampled,
    fields_of,
)
from appliance.controller.files.storage import FILES
from appliance.controller.grading.checks import check_code, check_completion, check_form, check_schema, grader_of
from appliance.controller.http.resource import Resource, list_object, part
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.database import Part
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.rows import EvalRow, EvalRunRow
from train.graders.errors import InvalidGrader
from train.graders.graders import judge_models

RunStatus = Annotated[Literal["queued", "in_progress", "completed", "canceled", "failed"] | None, Query()]
ItemStatus = Annotated[Literal["pass", "fail", "error"] | None, Query()]
EVALS = Resource("eval", "/v1/evals", (FINE_TUNING,), evals.find, fields=("name",))
RUNS = Resource(
    "eval_run",
    "/v1/evals/{eval_id}/runs",
    (FINE_TUNING,),
    evals.find_run,
    param="run_id",
    missing="No eval run found with id {}.",
    fields=("eval_id", "model", "status"),
)


def _known_run(eval_id: str, run_id: str, request: Request, caller: Caller) -> EvalRunRow:
    row = RUNS.known(request.app.state.context.db, run_id, caller)
    if row.eval_id != eval_id:
        raise RUNS.absent(run_id)
    return row


Run = Annotated[EvalRunRow, Depends(_known_run)]


def _order(order_by: Annotated[Literal["created_at", "updated_at"], Query()] = "created_at") -> dict[str, Any]:
    return {"order_by": "updated_s" if order_by == "updated_at" else ""}


def routes(context: ControllerContext, runner: EvalRunner) -> list[APIRouter]:
    db = context.db
    of_evals = EVALS.serve(context, shapes.eval_object, evals.page, part(20, order="asc"), _order)

    @of_evals.post("", status_code=201)
    async def create(body: EvalCreate, request: Request, caller: Caller) -> dict[str, Any]:
        criteria = await _criteria(context, body, caller)
        schema, param = body.data_source_config.item_schema, "data_source_config.item_schema"
        await check_schema(context.graders, schema, caller, param)
        kinds = schema.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            message = f"Invalid '{param}': is of type {kinds!r}, and an item is an object."
            raise BadRequest(message, param, "invalid_json_schema")

        def make() -> EvalRow:
            size, now_s = len(orjson.dumps([schema, criteria])), time.time()
            context.quotas.check(caller, size)
            row = EvalRow(
                id=new_id("eval_"),
                name=body.name or "",
                created_s=now_s,
                updated_s=now_s,
                key_id=caller.key_id,
                owner=caller.owner,
                item_schema=schema,
                include_sample=int(body.data_source_config.include_sample_schema),
                criteria=criteria,
                metadata=body.metadata,
                bytes=size,
            )
            evals.insert(db, row)
            return row

        return shapes.eval_object(EVALS.once(request, caller, await request.body(), make))

    @of_evals.post("/{eval_id}")
    async def update(eval_id: str, body: EvalUpdate, caller: Caller) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        changes = body.model_dump(exclude_unset=True)
        changes |= {"name": body.name or ""} if "name" in changes else {}
        evals.update(db, eval_id, **changes, updated_s=time.time())
        return shapes.eval_object(EVALS.known(db, eval_id, caller))

    @of_evals.delete("/{eval_id}")
    async def delete(eval_id: str, caller: Caller) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        await runner.delete(eval_id)
        return {"object": "eval.deleted", "deleted": True, "eval_id": eval_id}

    of_runs, url = RUNS.router(), context.box["public_url"]

    def view(row: EvalRunRow) -> dict[str, Any]:
        waits = context.asking.why(row.key_id, row.model) if row.status == "in_progress" and row.model else ""
        return shapes.run_object(row, url, waits)

    @of_runs.post("", status_code=201)
    async def create_run(eval_id: str, body: RunCreate, request: Request, caller: Caller) -> dict[str, Any]:
        of = EVALS.known(db, eval_id, caller)
        await _check_run(context, of, body.data_source, caller)
        source = body.data_source.model_dump(mode="json", exclude_unset=True)
        insert = partial(insert_run, context, of, caller, source, name=body.name or "", metadata=body.metadata)
        return view(RUNS.once(request, caller, await request.body(), insert))

    @of_runs.get("")
    def list_runs(
        eval_id: str, caller: Caller, part: Annotated[Part, part(20, order="asc")], status: RunStatus = None
    ) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        return list_object(evals.page_runs(db, eval_id, viewer=caller.viewer, status=status, **part), view)

    @of_runs.get("/{run_id}")
    def retrieve_run(run: Run) -> dict[str, Any]:
        return view(run)

    # The SDK has the first URL, OpenAI's specification the second.
    @of_runs.post("/{run_id}/cancel")
    @of_runs.post("/{run_id}")
    async def cancel_run(run: Run, caller: Caller) -> dict[str, Any]:
        runner.cancel(run.id)
        return view(RUNS.known(db, run.id, caller))

    @of_runs.delete("/{run_id}")
    async def delete_run(run: Run) -> dict[str, Any]:
        await runner.delete(run.id)
        return {"object": "eval.run.deleted", "deleted": True, "run_id": run.id}

    of_items = make_router(f"{RUNS.prefix}/{{run_id}}/output_items", *RUNS.scopes)

    @of_items.get("")
    def list_items(run: Run, part: Annotated[Part, part(20, order="asc")], status: ItemStatus = None) -> dict[str, Any]:
        return list_object(
            evals.page_items(db, run.id, status=status, **part), lambda row: shapes.item_object(row, run)
        )

    @of_items.get("/{item_id}")
    def retrieve_item(run: Run, item_id: str) -> dict[str, Any]:
        if (row := evals.find_item(db, run.id, item_id)) is None:
            message = f"No output item found with id {shown(item_id)}."
            raise NotFound(message, "output_item_id", "output_item_not_found")
        return shapes.item_object(row, run)

    return [of_evals, of_runs, of_items]


async def _check_run(context: ControllerContext, of: EvalRow, given: Jsonl | Sampled, caller: Principal) -> None:
    """of: the eval; another key may have made it. Raises ApiError."""
    param, hosts = "data_source", context.graders
    for model in sorted(set[str]().union(*map(judge_models, of.criteria))):
        check_may_ask(context.db, caller, model)
    if isinstance(given.source, FileId):
        FILES.known(context.db, given.source.id, caller, f"{param}.source.id")
    if isinstance(given, Jsonl):
        return
    check_may_ask(context.db, caller, given.model, f"{param}.model")
    try:
        check_sampled(given)
    except InvalidGrader as error:
        where = f"{param}.{error.param}"
        raise InvalidValue(f"Invalid '{where}': {error.message}.", where) from None
    # On a thread: the schema of its answers may have 25,000 parts.
    await asyncio.to_thread(check_completion, fields_of(given), f"{param}.sampling_params")
    if (sampling := given.sampling_params) is not None:
        await check_form(hosts, sampling.response_format, caller, f"{param}.sampling_params.response_format")
        if sampling.text is not None:
            await check_form(hosts, sampling.text.format, caller, f"{param}.sampling_params.text.format")


async def _criteria(context: ControllerContext, body: EvalCreate, caller: Principal) -> list[dict[str, Any]]:
    """The graders in their stored form. Raises BadRequest, NotFound."""
    kept: dict[str, dict[str, Any]] = {}
    for place, given in enumerate(body.testing_criteria):
        grader = grader_of(context, given, caller, f"testing_criteria.{place}")
        await check_code(context.graders, grader, caller, f"testing_criteria.{place}")
        if grader.name in kept:
            message = f"Two testing criteria are called {shown(grader.name)}; results are listed by name."
            raise BadRequest(message, f"testing_criteria.{place}.name", "invalid_grader")
        kept[grader.name] = grader.as_given()
        if grader.type == "text_similarity":
            kept[grader.name].setdefault("pass_threshold", grader.default_threshold)
    return list(kept.values())
