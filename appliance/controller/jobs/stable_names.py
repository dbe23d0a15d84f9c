"""Rules of names that outlive a job: who may make a version of an existing model, and when a version answers."""

from __future__ import annotations

from appliance.controller.access.naming import (
    STABLE_NAME_RULE,
    Resolved,
    fine_tuned_name,
    is_stable_name,
    resolve,
    root_base,
)
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import Conflict, InvalidValue, shown
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.requests import JobCreate
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs, models
from appliance.store.rows import JobRow, ModelRow


def output_of(
    context: ControllerContext, body: JobCreate, base: Resolved, caller: Principal, *, makes_adapter: bool
) -> str:
    """The name of the model that a job makes: a new name, or the model that it was asked to make a version of. Call it
    in the transaction that inserts the job. Raises BadRequest and Conflict."""
    db = context.db
    if body.publish_as is None:
        if not body.activate or body.gate is not None:
            param = "gate" if body.gate is not None else "activate"
            raise InvalidValue(
                f"'{param}' is for a name that goes on whatever comes of the job: give 'publish_as' with it.", param
            )
        return fine_tuned_name(root_base(db, base.model), context.config.organization, body.suffix)
    name = body.publish_as
    if body.suffix is not None:
        raise InvalidValue(
            "'suffix' is a part of a name that the box makes up, and 'publish_as' is the whole name: give one of them.",
            "suffix",
        )
    others = jobs.unfinished_making(db, name)
    existing = models.find(db, name)
    if existing is None and not is_stable_name(name):
        raise InvalidValue(
            f"Invalid value for 'publish_as': {shown(name)} was given, expected the name of a fine-tuned model of "
            f"yours, or a new one: {STABLE_NAME_RULE}.",
            "publish_as",
        )
    if (
        (existing is not None and (existing.job_id is None or existing.owner != caller.owner))
        or any(job.owner != caller.owner for job in others)
        or job_records.find_checkpoint(db, name) is not None
    ):
        raise _refused(name, "is taken: versions are made of fine-tuned models of one's own. Choose another name.")
    _check_alike(db, name, existing, others, base)
    active = models.find_version(db, name, existing.active_version) if existing and existing.active_version else None
    if active is not None and bool(active.meta.get("adapter")) is not makes_adapter:
        has, makes = ("an adapter", "whole weights") if active.meta.get("adapter") else ("whole weights", "an adapter")
        raise _refused(
            name,
            f"is served as {has}, and this job would make {makes}: set the hyperparameter lora_publish to "
            f"{'adapter' if active.meta.get('adapter') else 'merged'}, or choose another name. (What is trained on an "
            "adapter is merged; train on its base.)",
        )
    return name


def _check_alike(db: Database, name: str, existing: ModelRow | None, others: list[JobRow], base: Resolved) -> None:
    """Refuse a version whose model is another: engines are set up for a model, so its versions may differ only in their
    numbers. Raises Conflict."""
    root = root_base(db, base.model)
    roots = {root_base(db, existing)} if existing is not None else set()
    for job in others:
        found = resolve(db, job.model)
        roots.add(root_base(db, found.model) if found is not None else job.model)
    if roots - {root}:
        raise _refused(name, f"is made of {', '.join(sorted(roots - {root}))}, and this job trains {root}.")
    if existing is not None and (existing.arch, existing.params) != (base.model.arch, base.model.params):
        raise _refused(
            name,
            f"has {existing.params:,} parameters ({existing.arch}), and {base.model.id} has {base.model.params:,} "
            f"({base.model.arch}).",
        )


def _refused(name: str, why: str) -> Conflict:
    return Conflict(f"The model {shown(name)} {why}", param="publish_as", code="model_exists")


def answers_at_once(db: Database, job: JobRow, version: str) -> bool:
    """Whether this version of a job answers now: the job asks for that, or nothing else would answer, or the job's own
    version answers. Never if the version that answers is of the other kind (adapter, whole weights), because its
    engines would have to go first. Nor if a gate judges the job: the gate lets it answer."""
    if job.gate is not None:
        return False
    model, new = models.find(db, job.output_model), models.find_version(db, job.output_model, version)
    active = models.find_version(db, job.output_model, model.active_version) if model and model.active_version else None
    if active is None or new is None:
        return True
    if bool(active.meta.get("adapter")) is not bool(new.meta.get("adapter")):
        return False
    return bool(job.activate) or active.meta.get("job_id") == job.id
