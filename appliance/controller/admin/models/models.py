"""/admin/v1/models: list and show models, and how one is to be served. The CLI relies on the keys of the views.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from appliance.controller.access.model_access import stored_model
from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.paging import RECENT, list_object
from appliance.controller.http.reading import Status, answer
from appliance.controller.interfaces.errors import InvalidValue
from appliance.controller.interfaces.principal import Caller
from appliance.controller.interfaces.records import ModelStates, SchedulerStatus
from appliance.controller.jobs import settings
from appliance.controller.models.canaries import Canaries
from appliance.store.database import Database, Part
from appliance.store.objects import adapters, models
from appliance.store.objects.adapters import AdapterRow
from appliance.store.records import canaries, deployments, model_settings
from appliance.store.rows import DeploymentRow, ModelRow, columns

Replicas = Annotated[int, Field(ge=0, le=65536)]


class Deploy(BaseModel):
    """Only the given fields change; null removes a target, the limit on replicas or a number about idleness."""

    model_config = ConfigDict(extra="forbid", strict=True)

    idle_sleep_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] | None = None
    ttft_p95_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    tpot_p95_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    pinned: bool | None = None


_NEVER_NULL = ("min_replicas", "tensor_parallel", "pinned")
# What an adapter has of its own: its host's engines are kept for it. Everything else is a matter of those engines.
_OF_ADAPTERS = ("min_replicas", "pinned")


def routes(context: ControllerContext, router: APIRouter, compared: Canaries) -> None:
    """Add the routes to the admin router; after all others below /models, as names may contain slashes."""
    db = context.db

    @router.get("/models")
    def list_models(now: Status, part: Annotated[Part, RECENT]) -> dict[str, Any]:
        """Newest first."""
        states = ModelStates(db, now)
        page = models.page(db, **part)
        return list_object(page, lambda row: model_view(context, row, now, states))

    def deployment_of(name: str) -> DeploymentRow:
        stored_model(db, name)
        return deployments.find(db, name) or DeploymentRow(model=name, created_s=time.time())

    @router.get("/models/{name:path}/deployment")
    def show_deployment(name: str, now: Status) -> dict[str, Any]:
        return deployment_view(deployment_of(name), now)

    @router.patch("/models/{name:path}/deployment")
    async def deploy(name: str, body: Deploy, caller: Caller) -> dict[str, Any]:
        row = deployment_of(name)
        given = {field: getattr(body, field) for field in body.model_fields_set}
        for field in _NEVER_NULL:
            if field in given and given[field] is None:
                raise InvalidValue(f"{field} cannot be null.", field)
        _refuse_of_adapter(context, name, given)
        changes = {field: value for field, value in given.items() if field != "idle_sleep_s"}
        if "idle_sleep_s" in given:
            changes["idle"] = {} if body.idle_sleep_s is None else {"idle_sleep_s": body.idle_sleep_s}
        if "pinned" in changes:
            changes["pinned"] = int(changes["pinned"])
        wanted = replace(row, **changes)
        _check(context, wanted, changes.keys())
        with db.transaction():
            deployments.put(db, wanted)
            record(context, caller, "model.deploy", name, **given)
        context.scheduler.reset_failures(name)  # what failed with the old settings may work with the new ones
        context.scheduler.nudge(f"deployment of {name}", name_of(context, caller))
        return deployment_view(wanted, context.scheduler.status())

    @router.get("/models/{name:path}", response_model=dict[str, Any])
    async def show(name: str, caller: Caller, now: Status) -> Response:
        """`canary`: the most recent one, running or ended."""
        last = canaries.find(db, name)
        canary = compared.view(last) if last else None

        def view() -> dict[str, Any]:
            row = stored_model(db, name)
            found = model_view(context, row, now, ModelStates(db, now))
            return found | {"canary": canary}

        return await answer(view)


def model_view(
    context: ControllerContext, row: ModelRow, status: SchedulerStatus, states: ModelStates
) -> dict[str, Any]:
    """`id` is its name, by which a list's next page is asked for. `max_model_len`: the context of its engines;
    `context_note`: why that is less than the model's own, else "". `settings_note`: why the box itself put these
    settings in force, else "".
    `adapter`: {"base", "base_version", "rank", "host"} if the active version is one; the engines of `host` serve it.
    `message`: why its engines fail, None if they do not."""
    db = context.db
    found, running = deployments.find(db, row.id), canaries.find_running(db, row.id)
    size = context.sizes.size(row, None)
    set_up = model_settings.current(db, row.id)
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
        "adapter": _adapter(db, row),
        "state": states.word(row.id),
        "message": states.message(row.id),
        "deployment": deployment_view(found, status) if found else None,
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


def _adapter(db: Database, row: ModelRow) -> dict[str, Any] | None:
    version = models.active(db, row)
    known = version.meta.get("adapter") if version else None
    if known is None:
        return None
    base = models.find(db, known["base"])
    adapter = AdapterRow(
        row.id, row.id, version.version, known["base"], known["base_version"], base.active_version if base else None
    )
    return {**known, "host": adapter.host}


def _refuse_of_adapter(context: ControllerContext, name: str, given: Mapping[str, Any]) -> None:
    """Raises BadRequest for what an adapter, which has no engines, would never use. Null is taken: it removes what was
    set while the name had whole weights."""
    base = next((row.base for row in adapters.list_callable(context.db) if row.name == name), None)
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
    nodes = settings.nodes_of(context)
    if "tensor_parallel" in changed:
        nodes.refuse_more("tensor_parallel", row.tensor_parallel)
    if "tensor_parallel" in changed or "min_replicas" in changed:
        nodes.refuse_more_replicas("min_replicas", row.min_replicas, row.tensor_parallel)
