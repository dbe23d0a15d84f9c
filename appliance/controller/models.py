"""/v1/models: base models, fine-tuned ones, and their checkpoints and versions by name
(https://platform.openai.com/docs/api-reference/models)."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Depends

from appliance.controller import views
from appliance.controller.audit import record
from appliance.controller.context import ControllerContext
from appliance.controller.errors import Conflict, Forbidden, NotFound, OperationFailed, shown
from appliance.controller.model_states import ModelStates
from appliance.controller.naming import Resolved, resolve
from appliance.controller.ports import VersionPlace
from appliance.controller.principal import ADMIN, FINE_TUNING, INFERENCE, Caller, Principal, needs
from appliance.controller.routers import make_router
from appliance.controller.spending import may_use, usable_models
from appliance.store import adapters, canaries, job_records, jobs, models
from appliance.store.rows import VersionRow

log = logging.getLogger(__name__)


def routes(context: ControllerContext) -> APIRouter:
    router = make_router("/v1/models")
    db = context.db

    @router.get("", dependencies=[Depends(needs(INFERENCE, FINE_TUNING))])
    async def list_models(caller: Caller) -> dict[str, Any]:
        names = [row.id for row in models.list_callable(db)]
        names += [row.name for row in job_records.list_checkpoints(db)]
        usable = usable_models(db, caller.key_id)
        found = [resolve(db, name) for name in names if usable is None or name in usable]
        states = ModelStates(db, context.scheduler.status())
        return {"object": "list", "data": [views.model_object(item, states) for item in found if item]}

    @router.get("/{name:path}", dependencies=[Depends(needs(INFERENCE, FINE_TUNING))])
    async def retrieve(name: str, caller: Caller) -> dict[str, Any]:
        return views.model_object(usable_model(context, name, caller), ModelStates(db, context.scheduler.status()))

    @router.delete("/{name:path}", dependencies=[Depends(needs(FINE_TUNING))])
    async def delete(name: str, caller: Caller) -> dict[str, Any]:
        found = usable_model(context, name, caller)
        if found.model.kind == "base" and not caller.may(ADMIN):
            raise Forbidden(ADMIN)
        await remove(context, found)
        record(context, caller, "model.delete", name)
        return {"id": name, "object": "model", "deleted": True}

    return router


def known_model(context: ControllerContext, name: str) -> Resolved:
    """Raises NotFound."""
    found = resolve(context.db, name)
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> NotFound:
    return NotFound(f"The model {shown(name)} does not exist or you do not have access to it.",
                    param="model", code="model_not_found")  # fmt: skip


def usable_model(context: ControllerContext, name: str, caller: Principal) -> Resolved:
    """As `known_model`; one that the caller's key may not use does not exist for it. Raises NotFound."""
    if not may_use(context.db, caller.key_id, name):
        raise _unknown(name)
    return known_model(context, name)


def place(row: VersionRow) -> VersionPlace:
    kind = "adapter" if row.meta.get("adapter") else "version"
    return VersionPlace(row.version, row.disk_path, row.shm_path, kind)


async def remove(context: ControllerContext, found: Resolved) -> None:
    """Delete a model with all its versions, or one version by its checkpoint's or pinned name.

    Rows first: from then on nothing new can use the bytes; then the replicas leave; then the bytes go. A crash in
    between leaves bytes that nobody refers to, which the weight store's sweep finds. Raises Conflict.
    """
    db, model = context.db, found.model
    _refuse_if_in_use(context, found)
    if found.checkpoint or found.pinned:
        version = found.version
        if model.active_version == version.version:
            raise Conflict(f"{found.name} is the active version of {model.id}; roll back to another version first, "
                           "or delete the model.", param="model", code="version_in_use")  # fmt: skip
        running = canaries.find_running(db, model.id)
        if running is not None and running.version == version.version:
            raise Conflict(f"{version.version} is the canary of {model.id}; promote it or roll it back first.",
                           param="model", code="version_in_use")  # fmt: skip
        models.delete_version(db, model.id, version.version)
        await _unload(context, [version])
        await context.model_ops.remove(model.id, [place(version)])
        context.scheduler.nudge(f"version {version.version} of {model.id} was deleted")
        return
    versions = models.list_versions(db, model.id)
    places = [place(row) for row in versions]
    models.delete(db, model.id)
    context.scheduler.nudge(f"model {model.id} was deleted")
    await context.scheduler.withdraw(model.id)
    await _unload(context, versions)
    await context.model_ops.remove(model.id, places)


async def _unload(context: ControllerContext, versions: list[VersionRow]) -> None:
    """Engines drop those of these versions that are adapters, so that their bytes can go."""
    names = [f"{row.model}@{row.version}" for row in versions if row.meta.get("adapter")]
    if names:
        try:
            await context.scheduler.unload_adapters(names)
        except OperationFailed as error:  # the rows are gone: what is left of the deletion goes on
            log.warning("%s was deleted, but an engine still knows it: %s", ", ".join(names), error)


def _refuse_if_in_use(context: ControllerContext, found: Resolved) -> None:
    for job in jobs.list_unfinished(context.db):
        if job.wanted != "cancel" and (job.model in (found.name, found.model.id) or job.output_model == found.model.id):
            raise Conflict(
                f"{found.name} is used by the fine-tuning job {job.id}; cancel the job or wait for its end.",
                param="model",
                code="model_in_use",
            )
    one = found.version.version if found.checkpoint or found.pinned else None
    for adapter in adapters.list_on(context.db, found.model.id):
        if one in (None, adapter.base_version):
            raise Conflict(
                f"{adapter.model} is an adapter on {adapter.base} {adapter.base_version} and cannot answer without "
                "it; delete the adapter first.",
                param="model",
                code="model_in_use",
            )
