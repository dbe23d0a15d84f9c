"""The rows of what an import brought in, and which model an imported adapter is served on."""

from __future__ import annotations

import time
from typing import Any

from appliance.controller.access.model_access import made_by_jobs
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest, Conflict, OperationFailed, shown
from appliance.controller.interfaces.principal import Principal
from appliance.models.library import ModelVersion
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.rows import ModelRow, VersionRow, columns


def adapter_base(context: ControllerContext, name: str, trained_on: str, base: str | None) -> dict[str, Any]:
    """The version that the adapter `name` is to be served on, as arguments of `ModelLibrary.import_adapter`: of the
    model `base`, else of the one that the adapter names, by its name here, its source, or the last part of a hub id or
    path. Raises BadRequest, Conflict."""
    db = context.db
    row = models.find(db, base) if base is not None else _named(db, trained_on)
    if row is None:
        wanted = shown(base or trained_on) if base or trained_on else "a model it does not name"
        raise BadRequest(
            f"The adapter is one of {wanted}, which is not on this box: import that model first, or name the one that "
            "it was trained on with --base NAME (`appliance model list` shows those that are here).",
            param="base",
            code="base_not_found",
        )
    version = models.active(db, row)
    if version is None or version.meta.get("adapter"):
        what = "has no version that answers" if version is None else "is an adapter itself"
        message = (
            f"The model {shown(row.id)} {what}, so no adapter can be served on it; name a base with whole weights."
        )
        raise BadRequest(message, param="base", code="base_not_supported")
    path = version.disk_path or version.shm_path
    if path is None:
        raise Conflict(
            f"The files of {row.id} {version.version} are in a tier below the disk; send the model one request, and "
            "import again.",
            param="base",
            code="base_not_here",
        )
    there = models.find(db, name)
    active = models.active(db, there) if there is not None else None
    if there is not None and (active is None or (active.meta.get("adapter") or {}).get("base") != row.id):
        message = f"The model {shown(name)} exists and is not an adapter of {row.id}; choose another name with --name."
        raise Conflict(message, param="name", code="model_exists")
    rank_limit = context.sizes.adapter_rank_limit(row)
    return {"base": row.id, "base_version": version.version, "base_path": path, "rank_limit": rank_limit}


def _named(db: Database, named: str) -> ModelRow | None:
    if not named:
        return None
    rows = models.list_callable(db)
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
    made: ModelVersion,
    caller: Principal,
    *,
    source: str,
    adapter: dict[str, Any] | None,
    serves: bool = True,
) -> dict[str, Any]:
    """Create the rows of a version whose bytes are in place: the model, the version, and the deployment. An adapter is
    for those who may use its base, until that is changed.

    Args:
        source: where its files came from.
        adapter: as `adapter_base` returns it; None for a whole model.
        serves: whether the version becomes the active one.

    Raises:
        OperationFailed: Jobs make a model of this name, or the base was deleted meanwhile. The bytes are gone then.
    """
    db, info = context.db, {**made.info, "warnings": list(made.warnings)}
    below, meta, refused = None, dict[str, Any](), ("", "")
    if adapter is not None:
        below = models.find(db, adapter["base"])
        rank = made.info.get("adapter", {}).get("rank")
        meta = {"adapter": {"base": adapter["base"], "base_version": adapter["base_version"], "rank": rank}}
        if below is None or models.find_version(db, below.id, adapter["base_version"]) is None:
            refused = f"{adapter['base']} {adapter['base_version']} was deleted during the import", "base_not_found"
    elif info.get("chat_template") is not None:
        meta = {"chat_template": info["chat_template"]}
    if not serves:
        meta["quantization"] = info.get("quantization")  # it may have another form than the model's other versions
    if made_by_jobs(db, made.name):  # an import never becomes a version of what jobs make
        text = f"{shown(made.name)} is the name of a model that jobs make; import this one with --name, by another."
        refused = text, "model_exists"
    now_s = time.time()
    version = VersionRow(made.name, made.version, source, made.bytes, now_s, str(made.path), meta=meta)
    if refused[0]:
        await context.model_ops.remove(made.name, [version])
        raise OperationFailed(refused[0], code=refused[1])
    row = ModelRow(
        id=made.name,
        kind="base" if below is None else "fine-tuned",
        base=None if below is None else below.id,
        bytes=made.bytes,
        owned_by=f"org-{context.config.organization}",
        source=source,
        created_s=now_s,
        owner=caller.owner,
        info=info if below is None else below.info,
        **columns(made if below is None else below, "arch params task max_model_len"),
    )
    with db.transaction():
        if models.find(db, row.id) is None:
            models.insert(db, row)
            for owner in sorted({*models.shared_with(db, below.id), below.owner} - {""}) if below is not None else ():
                models.share(db, row.id, owner)
        if models.find_version(db, row.id, made.version) is None:
            models.insert_version(db, version)
        if serves:
            models.serve(db, row.id, made.version)
    context.scheduler.nudge(f"model {row.id} version {made.version} is ready")
    result = {"name": row.id, **columns(made, "version params bytes")}
    if made.warnings:
        result["warnings"] = list(made.warnings)
    if adapter is not None:
        result["adapter of"] = f"{adapter['base']} {adapter['base_version']}"
    return result
