"""Deletes a model or one of its versions: refused while it is in use; otherwise rows, then replicas, then bytes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from appliance.controller.access.model_access import base_of, known_model, why_not_asked
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import Conflict, OperationFailed
from appliance.controller.interfaces.principal import Principal
from appliance.controller.interfaces.records import VersionPaths
from appliance.store.database import Database
from appliance.store.objects import adapters, job_records, jobs, models
from appliance.store.records import canaries
from appliance.store.rows import JobRow, ModelRow, VersionRow

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3
"""How many checkpoints of each job stay, as at OpenAI."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """What a name that is to be deleted means: a version of the model, or with None the whole model, whether any of its
    versions answers or not (its job may have failed after it published some)."""

    name: str
    model: ModelRow
    version: VersionRow | None


def doomed(context: ControllerContext, name: str) -> Doomed:
    """Raises NotFound."""
    model = models.find(context.db, name)
    if model is not None:
        return Doomed(name, model, None)
    found = known_model(context.db, name)
    return Doomed(name, found.model, found.version)


def paths_of(row: VersionRow) -> VersionPaths:
    kind = "adapter" if row.meta.get("adapter") else "version"
    return VersionPaths(row.version, row.disk_path, row.shm_path, kind)


async def remove(context: ControllerContext, found: Doomed, caller: Principal) -> None:
    """Delete a model with all its versions, or one version by its checkpoint's or pinned name.

    Rows first: from then on nothing new can use the bytes; then the replicas leave; then the bytes go. A crash in
    between leaves unreferenced bytes, which the weight store's sweep deletes. Raises Conflict, and NotFound for what
    another request has deleted meanwhile.
    """
    db, model = context.db, found.model
    refuse_if_in_use(context, found, caller)
    if (version := found.version) is not None:
        if model.active_version == version.version:
            raise Conflict(
                f"{found.name} is the active version of {model.id}; roll back to another version first, "
                "or delete the model.",
                param="model",
                code="version_in_use",
            )
        running = canaries.find_running(db, model.id)
        if running is not None and running.version == version.version:
            raise Conflict(
                f"{version.version} is the canary of {model.id}; promote it or roll it back first.",
                param="model",
                code="version_in_use",
            )
        models.delete_version(db, model.id, version.version)
        await remove_bytes(context, version)
        context.scheduler.nudge(f"version {version.version} of {model.id} was deleted")
        return
    with db.transaction():
        doomed(context, found.name)  # NotFound: another request has deleted it meanwhile
        refuse_if_in_use(context, found, caller)
        versions = models.list_versions(db, model.id)
        models.delete(db, model.id)
    context.scheduler.nudge(f"model {model.id} was deleted")
    await context.scheduler.withdraw(model.id)
    await _unload(context, versions)
    await context.model_ops.remove(model.id, [paths_of(row) for row in versions])


async def remove_bytes(context: ControllerContext, version: VersionRow) -> None:
    """Removes the bytes of a version whose row is gone."""
    await _unload(context, [version])
    await context.model_ops.remove(version.model, [paths_of(version)])


def drop_older_checkpoints(db: Database, job: JobRow) -> list[VersionRow]:
    """Delete the checkpoints of this job but for those of its last epochs, and those that something rests on. Returns
    them: their bytes have to follow."""
    made = models.versions_made_by(db, job.output_model, job.id)
    by_step = sorted((row for row in made if row.meta.get("of_epoch")), key=lambda row: int(row.meta["step"]))
    with db.transaction():
        older = [row for row in by_step[:-KEPT_CHECKPOINTS] if not _rests_on(db, row)]
        for row in older:
            models.delete_version(db, row.model, row.version)
    return older


def _rests_on(db: Database, row: VersionRow) -> bool:
    """Whether anything would miss this checkpoint: it answers or is compared, somebody pinned it, or what was made of
    it, or is being made or judged by it, needs it."""
    model = models.find(db, row.model)
    running = canaries.find_running(db, row.model)
    names = _names(db, row.model, row.version)
    return (
        bool(row.pinned)
        or (model is not None and model.active_version == row.version)
        or (running is not None and running.version == row.version)
        or bool(jobs.list_unfinished_with(db, names, ""))
        or bool(jobs.list_unfinished_judged_by(db, row.model, names, False))
        or any(adapter.base_version == row.version for adapter in adapters.list_on(db, row.model))
    )


def _names(db: Database, model: str, version: str) -> set[str]:
    """All names by which a job may have this version, but for its model's."""
    names = {f"{model}@{version}"}
    if (checkpoint := job_records.checkpoint_of(db, model, version)) is not None:
        names.add(checkpoint)
    return names


async def _unload(context: ControllerContext, versions: list[VersionRow]) -> None:
    """Make engines unload those that are adapters, so that their bytes can be deleted."""
    if names := [f"{row.model}@{row.version}" for row in versions if row.meta.get("adapter")]:
        try:
            await context.scheduler.unload_adapters(names)
        except OperationFailed as error:  # the rows are gone: the rest of the deletion continues
            log.warning("%s was deleted, but an engine still knows it: %s", ", ".join(names), error)


def refuse_if_in_use(
    context: ControllerContext, found: Doomed, caller: Principal, leaving: Collection[str] = ()
) -> None:
    """Raises Conflict, whose message does not name another owner's objects. leaving: jobs and models that go first."""
    db, model, one = context.db, found.model.id, found.version.version if found.version is not None else None
    names = {found.name, *([model] if one is None else _names(db, model, one))}
    trained = jobs.list_unfinished_with(db, {*names, model}, model)
    judged = jobs.list_unfinished_judged_by(db, model, names, one is None)
    for job in [*trained, *judged]:
        if job.wanted == "cancel" or job.id in leaving:
            continue
        # One whose key may not use the model any more never starts again, and its owner cannot keep it from others.
        if job.phase == "running" or (
            base_of(db, job) is not None
            if job in trained
            else not all(why_not_asked(db, job.key_id, name) for name in names)
        ):
            own = caller.viewer in (None, job.owner)
            raise Conflict(
                f"{found.name} is used by the fine-tuning job {job.id}; cancel the job or wait for its end."
                if own
                else f"{found.name} is used by a fine-tuning job of somebody whom it is shared with; wait for its end.",
                param="model",
                code="model_in_use",
            )
    for adapter in adapters.list_on(context.db, found.model.id):
        if one in (None, adapter.base_version) and adapter.model not in leaving:
            on = f"an adapter on {adapter.base} {adapter.base_version} and cannot answer without it"
            raise Conflict(
                f"{adapter.model} is {on}; delete the adapter first."
                if models.is_visible(context.db, adapter.model, caller.viewer)
                else f"Somebody whom it was shared with has {on}; it can be deleted once that is, by them or by an "
                "administrator.",
                param="model",
                code="model_in_use",
            )
