"""/admin/v1/models: import, list and show models, their deployments, engine settings, versions and canaries;
/admin/v1/operations: imports, each a task whose row holds its progress and result. The CLI relies on
the keys of the views.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, StringConstraints, ValidationError

from appliance.controller.access.model_access import (
    MODEL_NAME_RULE,
    caller_of,
    is_model_name,
    made_by_jobs,
    stored_model,
    stored_version,
    unknown_model,
)
from appliance.controller.context.context import ControllerContext, ModelStates, name_of, record
from appliance.controller.context.tasks import Kind, TaskFailed
from appliance.controller.http.resource import RECENT, list_object
from appliance.controller.http.routers import Status, StrictBody, answer, audited
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, OperationFailed, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.jobs import settings as job_settings
from appliance.controller.models import activation
from appliance.controller.models.activation import Canaries
from appliance.controller.models.lifecycle import adapter_base, register
from appliance.models.errors import TemplateRefused
from appliance.models.trial import try_template
from appliance.store import models, rows
from appliance.store.database import Database, Part
from appliance.store.rows import DeploymentRow, ModelRow, OperationRow, TaskRow, columns, new_id
from appliance.tiers.tiers import name_of as stored_name
from runtime.errors import words_of_check
from serve.core.model_settings import ModelSettings, with_system_prompt
from weights.format.tool_template import with_tools

Replicas = Annotated[int, Field(ge=0, le=65536)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
# Settings of the adapter itself; all others belong to the engines of its host.
_OF_ADAPTERS = ("min_replicas", "pinned")


class Deploy(StrictBody):
    """Only the given fields change; null removes a target, the limit on replicas or an idle time."""

    idle_sleep_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    min_replicas: Replicas = 0
    max_replicas: Replicas | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    ttft_p95_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    tpot_p95_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    pinned: bool = False


class Change(StrictBody):
    """set: settings to change; null removes a setting, and engine_args and sampling change by name. number: use the
    settings with this number instead. Engines restart only after vLLM has accepted the settings."""

    set: dict[str, Any] = Field(default_factory=dict)
    number: Annotated[int, Field(ge=0, le=1 << 53)] | None = None


class Rollback(StrictBody):
    version: Text | None = None


class Canary(StrictBody):
    """share: fraction of the requests, 0.1 for one in ten. watch_s: seconds until it may be promoted."""

    version: Text
    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1
    auto: bool = False
    watch_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 50


def routes(context: ControllerContext, router: APIRouter, compared: Canaries) -> None:
    """Add the routes to the admin router; after all others below /models, as names may contain slashes."""
    db = context.db
    _import_routes(context, router)
    _version_routes(context, router, compared)
    _settings_routes(context, router)

    @router.get("/models")
    def list_models(now: Status, part: Annotated[Part, RECENT]) -> dict[str, Any]:
        """List models, newest first."""
        states = ModelStates(db, now)
        return list_object(models.page(db, **part), lambda row: model_view(context, row, states))

    @router.patch("/models/{name:path}/deployment")
    @audited("model.deploy")
    async def deploy(name: str, body: Deploy, caller: Caller) -> dict[str, Any]:
        changes, row = body.model_dump(exclude_unset=True), rows.DEPLOYMENTS.find(db, stored_model(db, name).id)
        row = row or DeploymentRow(model=name, created_s=time.time())
        base = next((row.base for row in models.callable_adapters(db) if row.name == name), None)
        # Null is allowed: it removes a value set while the model's active version was not an adapter.
        given = (field for field, value in changes.items() if field not in _OF_ADAPTERS and value is not None)
        if base is not None and (field := next(given, None)) is not None:
            why = f"{name} is an adapter and is served by the engines of {base}: set {field} of {base}."
            raise InvalidValue(f"{why} The adapter's own settings are {' and '.join(_OF_ADAPTERS)}.", field)
        changed = replace(row, **changes)
        if changed.max_replicas is not None and changed.max_replicas < max(changed.min_replicas, changed.pinned):
            why = f"max_replicas is {changed.max_replicas} and min_replicas {changed.min_replicas}"
            expected = "expected min <= max, and at least one for a pinned model"
            raise InvalidValue(f"{why}; {expected}.", "max_replicas")
        nodes, each = job_settings.nodes_of(context), changed.tensor_parallel
        if "tensor_parallel" in changes:  # a value from before a node left stays valid while other fields change
            nodes.refuse_more("tensor_parallel", each)
        most = sum(count // each for count in nodes.counts)
        if changed.min_replicas > most and changes.keys() & {"tensor_parallel", "min_replicas"}:
            why = f"min_replicas is {changed.min_replicas}; expected at most {most}, of {each} devices each."
            raise BadRequest(why, "min_replicas", "insufficient_devices")
        rows.DEPLOYMENTS.put(db, changed)
        context.scheduler.loop.reset_failures(name)  # retry: engines that failed with the old settings may start now
        context.scheduler.nudge(f"deployment of {name}", name_of(context, caller))
        return deployment_view(changed)

    @router.get("/models/{name:path}", response_model=dict[str, Any])
    async def show(name: str, caller: Caller, now: Status) -> Response:
        """`canary`: the most recent canary, running or ended. `settings_history`: the newest settings first."""
        canary = compared.view(last) if (last := rows.CANARIES.find(db, name)) else None
        states, more = ModelStates(db, now), {"canary": canary, "settings_history": _history(db, name)}
        return await answer(lambda: model_view(context, stored_model(db, name), states) | more)


def model_view(context: ControllerContext, row: ModelRow, states: ModelStates) -> dict[str, Any]:
    """`id`: the name, also the next page's cursor. `max_model_len`: context of its engines; `context_note`: why that is
    less than the model's context, else "". `adapter`: {"base", "base_version", "rank", "host"} if the active version is
    an adapter, which the engines of `host` serve. `message`: why its engines fail, None if they do not."""
    db = context.db
    deployment, running = rows.DEPLOYMENTS.find(db, row.id), models.find_canary(db, row.id)
    size, active = context.sizes.size(row, None), models.active(db, row)
    set_up, adapter = models.current_settings(db, row.id), active.meta.get("adapter") if active else None
    return {
        "id": row.id,
        "name": row.id,
        **columns(row, "kind arch task params bytes base active_version"),
        "canary_version": running.version if running is not None else None,
        "max_model_len": size.max_model_len,
        "context_note": size.problem or size.shortened,
        **columns(row, "source job_id created_s info"),
        "owner": row.owner or None,
        "shared_with": models.shared_with(db, row.id),
        "adapter": {**adapter, "host": states.host(row.id)} if adapter else None,
        "state": states.word(row.id),
        "message": states.message(row.id),
        "deployment": deployment_view(deployment) if deployment else None,
        "settings": set_up.settings if set_up else {},
        "settings_number": set_up.number if set_up else 0,
        "versions": [
            {
                **columns(v, "version created_s bytes source"),
                "kind": "adapter" if v.meta.get("adapter") else "version",
                "held_back": bool(v.held_back),
                "tiers": context.tiers.tiers_of(stored_name(v)),
            }
            for v in models.list_versions(db, row.id)
        ],
    }


def deployment_view(row: DeploymentRow) -> dict[str, Any]:
    names = "model min_replicas max_replicas tensor_parallel ttft_p95_s tpot_p95_ms idle_sleep_s"
    return {**columns(row, names), "pinned": bool(row.pinned)}


# --- the active version: roll back, begin and end a canary


def _version_routes(context: ControllerContext, router: APIRouter, running: Canaries) -> None:
    db = context.db

    @router.post("/models/{name:path}/rollback")
    async def rollback(name: str, caller: Caller, body: Rollback | None = None) -> dict[str, Any]:
        """Roll back to a version. Without a version: end the running canary, else return to the previous version."""
        version = body.version if body else None
        stored_model(db, name)
        async with activation.lock(name):
            if version is None and models.find_canary(db, name) is not None:
                return running.roll_back(name, caller)
            row = stored_model(db, name)
            if version is not None:
                to = stored_version(db, name, version).version
            elif row.active_version and (older := models.version_before(db, name, row.active_version)) is not None:
                to = older.version
            else:
                why = f"{name} has no version before {row.active_version} that has answered"
                remedy = "`--version` takes another one of `appliance model show`"
                raise Conflict(f"{why}; {remedy}.", "version", "no_older_version")
            await activation.change(context, row, to, caller, "model.rollback", f"rolls back to {to}")
            record(context, caller, "model.rollback", row.id, before=row.active_version, to=to)
            return {"model": row.id, "from": row.active_version, "to": to}

    @router.put("/models/{name:path}/canary")
    async def begin(name: str, body: Canary, caller: Caller) -> dict[str, Any]:
        return running.view(running.begin(name, caller, **body.model_dump()))

    @router.post("/models/{name:path}/promote")
    async def promote(name: str, caller: Caller) -> dict[str, Any]:
        async with activation.lock(name):
            return await running.promote(stored_model(db, name), caller, "asked for")


# --- numbered settings of a model's engines


def _settings_routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    @router.patch("/models/{name:path}/settings")
    @audited("model.settings", "settings")
    async def change(name: str, body: Change, caller: Caller) -> dict[str, Any]:
        model, before, devices = stored_model(db, name), _settings(db, name), context.sizes.devices(name)
        if (version := models.active(db, model)) is None:
            raise unknown_model(name)
        if adapter := version.meta.get("adapter"):
            base = adapter["base"]
            raise InvalidValue(f"{name} is an adapter and is served by the engines of {base}: set {base} up.", "model")
        if body.number is not None and body.set:
            raise InvalidValue("Give either 'set' or 'number'.", "number")
        after = merged(before, body.set) if body.number is None else _settings(db, name, body.number)
        try:
            settings = ModelSettings.model_validate(after)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidValue(f"{where}: {words_of_check(first['msg'])}", f"set.{where}") from error
        size, requested = context.sizes.size(model, version, devices, settings), settings.max_model_len
        if size.problem:
            raise InvalidValue(f"{name} cannot be served: {size.problem}.", "set")
        if requested is not None and (size.max_model_len or requested) < requested:
            own = size.shortened or f"the model was made for {size.max_model_len:,} tokens"
            raise InvalidValue(f"max_model_len {requested:,} does not fit: {own}.", "set.max_model_len")
        if settings.chat_template is not None:
            text = with_system_prompt(with_tools(settings.chat_template), settings.system_prompt or "")
            try:
                await asyncio.to_thread(try_template, str(text))
            except TemplateRefused as error:
                raise InvalidValue(str(error), "set.chat_template") from error
        if refused := await context.settings_check.refused(model, version, devices, settings):
            raise InvalidValue(f"vLLM does not start {name} with these settings: {refused[:2000]}", "set")
        with db.transaction():
            if settings.as_json() != before:
                by = name_of(context, caller)
                models.add_settings(db, name, settings.as_json(), settings.digest, by, time.time())
        context.scheduler.loop.reset_failures(name)  # retry: engines that failed with the old settings may start now
        context.routing.models_changed()  # because the gateways' table holds the context
        context.scheduler.nudge(f"settings of {name}", name_of(context, caller))
        history = _history(db, name)
        return {"settings": settings.as_json(), "settings_number": history[0]["number"] if history else 0}


def _history(db: Database, name: str) -> list[dict[str, Any]]:
    history = rows.MODEL_SETTINGS.list_all(db, "model = ?", name)
    return [{**columns(row, "number created_s settings note"), "by": row.by_whom} for row in history]


def _settings(db: Database, name: str, number: int | None = None) -> dict[str, Any]:
    """Return the settings with this number; None: the settings in force; 0: no settings. Raises NotFound."""
    row = models.current_settings(db, name) if number is None else rows.MODEL_SETTINGS.find(db, name, number)
    if row is None and number:
        raise NotFound(f"{name} has no settings {number}.", "number", "settings_not_found")
    return row.settings if row is not None else {}


def merged(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings after a change; null removes a setting."""
    after = dict(before)
    for name, value in changes.items():
        inside = name in ("engine_args", "sampling") and isinstance(value, dict)
        after[name] = (merged(after.get(name, {}), value) or None) if inside else value
    return {name: value for name, value in after.items() if value is not None}


# --- imports; after a restart an import starts over from the files on disk


TASKS = "operations"
PROGRESS_EVERY_S = 0.5
"""Progress is written to the store at most this often, but for a new message."""


class Import(StrictBody):
    """origin: where the files at a path came from, stored as the model's source. as_version: add a version to the model
    `name`, which gets no requests until it becomes a canary or active."""

    source: Text
    origin: Text | None = None
    name: Text | None = None
    base: Text | None = None
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,255}$")] | None = None
    as_version: bool = False


def _import_routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router, before the routes of models, whose names may contain slashes."""
    db = context.db

    @router.post("/models/import", status_code=202)
    async def import_model(body: Import, caller: Caller) -> dict[str, Any]:
        if (name := body.name) is not None:
            if not is_model_name(name):
                raise InvalidValue(f"Invalid model name {shown(name)}: expected {MODEL_NAME_RULE}.", "name")
            existing = models.find(db, name)
            if body.as_version:
                active = models.active(db, existing) if existing else None
                if active is None or active.meta.get("adapter"):
                    raise InvalidValue(f"{shown(name)} is not a model of this box with whole weights.", "name")
            elif name.startswith("ft:"):
                raise InvalidValue("Names that begin with 'ft:' belong to fine-tuned models.", "name")
            if not body.as_version and (existing is not None or made_by_jobs(db, name)):
                remedy = "delete it first or choose another name"
                raise Conflict(f"The model {shown(name)} exists, or a job makes it; {remedy}.", "name", "model_exists")
        context.quotas.disk.check()  # size unknown here: only the import finds out how many bytes it needs
        arguments = columns(body, "source origin name revision as_version")
        try:
            find, ops = context.model_ops.library.find_adapter, context.model_ops
            adapter = await ops.run(find, body.source, name=body.name, revision=body.revision)
        except OperationFailed as error:
            raise BadRequest(str(error), "source", error.code) from error
        if adapter is None and body.base is not None:
            why = f"A base belongs to an adapter (adapter_config.json), and {shown(body.source)} is not one."
            raise InvalidValue(why, "base")
        arguments["adapter"] = None
        if adapter is not None:  # arguments of `ModelLibrary.import_adapter`
            own, trained_on, revision = adapter
            below = adapter_base(context, own, trained_on, body.base)
            arguments["adapter"] = {"name": own, "revision": revision, **below}
        target, progress = name or body.source, {"done": 0, "total": None, "unit": "", "message": "starting"}
        with db.transaction():
            for twin in rows.OPERATIONS.list_all(db, "state = 'running' AND target = ?", target):
                text = f"import of {shown(target)} is already running as operation {twin.id}."
                raise Conflict(text, code="operation_running")
            row = OperationRow(new_id("op_"), "import", target, "running", time.time(), progress=progress)
            rows.OPERATIONS.insert(db, row)
            context.tasks.start(TASKS, row.id, caller.key_id, **arguments)
            record(context, caller, "model.import", target, **body.model_dump())
        return {"operation": operation_view(row)}

    @router.get("/operations")
    def list_operations(part: Annotated[Part, RECENT]) -> dict[str, Any]:
        return list_object(rows.OPERATIONS.page(db, **part), operation_view)

    @router.get("/operations/{operation_id}")
    def operation(operation_id: str) -> dict[str, Any]:
        if (row := rows.OPERATIONS.find(db, operation_id)) is None:
            raise NotFound(f"No operation {shown(operation_id)}.", "id", "operation_not_found")
        return {"operation": operation_view(row)}


def operation_view(row: OperationRow) -> dict[str, Any]:
    return columns(row, "id kind target state progress error result created_s ended_s")


def import_kind(context: ControllerContext) -> Kind:
    """Return the kind of task for imports."""
    db, ops = context.db, context.model_ops

    async def run(task: TaskRow) -> None:
        """Run the import. Raises TaskFailed."""
        row = rows.OPERATIONS.find(db, task.id)
        if row is None or row.state != "running":
            return
        progress, write_s = row.progress, 0.0

        def report(done: float, total: float | None, unit: str, message: str) -> None:
            """Store the progress; may be called from any thread."""
            nonlocal progress, write_s
            is_new = message != progress["message"]
            progress = {"done": done, "total": total, "unit": unit, "message": message}
            if is_new or time.monotonic() >= write_s:
                rows.OPERATIONS.update(db, task.id, progress=progress)
                write_s = time.monotonic() + PROGRESS_EVERY_S

        arguments = task.arguments
        source, adapter, origin = arguments["source"], arguments["adapter"], arguments["origin"]
        try:
            if adapter is not None:
                options = {**adapter, "base_path": Path(adapter["base_path"])}
                version, origin = await ops.run(ops.library.import_adapter, source, report=report, **options), None
            else:
                names = {"name": arguments["name"], "revision": arguments["revision"]}
                version = await ops.run(ops.library.import_model, source, report=report, **names)
            more = {"source": origin or version.source, "adapter": adapter, "serves": not arguments["as_version"]}
            result = await register(context, version, caller_of(db, task.key_id), **more)
        except OperationFailed as error:
            raise TaskFailed(error.code, str(error)) from error
        rows.OPERATIONS.update(db, row.id, state="succeeded", result=result, progress=progress, ended_s=time.time())

    async def fail(task: TaskRow, error: TaskFailed) -> None:
        row = rows.OPERATIONS.find(db, task.id)
        if row is not None and row.state == "running":
            failure = {"code": error.code, "message": str(error), "param": None}
            rows.OPERATIONS.update(db, row.id, state="failed", error=failure, ended_s=time.time())

    return Kind(TASKS, run, fail, "operation")
