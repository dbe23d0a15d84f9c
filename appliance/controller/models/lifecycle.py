"""The rows of an imported model, and the base of an imported adapter; and the deletion of a model or a version: refused
while it is in use, otherwise rows, then replicas, then bytes."""

from __future__ import annotations

import logging
import time
from typing import Any

from appliance.controller.access.model_access import base_of, made_by_jobs, may_use
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest, Conflict, OperationFailed, shown
from appliance.controller.interfaces.principal import Principal
from appliance.models.library import ModelVersion
from appliance.store import jobs, models
from appliance.store.database import Database
from appliance.store.rows import JobRow, ModelRow, VersionRow, columns

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3
"""How many checkpoints of each job stay, as at OpenAI."""


# --- imports


def adapter_base(context: ControllerContext, name: str, trained_on: str, base: str | None) -> dict[str, Any]:
    """The version to serve the adapter `name` on, as arguments of `ModelLibrary.import_adapter`: of the model `base`,
    else of the model `trained_on` that the adapter's files name. Raises BadRequest, Conflict."""
    db = context.db
    row = models.find(db, base) if base is not None else _named(db, trained_on)
    if row is None:
        parent = shown(base or trained_on) if base or trained_on else "a model it does not name"
        remedy = "import that model first, or name the one that it was trained on with --base NAME"
        why = f"The adapter is one of {parent}, which is not on this box: {remedy}"
        raise BadRequest(f"{why} (`appliance model list` shows those that are here).", "base", "base_not_found")
    version = models.active(db, row)
    if version is None or version.meta.get("adapter"):
        why = "has no version that answers" if version is None else "is an adapter itself"
        message = f"The model {shown(row.id)} {why}, so no adapter can be served on it; name a base with whole weights."
        raise BadRequest(message, param="base", code="base_not_supported")
    path = version.disk_path or version.shm_path
    if path is None:
        where = f"The files of {row.id} {version.version} are in a tier below the disk"
        raise Conflict(f"{where}; send the model one request, and import again.", "base", "base_not_here")
    existing = models.find(db, name)
    active = models.active(db, existing) if existing is not None else None
    if existing is not None and (active is None or (active.meta.get("adapter") or {}).get("base") != row.id):
        message = f"The model {shown(name)} exists and is not an adapter of {row.id}; choose another name with --name."
        raise Conflict(message, param="name", code="model_exists")
    rank_limit = context.sizes.adapter_rank_limit(row)
    return {"base": row.id, "base_version": version.version, "base_path": path, "rank_limit": rank_limit}


def _named(db: Database, named: str) -> ModelRow | None:
    """Return the only model with this name, else source, else last part of this hub id or path."""
    if not named:
        return None
    rows = models.list_all(db, "active_version IS NOT NULL")
    bases = [row for row in rows if row.kind == "base"]
    last = named.rstrip("/").rpartition("/")[2]
    for matches in (
        [row for row in rows if row.id == named],
        [row for row in bases if row.source == named or row.source.startswith(f"{named}@")],
        [row for row in bases if row.id.rpartition("/")[2].lower() == last.lower()],
    ):
        if len(matches) == 1:
            return matches[0]
    return None


async def register(
    context: ControllerContext,
    imported: ModelVersion,
    caller: Principal,
    *,
    source: str,
    adapter: dict[str, Any] | None,
    serves: bool = True,
) -> dict[str, Any]:
    """Create the rows of a version whose bytes are in place: the model, the version, and the deployment. All
    owners who may use the base of an adapter may use the adapter too, until that is changed.

    Args:
        source: where its files came from.
        adapter: as `adapter_base` returns it; None for a whole model.
        serves: whether the version becomes the active one.

    Raises:
        OperationFailed: Jobs make a model of this name, or it or the base was deleted. The bytes are gone then.
    """
    db, info = context.db, {**imported.info, "warnings": list(imported.warnings)}
    base, meta = models.find(db, adapter["base"]) if adapter is not None else None, dict[str, Any]()
    if adapter is not None:
        rank = imported.info.get("adapter", {}).get("rank")
        meta = {"adapter": {"base": adapter["base"], "base_version": adapter["base_version"], "rank": rank}}
    elif info.get("chat_template") is not None:
        meta = {"chat_template": info["chat_template"]}
    if not serves:
        meta["quantization"] = info.get("quantization")  # may differ from that of the model's other versions
    now_s = time.time()
    version = VersionRow(imported.name, imported.version, source, imported.bytes, now_s, str(imported.path), meta=meta)
    why, code = "", "model_exists"
    if serves and made_by_jobs(db, imported.name):  # a job's model never answers with imported weights
        why = f"{shown(imported.name)} is the name of a model that jobs make; import this one with --name, by another."
    elif not serves and models.find(db, imported.name) is None:
        why, code = f"{shown(imported.name)} was deleted during the import", "model_not_found"
    elif adapter is not None and models.find_version(db, adapter["base"], adapter["base_version"]) is None:
        why, code = f"{adapter['base']} {adapter['base_version']} was deleted during the import", "base_not_found"
    if why:
        await context.model_ops.remove(imported.name, [version])
        raise OperationFailed(why, code=code)
    row = ModelRow(
        id=imported.name,
        kind="base" if base is None else "fine-tuned",
        base=None if base is None else base.id,
        bytes=imported.bytes,
        owned_by=f"org-{context.config.organization}",
        source=source,
        created_s=now_s,
        owner=caller.owner,
        info=info if base is None else base.info,
        **columns(imported if base is None else base, "arch params task max_model_len"),
    )
    with db.transaction():
        if models.find(db, row.id) is None:
            models.insert(db, row)
            for owner in sorted({*models.shared_with(db, base.id), base.owner} - {""}) if base is not None else ():
                models.share(db, row.id, owner)
        if models.find_version(db, row.id, imported.version) is None:
            models.insert_version(db, version)
        if serves:
            models.serve(db, row.id, imported.version)
    context.scheduler.nudge(f"model {row.id} version {imported.version} is ready")
    result = {"name": row.id, **columns(imported, "version params bytes")}
    if imported.warnings:
        result["warnings"] = list(imported.warnings)
    if adapter is not None:
        result["adapter of"] = f"{adapter['base']} {adapter['base_version']}"
    return result


# --- deletion


async def remove(
    context: ControllerContext, name: str, model: ModelRow, version: VersionRow | None, caller: Principal
) -> None:
    """Delete a model with all its versions, or one version. Both rows were read since the last await.

    Rows first: from then on nothing new can use the bytes; then the replicas leave; then the bytes go. A crash in
    between leaves unreferenced bytes, which the weight store's sweep deletes. Raises Conflict.
    """
    db = context.db
    with db.transaction():
        _refuse_if_in_use(db, name, model.id, version, caller)
        if version is None:
            versions = models.list_versions(db, model.id)
            models.delete(db, model.id)
        else:
            versions = [version]
            models.delete_version(db, model.id, version.version)
    context.scheduler.nudge(f"{name} was deleted")
    if version is None:
        await context.scheduler.withdraw(model.id)
    await remove_bytes(context, *versions)


async def remove_bytes(context: ControllerContext, *versions: VersionRow) -> None:
    """Remove the bytes of versions of one model whose rows are gone, once engines have unloaded adapters among them."""
    if names := [f"{row.model}@{row.version}" for row in versions if row.meta.get("adapter")]:
        try:
            await context.scheduler.unload_adapters(names)
        except OperationFailed as error:  # the rows are gone: the rest of the deletion continues
            log.warning("%s was deleted, but an engine still knows it: %s", ", ".join(names), error)
    if versions:
        await context.model_ops.remove(versions[0].model, versions)


def drop_older_checkpoints(db: Database, job: JobRow) -> list[VersionRow]:
    """Delete the rows of this job's checkpoints, except those of its last epochs and those in use. Returns the rows:
    the caller removes their bytes."""
    checkpoints = (row for row in models.versions_made_by(db, job.id) if row.meta.get("of_epoch"))
    by_step = sorted(checkpoints, key=lambda row: row.step)
    with db.transaction():
        older = [row for row in by_step[:-KEPT_CHECKPOINTS] if not _is_in_use(db, row)]
        for row in older:
            models.delete_version(db, row.model, row.version)
    return older


def _is_in_use(db: Database, row: VersionRow) -> bool:
    """Whether this checkpoint answers, is a canary, is trained further, judges a job, or is the base of an adapter."""
    names, adapters = _names(row), models.adapters_on(db, row.model)
    users = jobs.list_unfinished_with(db, names, "") or jobs.list_unfinished_judged_by(db, row.model, names, False)
    return bool(_answers(db, row) or users) or any(adapter.base_version == row.version for adapter in adapters)


def _answers(db: Database, row: VersionRow) -> str:
    """Return why this version answers requests, with the remedy; "" if it does not answer."""
    model, running = models.find(db, row.model), models.find_canary(db, row.model)
    if model is not None and model.active_version == row.version:
        return f"the active version of {row.model}; roll back to another version first, or delete the model."
    if running is not None and running.version == row.version:
        return f"the canary of {row.model}; promote it or roll it back first."
    return ""


def _names(row: VersionRow) -> set[str]:
    """Return the names by which a job may refer to this version."""
    return {f"{row.model}@{row.version}"} | ({row.checkpoint} if row.checkpoint else set())


def _refuse_if_in_use(db: Database, name: str, model: str, version: VersionRow | None, caller: Principal) -> None:
    """Raise Conflict if in use; the message does not name another owner's objects."""
    if version is not None and (how := _answers(db, version)):
        raise Conflict(f"{name} is {how}", param="model", code="version_in_use")
    names = {name, *([model] if version is None else _names(version))}
    trained = jobs.list_unfinished_with(db, {*names, model}, model)
    for job in [*trained, *jobs.list_unfinished_judged_by(db, model, names, version is None)]:
        # A job whose key may not use the model any more cannot start again, so it does not block the deletion.
        may_ask = job in trained or any(may_use(db, job.key_id, public) for public in names)
        may_start = may_ask and base_of(db, job) is not None
        if job.wanted != "cancel" and (job.phase == "running" or may_start):
            user = job.id if caller.viewer in (None, job.owner) else "of another owner"
            why = f"{name} is used by the fine-tuning job {user}; cancel the job or wait for its end."
            raise Conflict(why, "model", "model_in_use")
    for adapter in models.adapters_on(db, model):
        if version is None or version.version == adapter.base_version:
            user = adapter.model if models.is_visible(db, adapter.model, caller.viewer) else "of another owner"
            why = f"The adapter {user} is served on {adapter.base} {adapter.base_version}; delete the adapter first."
            raise Conflict(why, "model", "model_in_use")
