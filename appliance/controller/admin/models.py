"""/admin/v1/models: list and show models, their deployments, engine settings, versions and canaries.
The CLI relies on the keys of the views.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, StringConstraints, ValidationError

from appliance.controller.access.model_access import stored_model, stored_version, unknown_model
from appliance.controller.context.context import ControllerContext, name_of, record
from appliance.controller.http.resource import RECENT, list_object
from appliance.controller.http.routers import Status, StrictBody, answer, audited
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.interfaces.records import ModelStates, SchedulerStatus
from appliance.controller.jobs import settings as job_settings
from appliance.controller.models import activation
from appliance.controller.models.canaries import Canaries
from appliance.models.errors import TemplateRefused
from appliance.models.trial import try_template
from appliance.store.database import Database, Part
from appliance.store.objects import models
from appliance.store.records import canaries, deployments, model_settings
from appliance.store.rows import DeploymentRow, ModelRow, VersionRow, columns
from runtime.errors import words_of_check
from serve.core.model_settings import ModelSettings, with_system_prompt
from weights.format.tool_template import with_tools

Replicas = Annotated[int, Field(ge=0, le=65536)]
Version = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
_NEVER_NULL = ("min_replicas", "tensor_parallel", "pinned")
# What an adapter has of its own: its host's engines are kept for it. Everything else is a matter of those engines.
_OF_ADAPTERS = ("min_replicas", "pinned")


class Deploy(StrictBody):
    """Only the given fields change; null removes a target, the limit on replicas or a number about idleness."""

    idle_sleep_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] | None = None
    ttft_p95_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    tpot_p95_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    pinned: bool | None = None


class Change(StrictBody):
    """set: settings that change; null removes one, engine_args and sampling change by name. number: take over the
    settings of this version instead. Nothing restarts before vLLM itself has accepted them."""

    set: dict[str, Any] = Field(default_factory=dict)
    number: Annotated[int, Field(ge=0, le=1 << 53)] | None = None


class Pin(StrictBody):
    version: Version
    pinned: bool


class Rollback(StrictBody):
    version: Version | None = None


class Canary(StrictBody):
    """share: fraction of the requests, 0.1 for one in ten. watch_s: how long it is watched, in seconds."""

    version: Version
    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1
    auto: bool = False
    watch_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 50


def routes(context: ControllerContext, router: APIRouter, compared: Canaries) -> None:
    """Add the routes to the admin router; after all others below /models, as names may contain slashes."""
    db = context.db
    _version_routes(context, router, compared)
    _settings_routes(context, router)

    @router.get("/models")
    def list_models(now: Status, part: Annotated[Part, RECENT]) -> dict[str, Any]:
        """Newest first."""
        states = ModelStates(db, now)
        return list_object(models.page(db, **part), lambda row: model_view(context, row, now, states))

    @router.patch("/models/{name:path}/deployment")
    @audited("model.deploy")
    async def deploy(name: str, body: Deploy, caller: Caller) -> dict[str, Any]:
        stored_model(db, name)
        row = deployments.find(db, name) or DeploymentRow(model=name, created_s=time.time())
        changes = body.model_dump(exclude_unset=True)
        for field in _NEVER_NULL:
            if changes.get(field, 0) is None:
                raise InvalidValue(f"{field} cannot be null.", field)
        _refuse_of_adapter(context, name, changes)
        if "idle_sleep_s" in changes:
            idle_s = changes.pop("idle_sleep_s")
            changes["idle"] = {} if idle_s is None else {"idle_sleep_s": idle_s}
        wanted = replace(row, **changes)
        _check(context, wanted, changes.keys())
        deployments.put(db, wanted)
        context.scheduler.reset_failures(name)  # what failed with the old settings may work with the new ones
        context.scheduler.nudge(f"deployment of {name}", name_of(context, caller))
        return deployment_view(wanted, context.scheduler.status())

    @router.get("/models/{name:path}", response_model=dict[str, Any])
    async def show(name: str, caller: Caller, now: Status) -> Response:
        """`canary`: the most recent one, running or ended."""
        canary = compared.view(last) if (last := canaries.find(db, name)) else None
        states = ModelStates(db, now)
        return await answer(lambda: model_view(context, stored_model(db, name), now, states) | {"canary": canary})


def model_view(
    context: ControllerContext, row: ModelRow, status: SchedulerStatus, states: ModelStates
) -> dict[str, Any]:
    """`id` is its name, by which a list's next page is asked for. `max_model_len`: the context of its engines;
    `context_note`: why that is less than the model's own, else "". `settings_note`: why the box itself put these
    settings in force, else "".
    `adapter`: {"base", "base_version", "rank", "host"} if the active version is one; the engines of `host` serve it.
    `message`: why its engines fail, None if they do not."""
    db = context.db
    deployment, running = deployments.find(db, row.id), models.find_canary(db, row.id)
    size, active = context.sizes.size(row, None), models.active(db, row)
    set_up, adapter = model_settings.current(db, row.id), active.meta.get("adapter") if active else None
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
        "deployment": deployment_view(deployment, status) if deployment else None,
        "settings": set_up.settings if set_up else {},
        "settings_number": set_up.number if set_up else 0,
        "settings_note": set_up.note if set_up else "",
        "versions": [
            {
                **columns(v, "version created_s bytes source"),
                "kind": "adapter" if v.meta.get("adapter") else "version",
                "pinned": bool(v.pinned),
                "held_back": bool(v.held_back),
                "tiers": context.tiers.tiers_of_version(row.id, v.version),
            }
            for v in models.list_versions(db, row.id)
        ],
    }


def deployment_view(row: DeploymentRow, status: SchedulerStatus) -> dict[str, Any]:
    """`failed_reason`: why its engines fail now, None if they do not."""
    failed = next((trouble["reason"] for trouble in status["troubles"] if trouble["model"] == row.model), None)
    return {
        **columns(row, "model min_replicas max_replicas tensor_parallel ttft_p95_s tpot_p95_ms"),
        "idle_sleep_s": row.idle.get("idle_sleep_s"),
        "pinned": bool(row.pinned),
        "failed_reason": failed,
    }


def _refuse_of_adapter(context: ControllerContext, name: str, given: Mapping[str, Any]) -> None:
    """Raises BadRequest for what an adapter, which has no engines, would never use. Null is taken: it removes what was
    set while the name had whole weights."""
    base = next((row.base for row in models.callable_adapters(context.db) if row.name == name), None)
    field = next((field for field, value in given.items() if field not in _OF_ADAPTERS and value is not None), None)
    if base is not None and field is not None:
        raise InvalidValue(
            f"{name} is an adapter and is served by the engines of {base}: set {field} of {base}. "
            f"An adapter's own are {' and '.join(_OF_ADAPTERS)}.",
            field,
        )


def _check(context: ControllerContext, row: DeploymentRow, changed: Collection[str]) -> None:
    """Raises BadRequest. Values set before a node left stay valid while other fields change."""
    if row.max_replicas is not None and row.max_replicas < max(row.min_replicas, row.pinned):
        least = f"min_replicas is {row.min_replicas}" if row.min_replicas else "a pinned model has at least one replica"
        raise InvalidValue(f"max_replicas is {row.max_replicas} and {least}; expected min <= max.", "max_replicas")
    nodes = job_settings.nodes_of(context)
    if "tensor_parallel" in changed:
        nodes.refuse_more("tensor_parallel", row.tensor_parallel)
    if "tensor_parallel" in changed or "min_replicas" in changed:
        nodes.refuse_more_replicas("min_replicas", row.min_replicas, row.tensor_parallel)


# --- which version answers: roll back, pin, begin and end a canary


def _version_routes(context: ControllerContext, router: APIRouter, running: Canaries) -> None:
    db = context.db

    @router.post("/models/{name:path}/rollback")
    async def rollback(name: str, caller: Caller, body: Rollback | None = None) -> dict[str, Any]:
        """Without a version: ends the canary if there is one, else goes back to the version before."""
        version = body.version if body else None
        stored_model(db, name)
        async with activation.lock(name):
            if version is None and models.find_canary(db, name) is not None:
                return running.roll_back(name, caller)
            row = stored_model(db, name)
            to = _rollback_target(db, row, version)
            measured = await activation.change(context, row, to, caller, "model.rollback", f"rolls back to {to}")
            record(context, caller, "model.rollback", row.id, before=row.active_version, to=to)
            return {"model": row.id, "from": row.active_version, "to": to, "swap": measured}

    @router.post("/models/{name:path}/pin")
    @audited("model.pin")
    async def pin(name: str, body: Pin, caller: Caller) -> dict[str, Any]:
        row = stored_version(db, stored_model(db, name).id, body.version)
        models.update_version(db, name, row.version, pinned=int(body.pinned))
        context.tiers.nudge()
        return {"model": name, **body.model_dump()}

    @router.put("/models/{name:path}/canary")
    async def begin(name: str, body: Canary, caller: Caller) -> dict[str, Any]:
        return running.view(running.begin(name, caller, **body.model_dump()))

    @router.get("/models/{name:path}/canary")
    async def show(name: str) -> dict[str, Any]:
        if (row := canaries.find(db, name)) is None:
            remedy = "`appliance model canary MODEL VERSION` begins one"
            raise NotFound(f"{shown(name)} has no canary, and never had one; {remedy}.", "model", "no_canary")
        return running.view(row)

    @router.delete("/models/{name:path}/canary")
    async def end(name: str, caller: Caller) -> dict[str, Any]:
        async with activation.lock(name):
            return running.roll_back(name, caller)

    @router.post("/models/{name:path}/promote")
    async def promote(name: str, caller: Caller) -> dict[str, Any]:
        """A request that comes again is told what the first has changed."""
        async with activation.lock(name):
            model, last = stored_model(db, name), canaries.find(db, name)
            if last is not None and last.state == "promoted" and last.version == model.active_version:
                return {"model": name, "from": last.before, "to": last.version, "swap": {}}
            return await running.promote(model, caller, "asked for")


def _rollback_target(db: Database, row: ModelRow, version: str | None) -> str:
    if version is not None:
        return stored_version(db, row.id, version).version
    older = models.version_before(db, row.id, row.active_version) if row.active_version else None
    if older is None:
        why = f"{row.id} has no version before {row.active_version} that has answered"
        remedy = "`--version` takes another one of `appliance model show`"
        raise Conflict(f"{why}; {remedy}.", "version", "no_older_version")
    return older.version


# --- how a model's engines are set up, and every version of that


def _settings_routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    def known(name: str) -> tuple[ModelRow, VersionRow]:
        model = models.find(db, name)
        version = models.active(db, model) if model else None
        if model is None or version is None:
            raise unknown_model(name)
        if adapter := version.meta.get("adapter"):
            base = adapter["base"]
            raise InvalidValue(f"{name} is an adapter and is served by the engines of {base}: set {base} up.", "model")
        return model, version

    @router.get("/models/{name:path}/settings")
    def show_settings(name: str) -> dict[str, Any]:
        """An adapter has none: a command that shows its deployment shows its base's too."""
        rows = model_settings.history(db, stored_model(db, name).id)
        return {
            "object": "model.settings",
            "model": name,
            "number": rows[0].number if rows else 0,
            "settings": rows[0].settings if rows else {},
            "history": [{**columns(row, "number created_s settings note"), "by": row.by_whom} for row in rows],
        }

    @router.patch("/models/{name:path}/settings")
    @audited("model.settings", "settings")
    async def change(name: str, body: Change, caller: Caller) -> dict[str, Any]:
        model, version = known(name)
        before, devices = _settings(db, name), context.sizes.devices(name)
        if body.number is not None and body.set:
            raise InvalidValue("Give either 'set' or 'number'.", "number")
        wanted = _parsed(merged(before, body.set) if body.number is None else _settings(db, name, body.number))
        _check_size(context, model, version, devices, wanted)
        if wanted.chat_template is not None:
            text = with_system_prompt(with_tools(wanted.chat_template), wanted.system_prompt or "")
            try:
                await asyncio.to_thread(try_template, str(text))
            except TemplateRefused as error:
                raise InvalidValue(str(error), "set.chat_template") from error
        if refused := await context.settings_check.refused(model, version, devices, wanted):
            raise InvalidValue(f"vLLM does not start {name} with these settings: {refused[:2000]}", "set")
        with db.transaction():
            if _settings(db, name) != before:
                text = f"The settings of {name} changed meanwhile; look at them and try again."
                raise BadRequest(text, "set", "conflict")
            if wanted.as_json() != before:
                model_settings.add(db, name, wanted.as_json(), wanted.digest, name_of(context, caller), time.time())
        context.scheduler.reset_failures(name)  # what failed with the old settings may work with the new ones
        context.routing.models_changed()  # the gateways' table holds the context
        context.scheduler.nudge(f"settings of {name}", name_of(context, caller))
        return await asyncio.to_thread(show_settings, name)


def _settings(db: Database, name: str, number: int | None = None) -> dict[str, Any]:
    """The settings of this version; None: those in force; 0: none yet. Raises NotFound."""
    row = model_settings.current(db, name) if number is None else model_settings.find(db, name, number)
    if row is None and number:
        raise NotFound(f"{name} has no settings {number}.", "number", "settings_not_found")
    return row.settings if row is not None else {}


def merged(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings after a change; null removes."""
    after = dict(before)
    for name, value in changes.items():
        if name in ("engine_args", "sampling") and isinstance(value, dict):
            value = {k: v for k, v in {**after.get(name, {}), **value}.items() if v is not None} or None
        if value is None:
            after.pop(name, None)
        else:
            after[name] = value
    return after


def _parsed(body: dict[str, Any]) -> ModelSettings:
    try:
        return ModelSettings.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = words_of_check(first["msg"])
        raise InvalidValue(f"{where}: {message}", f"set.{where}") from error


def _check_size(
    context: ControllerContext, model: ModelRow, version: VersionRow, devices: int, wanted: ModelSettings
) -> None:
    size = context.sizes.size(model, version, devices, wanted)
    if size.problem:
        raise InvalidValue(f"{model.id} cannot be served: {size.problem}.", "set")
    if wanted.max_model_len is not None and (size.max_model_len or wanted.max_model_len) < wanted.max_model_len:
        own = size.shortened or f"the model was made for {size.max_model_len:,} tokens"
        raise InvalidValue(f"max_model_len {wanted.max_model_len:,} does not fit: {own}.", "set.max_model_len")
