"""/admin/v1/models/{name}/deployment: how a model is to be served."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from appliance.controller.access.model_access import stored_model
from appliance.controller.admin import views
from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.reading import Status
from appliance.controller.interfaces.errors import InvalidValue
from appliance.controller.interfaces.principal import Caller
from appliance.controller.models import node_sizes
from appliance.store.objects import adapters
from appliance.store.records import deployments
from appliance.store.rows import DeploymentRow
from scheduler.core.idle import IdleSettings

Replicas = Annotated[int, Field(ge=0, le=65536)]


class Deploy(IdleSettings):
    """Only the given fields change; null removes a target, the limit on replicas or a number about idleness."""

    model_config = ConfigDict(extra="forbid", strict=True)

    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] | None = None
    ttft_p95_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    tpot_p95_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    pinned: bool | None = None


_NEVER_NULL = ("min_replicas", "tensor_parallel", "pinned")
# What an adapter has of its own: its host's engines are kept for it. Everything else is a matter of those engines.
_OF_ADAPTERS = ("min_replicas", "pinned")


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router; before those of models, whose names may contain slashes."""
    db = context.db

    def known(name: str) -> DeploymentRow:
        stored_model(db, name)
        return deployments.find(db, name) or DeploymentRow(model=name, created_s=time.time())

    @router.get("/models/{name:path}/deployment")
    def show_deployment(name: str, now: Status) -> dict[str, Any]:
        return views.deployment(known(name), now)

    @router.patch("/models/{name:path}/deployment")
    async def deploy(name: str, body: Deploy, caller: Caller) -> dict[str, Any]:
        row = known(name)
        changes = {field: getattr(body, field) for field in body.model_fields_set}
        for field in _NEVER_NULL:
            if field in changes and changes[field] is None:
                raise InvalidValue(f"{field} cannot be null.", field)
        _refuse_of_adapter(context, name, changes)
        told = dict(changes)
        if "pinned" in changes:
            changes["pinned"] = int(changes["pinned"])
        idle = row.idle | {name: changes.pop(name) for name in IdleSettings.model_fields if name in changes}
        changes["idle"] = {name: number for name, number in idle.items() if number is not None}
        wanted = replace(row, **changes)
        _check(context, wanted, changes.keys())
        with db.transaction():
            if deployments.find(db, name) is None:
                deployments.insert(db, wanted)
            else:
                deployments.update(db, name, **changes)
            record(context, caller, "model.deploy", name, **told)
        context.scheduler.reset_failures(name)  # what failed with the old settings may work with the new ones
        context.scheduler.nudge(f"deployment of {name}", name_of(context, caller))
        return views.deployment(wanted, context.scheduler.status())


def _refuse_of_adapter(context: ControllerContext, name: str, changes: Mapping[str, Any]) -> None:
    """Raises BadRequest for what an adapter, which has no engines, would never use. Null is taken: it removes what was
    set while the name had whole weights."""
    base = adapters.base_of_model(context.db, name)
    field = next((field for field, value in changes.items() if field not in _OF_ADAPTERS and value is not None), None)
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
