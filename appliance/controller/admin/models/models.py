"""/admin/v1/models and /admin/v1/operations: import models, show, verify, roll back, delete them.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import no_version, stored_model
from appliance.controller.access.naming import MODEL_NAME_RULE, is_model_name, made_by_jobs
from appliance.controller.admin import views
from appliance.controller.context import operations
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.operations import Operations
from appliance.controller.gates import views as gate_views
from appliance.controller.http import idempotency
from appliance.controller.http.idempotency import Attempt, Carried, Deed
from appliance.controller.http.paging import After, RecentLimit, list_object
from appliance.controller.http.reading import Status, answer
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import (
    BadRequest,
    Conflict,
    InvalidValue,
    NotFound,
    OperationFailed,
    SwapFailed,
    shown,
)
from appliance.controller.interfaces.model_states import ModelStates
from appliance.controller.interfaces.ports import AdapterBase, AdapterFound, Report
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.models.activation import Activations
from appliance.controller.models.canaries import Canaries
from appliance.controller.models.imported import adapter_base, register, register_adapter
from appliance.controller.models.removal import doomed, paths_of, remove
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.records import canaries
from appliance.store.records import operations as operation_rows
from appliance.store.rows import ModelRow, OperationRow

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Import(StrictBody):
    source: Text
    origin: Text | None = None  # where a path's files came from, kept as the model's source
    name: Text | None = None
    base: Text | None = None
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,255}$")] | None = None


class Starter(StrictBody):
    minutes: Annotated[float, Field(gt=0, le=24 * 60)] | None = None


class Pin(StrictBody):
    version: Text
    pinned: bool


class Rollback(StrictBody):
    version: Text | None = None


def routes(
    context: ControllerContext, router: APIRouter, running: Operations, compared: Canaries, activations: Activations
) -> None:
    """Add the routes to the admin router."""
    db = context.db

    def begun(attempt: Attempt, operation_id: str) -> OperationRow | None:
        """The operation that an earlier attempt began. One that failed is no answer to a mere retry: it may be that of
        an earlier request."""
        row = operation_rows.find(db, operation_id)
        return None if row is None or (attempt.idempotency_key is None and row.state == "failed") else row

    def attempted(request: Request, caller: Principal, action: str, body: Any) -> tuple[Attempt, OperationRow | None]:
        """The attempt, and the operation that an earlier one of it began."""
        attempt = Attempt.of(request, caller, f"operations.{action}", body)
        found = idempotency.find(db, context.config, attempt)
        earlier = begun(attempt, found) if found is not None else None
        if earlier is not None:
            record(context, caller, action, earlier.target, repeated=True)
        return attempt, earlier

    def start(
        attempt: Attempt, caller: Principal, kind: str, target: str, work: operations.Work, action: str, **told: Any
    ) -> JSONResponse:
        def make() -> OperationRow:
            twin = running.running(kind, target)
            if twin is not None:
                raise Conflict(
                    f"{kind} of {shown(target)} is already running as operation {twin.id}.",
                    param=None,
                    code="operation_running",
                )
            return running.insert(kind, target)

        row, new = idempotency.once(db, context.config, attempt, partial(begun, attempt), make)
        if new:
            running.begin(row, work)
            record(context, caller, action, target, **told)
        return _accepted(row)

    @router.get("/models")
    def list_models(now: Status, after: After = None, limit: RecentLimit = 100) -> dict[str, Any]:
        """Newest first."""
        states = ModelStates(db, now)
        page = models.page(db, after=after, limit=limit)
        return list_object(page, lambda row: views.model(db, row, now, states, context.tiers, context.sizes))

    @router.post("/models/import", status_code=202)
    async def import_model(body: Import, request: Request, caller: Caller) -> JSONResponse:
        attempt, earlier = attempted(request, caller, "model.import", body.model_dump(mode="json"))
        if earlier is not None:
            return _accepted(earlier)
        for field, text in (("source", body.source), ("origin", body.origin or "")):
            if not text.isprintable():
                raise InvalidValue(f"The {field} contains control characters.", field)
        if body.name is not None:
            _check_new_name(db, body.name)
        context.quotas.disk.check()  # only the import itself finds out how much more it needs
        adapter = await _adapter(context, body)

        async def work(report: Report) -> dict[str, Any]:
            if adapter is not None:
                found, base = adapter
                made = await context.model_ops.import_adapter(body.source, found=found, base=base, report=report)
                return await register_adapter(context, made, base, caller)
            stats = await context.model_ops.import_model(
                body.source, name=body.name, revision=body.revision, report=report
            )
            if body.origin is not None:
                stats = replace(stats, source=body.origin)
            return await register(context, stats, caller)

        told = {"source": body.source, "revision": body.revision}
        return start(attempt, caller, "import", body.name or body.source, work, "model.import", **told)

    @router.post("/models/starter", status_code=202)
    async def make_starter(request: Request, caller: Caller, body: Starter | None = None) -> JSONResponse:
        minutes = body.minutes if body else None
        attempt, earlier = attempted(request, caller, "model.starter", minutes)
        if earlier is not None:
            return _accepted(earlier)
        if made_by_jobs(db, "starter"):  # else it is refused once it is made
            raise _exists("starter")
        context.quotas.disk.check()

        async def work(report: Report) -> dict[str, Any]:
            return await register(context, await context.model_ops.make_starter(minutes=minutes, report=report), caller)

        return start(attempt, caller, "starter", "starter", work, "model.starter", minutes=minutes)

    @router.post("/models/{name:path}/verify", status_code=202)
    async def verify(name: str, request: Request, caller: Caller) -> JSONResponse:
        row = stored_model(db, name)
        attempt, earlier = attempted(request, caller, "model.verify", row.id)
        if earlier is not None:
            return _accepted(earlier)
        paths = await db.read(caller.viewer, lambda: [paths_of(one) for one in models.list_versions(db, row.id)])

        async def work(report: Report) -> dict[str, Any]:
            return await context.model_ops.verify(row.id, paths, report)

        return start(attempt, caller, "verify", row.id, work, "model.verify")

    @router.post("/tiers/verify", status_code=202)
    async def verify_tiers(request: Request, caller: Caller) -> JSONResponse:
        attempt, earlier = attempted(request, caller, "tiers.verify", "")
        if earlier is not None:
            return _accepted(earlier)
        return start(attempt, caller, "verify", "tiers", context.model_ops.verify_tiers, "tiers.verify")

    @router.post("/models/{name:path}/rollback")
    async def rollback(name: str, request: Request, caller: Caller, body: Rollback | None = None) -> dict[str, Any]:
        """A request that comes again, while the first is under way or later, is told what that one has changed."""
        asked = body.version if body else None
        stored_model(db, name)
        carried = Carried(db, context.config, Attempt.of(request, caller, "models.rollback", [name, asked]))
        if asked is None and canaries.find_running(db, name) is not None:
            return await compared.roll_back(name, caller, carried=carried)
        async with activations.lock(name):
            row = stored_model(db, name)
            before = row.active_version

            def make() -> Deed:
                target = _rollback_target(db, row, asked)
                models.activate(db, row.id, target)  # with the deed, or a restart between the two would repeat it
                return Deed.of(model=row.id, **{"from": before, "to": target, "swap": {}})

            if (told := carried.before(make)) is not None:
                record(context, caller, "model.rollback", name, before=told["from"], to=told["to"], repeated=True)
                return told
            target = stored_model(db, name).active_version
            assert target is not None
            try:
                why = f"{row.id} rolls back to {target}"
                measured = await activations.switch(row, target, why, carried.came_to_nothing)
            except SwapFailed as error:
                record(context, caller, "model.rollback", row.id, outcome="failed", to=target, error=str(error))
                raise Conflict(f"The roll back failed: {error}", param="version", code="swap_failed") from error
            record(context, caller, "model.rollback", row.id, before=before, to=target)
            return {"model": row.id, "from": before, "to": target, "swap": measured}

    @router.post("/models/{name:path}/pin")
    async def pin(name: str, body: Pin, caller: Caller) -> dict[str, Any]:
        row = stored_model(db, name)
        if models.find_version(db, row.id, body.version) is None:
            raise no_version(db, row.id, body.version)
        models.update_version(db, row.id, body.version, pinned=int(body.pinned))
        context.tiers.nudge()
        record(context, caller, "model.pin", row.id, version=body.version, pinned=body.pinned)
        return {"model": row.id, "version": body.version, "pinned": body.pinned}

    @router.get("/models/{name:path}", response_model=dict[str, Any])
    async def show(name: str, caller: Caller, now: Status) -> Response:
        """`canary`: the most recent one, running or ended; `gates`: the newest of its versions."""
        last = canaries.find(db, name)
        shown_canary = compared.view(last, time.time()) if last else None

        def shown_model() -> dict[str, Any]:
            row = stored_model(db, name)
            found = views.model(db, row, now, ModelStates(db, now), context.tiers, context.sizes)
            return found | {"canary": shown_canary, "gates": gate_views.of_model(db, name)}

        return await answer(db, caller.viewer, shown_model)

    @router.delete("/models/{name:path}")
    async def delete(name: str, caller: Caller) -> dict[str, Any]:
        await remove(context, doomed(context, name), caller)
        record(context, caller, "model.delete", name)
        return {"name": name, "deleted": True}

    @router.get("/operations")
    def list_operations() -> dict[str, Any]:
        return {"object": "list", "data": [operations.view(row) for row in operation_rows.list_recent(db, 100)]}

    @router.get("/operations/{operation_id}")
    def operation(operation_id: str) -> dict[str, Any]:
        row = operation_rows.find(db, operation_id)
        if row is None:
            raise NotFound(f"No operation {shown(operation_id)}.", param="id", code="operation_not_found")
        return {"operation": operations.view(row)}


def _accepted(row: OperationRow) -> JSONResponse:
    return JSONResponse({"operation": operations.view(row)}, 202)


def _check_new_name(db: Database, name: str) -> None:
    if not is_model_name(name):
        raise InvalidValue(f"Invalid model name {shown(name)}: expected {MODEL_NAME_RULE}.", "name")
    if name.startswith("ft:"):
        raise InvalidValue("Names that begin with 'ft:' belong to fine-tuned models.", "name")
    if models.find(db, name) is not None or made_by_jobs(db, name):
        raise _exists(name)


def _exists(name: str) -> Conflict:
    return Conflict(
        f"The model {shown(name)} exists, or a job makes it; delete it first or choose another name.",
        param="name",
        code="model_exists",
    )


async def _adapter(context: ControllerContext, body: Import) -> tuple[AdapterFound, AdapterBase] | None:
    """The adapter that is to be imported, and its base; None for a whole model. Raises BadRequest, Conflict."""
    try:
        found = await context.model_ops.find_adapter(body.source, name=body.name, revision=body.revision)
    except OperationFailed as error:
        raise BadRequest(str(error), param="source", code=error.code) from error
    if found is not None:
        return found, adapter_base(context, found, body.base)
    if body.base is not None:
        raise InvalidValue(
            f"A base belongs to an adapter (adapter_config.json), and {shown(body.source)} is not one.", "base"
        )
    return None


_VERSIONS_NAMED = 5


def _others(db: Database, row: ModelRow) -> str:
    names = [name for name in models.names_of_versions(db, row.id, _VERSIONS_NAMED + 1) if name != row.active_version]
    return f"; `--version` takes another: {', '.join(names[:_VERSIONS_NAMED])}" if names else ""


def _rollback_target(db: Database, row: ModelRow, asked: str | None) -> str:
    if asked is not None:
        if models.find_version(db, row.id, asked) is None:
            raise no_version(db, row.id, asked)
        return asked
    older = models.version_before(db, row.id, row.active_version) if row.active_version else None
    if older is None:
        raise Conflict(
            f"{row.id} has no version before {row.active_version} that has answered{_others(db, row)}.",
            param="version",
            code="no_older_version",
        )
    return older.version
