"""/admin/v1/models: list and show models, and how one is to be served.

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
from appliance.controller.admin import views
from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.paging import RECENT, list_object
from appliance.controller.http.reading import Status, answer
from appliance.controller.interfaces.errors import InvalidValue
from appliance.controller.interfaces.model_states import ModelStates
from appliance.controller.interfaces.principal import Caller
from appliance.controller.models import node_sizes
from appliance.controller.models.canaries import Canaries
from appliance.store.database import Part
from appliance.store.objects import adapters, models
from appliance.store.records import canaries, deployments
from appliance.store.rows import DeploymentRow

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
        return list_object(page, lambda row: views.model(db, row, now, states, context.tiers, context.sizes))

    def deployment_of(name: str) -> DeploymentRow:
        stored_model(db, name)
        return deployments.find(db, name) or DeploymentRow(model=name, created_s=time.time())

    @router.get("/models/{name:path}/deployment")
    def show_deployment(name: str, now: Status) -> dict[str, Any]:
        return views.deployment(deployment_of(name), now)

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
        return views.deployment(wanted, context.scheduler.status())

    @router.get("/models/{name:path}", response_model=dict[str, Any])
    async def show(name: str, caller: Caller, now: Status) -> Response:
        """`canary`: the most recent one, running or ended."""
        last = canaries.find(db, name)
        canary = compared.view(last) if last else None

        def view() -> dict[str, Any]:
            row = stored_model(db, name)
            found = views.model(db, row, now, ModelStates(db, now), context.tiers, context.sizes)
            return found | {"canary": canary}

        return await answer(db, view)


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
    nodes = node_sizes.known(context)
    if "tensor_parallel" in changed:
        nodes.refuse_more("tensor_parallel", row.tensor_parallel)
    if "tensor_parallel" in changed or "min_replicas" in changed:
        nodes.refuse_more_replicas("min_replicas", row.min_replicas, row.tensor_parallel)
