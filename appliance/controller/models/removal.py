"""Deletes a model or one of its versions: refused while it is in use; otherwise rows, then replicas, then bytes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from appliance.controller.access.model_access import base_of, known_model, may_use
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import Conflict, OperationFailed
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.objects import jobs, models
from appliance.store.rows import JobRow, ModelRow, VersionRow

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3
"""How many checkpoints of each job stay, as at OpenAI."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """What a name to delete means: a version of the model, or with None the whole model, whether any of its
    versions answers or not (its job may have failed after it published some)."""

    name: str
    model: ModelRow
    version: VersionRow | None


def doomed(context: ControllerContext, name: str) -> Doomed:
    """Raises NotFound."""
    if (model := models.find(context.db, name)) is not None:
        return Doomed(name, model, None)
    found = known_model(context.db, name)
    return Doomed(name, found.model, found.version)


async def remove(context: ControllerContext, found: Doomed, caller: Principal) -> None:
    """Delete a model with all its versions, or one version by its checkpoint's or pinned name. `found` is of this very
    moment.

    Rows first: from then on nothing new can use the bytes; then the replicas leave; then the bytes go. A crash in
    between leaves unreferenced bytes, which the weight store's sweep deletes. Raises Conflict.
    """
    db, model, version = context.db, found.model, found.version
    with db.transaction():
        refuse_if_in_use(context, found, caller)
        if version is None:
            versions = models.list_versions(db, model.id)
            models.delete(db, model.id)
        else:
            versions = [version]
            models.delete_version(db, model.id, version.version)
    context.scheduler.nudge(f"{found.name} was deleted")
    if version is None:
        await context.scheduler.withdraw(model.id)
    await remove_bytes(context, *versions)


async def remove_bytes(context: ControllerContext, *versions: VersionRow) -> None:
    """Removes the bytes of versions of one model whose rows are gone. Engines unload those that are adapters before."""
    if names := [f"{row.model}@{row.version}" for row in versions if row.meta.get("adapter")]:
        try:
            await context.scheduler.unload_adapters(names)
        except OperationFailed as error:  # the rows are gone: the rest of the deletion continues
            log.warning("%s was deleted, but an engine still knows it: %s", ", ".join(names), error)
    if versions:
        await context.model_ops.remove(versions[0].model, versions)


def drop_older_checkpoints(db: Database, job: JobRow) -> list[VersionRow]:
    """Delete the checkpoints of this job but for those of its last epochs, and those that something rests on. Returns
    them: their bytes have to follow."""
    checkpoints = (row for row in models.versions_made_by(db, job.id) if row.meta.get("of_epoch"))
    by_step = sorted(checkpoints, key=lambda row: row.step)
    with db.transaction():
        older = [row for row in by_step[:-KEPT_CHECKPOINTS] if not _rests_on(db, row)]
        for row in older:
            models.delete_version(db, row.model, row.version)
    return older


def _rests_on(db: Database, row: VersionRow) -> bool:
    """Whether anything would miss this checkpoint: it answers or is compared, or what was made of it, or
    is being made or judged by it, needs it."""
    names = _names(row)
    return (
        bool(_answers(db, row))
        or bool(jobs.list_unfinished_with(db, names, ""))
        or bool(jobs.list_unfinished_judged_by(db, row.model, names, False))
        or any(adapter.base_version == row.version for adapter in models.adapters_on(db, row.model))
    )


def _answers(db: Database, row: VersionRow) -> str:
    """How this version answers requests, and what ends that; "" if it does not."""
    model, running = models.find(db, row.model), models.find_canary(db, row.model)
    if model is not None and model.active_version == row.version:
        return f"the active version of {row.model}; roll back to another version first, or delete the model."
    if running is not None and running.version == row.version:
        return f"the canary of {row.model}; promote it or roll it back first."
    return ""


def _names(row: VersionRow) -> set[str]:
    """All names by which a job may have this version, but for its model's."""
    return {f"{row.model}@{row.version}"} | ({row.checkpoint} if row.checkpoint else set())


def refuse_if_in_use(
    context: ControllerContext, found: Doomed, caller: Principal, leaving: Collection[str] = ()
) -> None:
    """Raises Conflict, whose message does not name another owner's objects. leaving: jobs and models that go first."""
    db, model, one = context.db, found.model.id, found.version.version if found.version is not None else None
    if found.version is not None and (how := _answers(db, found.version)):
        raise Conflict(f"{found.name} is {how}", param="model", code="version_in_use")
    names = {found.name, *([model] if found.version is None else _names(found.version))}
    trained = jobs.list_unfinished_with(db, {*names, model}, model)
    for job in [*trained, *jobs.list_unfinished_judged_by(db, model, names, one is None)]:
        if job.wanted == "cancel" or job.id in leaving:
            continue
        # A job whose key may not use the model any more cannot start again, so it does not block the deletion.
        may_judge = job not in trained and any(may_use(db, job.key_id, name) for name in names)
        if job.phase == "running" or may_judge or (job in trained and base_of(db, job) is not None):
            user = job.id if caller.viewer in (None, job.owner) else "of another owner"
            _in_use(f"{found.name} is used by the fine-tuning job {user}; cancel the job or wait for its end.")
    for adapter in models.adapters_on(db, model):
        if one in (None, adapter.base_version) and adapter.model not in leaving:
            name = adapter.model if models.is_visible(db, adapter.model, caller.viewer) else "of another owner"
            _in_use(f"The adapter {name} is served on {adapter.base} {adapter.base_version}; delete the adapter first.")


def _in_use(why: str) -> NoReturn:
    raise Conflict(why, param="model", code="model_in_use")
