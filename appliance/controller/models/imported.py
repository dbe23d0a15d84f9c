"""The rows of what an import brought in, and which model an imported adapter is served on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NoReturn

from appliance.controller.access.naming import made_by_jobs
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest, Conflict, OperationFailed, shown
from appliance.controller.interfaces.principal import Principal
from appliance.controller.interfaces.records import AdapterBase, AdapterFound, ModelStats
from appliance.controller.models.removal import paths_of
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.records import deployments
from appliance.store.rows import DeploymentRow, ModelRow, VersionRow, columns


async def _refuse(context: ControllerContext, stats: ModelStats, message: str, code: str) -> NoReturn:
    """Its bytes go. Raises OperationFailed."""
    orphan = VersionRow(stats.name, stats.version, stats.source, stats.bytes, time.time(), stats.disk_path)
    await context.model_ops.remove(stats.name, [paths_of(orphan)])
    raise OperationFailed(message, code=code)


async def _refuse_made_by_jobs(context: ControllerContext, stats: ModelStats) -> None:
    """An import never becomes a version of what jobs make, whatever name its files gave it."""
    if made_by_jobs(context.db, stats.name):
        message = f"{shown(stats.name)} is the name of a model that jobs make; import this one with --name, by another."
        await _refuse(context, stats, message, "model_exists")


def adapter_base(context: ControllerContext, found: AdapterFound, base: str | None) -> AdapterBase:
    """The version that an adapter is to be served on: of the model `base`, else of the one that the adapter names,
    by its name here, its source, or the last part of a hub id or path. Raises BadRequest, Conflict."""
    db = context.db
    row = models.find(db, base) if base is not None else _named(db, found.base)
    if row is None:
        wanted = shown(base) if base is not None else shown(found.base) if found.base else "a model it does not name"
        raise BadRequest(
            f"The adapter is one of {wanted}, which is not on this box: import that model first, or name the one that "
            "it was trained on with --base NAME (`appliance model list` shows those that are here).",
            param="base",
            code="base_not_found",
        )
    version = models.find_version(db, row.id, row.active_version) if row.active_version else None
    if version is None or version.meta.get("adapter"):
        what = "has no version that answers" if version is None else "is an adapter itself"
        raise BadRequest(
            f"The model {shown(row.id)} {what}, so no adapter can be served on it; name a base with whole weights.",
            param="base",
            code="base_not_supported",
        )
    path = version.disk_path or version.shm_path
    if path is None:
        raise Conflict(
            f"The files of {row.id} {version.version} are in a tier below the disk; send the model one request, and "
            "import again.",
            param="base",
            code="base_not_here",
        )
    _check_same_kind(db, found.name, row.id)
    return AdapterBase(row.id, version.version, path, context.sizes.adapter_rank_limit(row))


def _named(db: Database, named: str) -> ModelRow | None:
    if not named:
        return None
    rows = [row for row in models.list_callable(db) if row.kind == "base"]
    last = named.rstrip("/").rpartition("/")[2]
    for matches in (
        [row for row in models.list_callable(db) if row.id == named],
        [row for row in rows if row.source == named or row.source.startswith(f"{named}@")],
        [row for row in rows if row.id.rpartition("/")[2].lower() == last.lower()],
    ):
        if len(matches) == 1:
            return matches[0]
    return None


def _check_same_kind(db: Database, name: str, base: str) -> None:
    """A new version of a model that is there: of an adapter on the same base. Raises Conflict."""
    row = models.find(db, name)
    if row is None:
        return
    active = models.find_version(db, name, row.active_version) if row.active_version else None
    before = active.meta.get("adapter") if active is not None else None
    if before is None or before["base"] != base:
        raise Conflict(
            f"The model {shown(name)} exists and is not an adapter of {base}; choose another name with --name.",
            param="name",
            code="model_exists",
        )


async def register_adapter(
    context: ControllerContext, stats: ModelStats, base: AdapterBase, caller: Principal
) -> dict[str, Any]:
    """Create the rows of an adapter whose bytes are in place. It is for those who may use its base, until somebody
    changes that. Raises OperationFailed if the base was deleted meanwhile, or jobs make a model of this name."""
    await _refuse_made_by_jobs(context, stats)
    adapter = {"base": base.model, "base_version": base.version, "rank": stats.adapter_rank}
    below = models.find(context.db, base.model)
    if below is None or models.find_version(context.db, base.model, base.version) is None:
        message = f"{base.model} {base.version} was deleted during the import"
        await _refuse(context, stats, message, "base_not_found")
    row = replace(_row(context, stats, below, caller), kind="fine-tuned", base=below.id)
    audience = {*models.shared_with(context.db, below.id), below.owner} - {""}
    return _insert(context, row, stats, {"adapter": adapter}, audience) | {"adapter of": f"{base.model} {base.version}"}


async def register(context: ControllerContext, stats: ModelStats, caller: Principal) -> dict[str, Any]:
    """Create the rows of a model whose bytes are in place: model or new active version, and its deployment. Raises
    OperationFailed: jobs make a model of this name."""
    await _refuse_made_by_jobs(context, stats)
    row = _row(context, stats, stats, caller)
    template = stats.info.get("chat_template")
    return _insert(context, row, stats, {} if template is None else {"chat_template": template}, set())


def _row(context: ControllerContext, stats: ModelStats, of: ModelStats | ModelRow, caller: Principal) -> ModelRow:
    """of: what is computed, the model itself or the base of an adapter."""
    return ModelRow(
        id=stats.name,
        kind="base",
        bytes=stats.bytes,
        owned_by=f"org-{context.config.organization}",
        source=stats.source,
        created_s=time.time(),
        owner=caller.owner,
        **columns(of, "arch params task max_model_len info"),
    )


def _insert(
    context: ControllerContext, row: ModelRow, stats: ModelStats, meta: dict[str, Any], audience: set[str]
) -> dict[str, Any]:
    db = context.db
    with db.transaction():
        if models.find(db, row.id) is None:
            models.insert(db, row)
            for owner in sorted(audience):
                models.share(db, row.id, owner)
        if models.find_version(db, row.id, stats.version) is None:
            models.insert_version(
                db,
                VersionRow(
                    model=row.id,
                    created_s=row.created_s,
                    meta=meta,
                    **columns(stats, "version source bytes disk_path"),
                ),
            )
        models.activate(db, row.id, stats.version)
        if deployments.find(db, row.id) is None:
            deployments.insert(db, DeploymentRow(model=row.id, created_s=row.created_s))
    context.scheduler.nudge(f"model {row.id} version {stats.version} is ready")
    made = {"name": row.id, "version": stats.version, "params": stats.params, "bytes": stats.bytes}
    warnings = stats.info.get("warnings")
    return {**made, "warnings": warnings} if warnings else made
