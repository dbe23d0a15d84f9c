"""POST /admin/v1/plan: checks whether something would fit, with the estimate that every job passes before queueing."""

from __future__ import annotations

import asyncio
from functools import partial
from statistics import median
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from appliance.controller.access.model_access import unknown_model, usable_model
from appliance.controller.access.naming import Resolved, resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import energy
from appliance.controller.files import storage
from appliance.controller.files.storage import FILES
from appliance.controller.http.routers import needs, unaudited
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Forbidden, InvalidValue
from appliance.controller.interfaces.principal import ADMIN, FINE_TUNING, Caller, Principal
from appliance.controller.jobs import devices, settings
from appliance.controller.jobs.planned import estimate, planned, served, typical
from appliance.controller.jobs.requests import Hyperparameters, Name, refused
from appliance.controller.jobs.settings import shape_of
from appliance.store.objects import job_records
from runtime.devices.published import accelerator_called
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS
from train.plan import auto
from train.plan.errors import InvalidHyperparameter

Count = Annotated[int, Field(ge=1, le=65536)]


class ServePlan(StrictBody):
    model: Name
    replicas: Count = 1
    tensor_parallel: Count = 1


class JobPlan(StrictBody):
    """training_file: whose tokens are counted; else `examples` of typical length are assumed, on which "auto" depends.
    devices: the most that it may have."""

    model: Name
    hyperparameters: Hyperparameters = Field(default_factory=dict)
    devices: Count | None = None
    training_file: Name | None = None
    examples: Count | None = None
    method: Literal[tuple(METHODS)] = DEFAULT.name  # type: ignore[valid-type]


class PlanRequest(StrictBody):
    serve: ServePlan | None = None
    job: JobPlan | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""

    @router.post("/plan")
    @needs(FINE_TUNING)
    @unaudited  # nothing is changed
    async def plan(body: PlanRequest, caller: Caller) -> dict[str, Any]:
        if (body.serve is None) == (body.job is None):
            raise InvalidValue("Give either 'serve' or 'job'.", "serve")
        if body.job is not None:
            return await _job(context, body.job, caller)
        if not caller.is_admin:
            raise Forbidden(ADMIN)
        assert body.serve is not None
        return _serve(context, body.serve)


def _serve(context: ControllerContext, body: ServePlan) -> dict[str, Any]:
    base = resolve(context.db, body.model)
    if base is None:
        raise unknown_model(body.model)
    size = partial(context.sizes.size, base.model, base.version)
    weight_bytes, box = base.version.bytes, settings.box_facts(context)
    return served(base.name, size, weight_bytes, body.replicas, body.tensor_parallel, box)


async def _job(context: ControllerContext, body: JobPlan, caller: Principal) -> dict[str, Any]:
    base = usable_model(context.db, caller, body.model)
    method = METHODS[body.method]
    dataset = typical(body.examples, method)
    if body.training_file is not None:
        dataset = await _counted(context, base, body.training_file, method, caller)
    wish = devices.Wish(max_devices=body.devices)
    try:
        chosen = settings.choose_on_box(context, base, method, body.hyperparameters, dataset, wish)
    except InvalidHyperparameter as error:
        raise refused(error, "hyperparameters") from error
    verdict = settings.verdict_on_box(context, base, chosen, method)
    told = planned(base.name, method, chosen, dataset, verdict, counted=body.training_file is not None)
    device_hours = await _device_hours(context, body.model, method, chosen, dataset, caller)
    drawn = estimated = None
    if device_hours is None:
        found = context.scheduler.status()["devices"]
        known = accelerator_called(found[0]["name"]) if found else None
        shown = verdict.numbers["devices"]
        estimated = estimate(shape_of(base), method, chosen, dataset, shown, known)
    else:
        full = chosen.resolved["full"]
        readings = context.health.newest()
        drawn = await asyncio.to_thread(energy.estimate, context.db, readings, body.model, method.name, full,
            device_hours,
        )  # fmt: skip
    return {**told, "device_hours": device_hours, "energy": drawn, "estimate": estimated}


async def _device_hours(
    context: ControllerContext,
    model: str,
    method: Method,
    chosen: settings.Settings,
    dataset: auto.DatasetStats,
    caller: Principal,
) -> float | None:
    """Device hours of the steps, at the speed that this box has had with jobs like it; None if there were none, or if
    the data does not say how many tokens there will be."""
    fields = chosen.resolved
    speeds = list[float]()
    if not method.rolls_out:
        db = context.db
        speeds = await asyncio.to_thread(job_records.device_speeds, db, model, method.name, fields["full"])
    return dataset.n_tokens * fields["n_epochs"] / median(speeds) / 3600 if speeds else None


async def _counted(
    context: ControllerContext, base: Resolved, file_id: str, method: Method, caller: Principal
) -> auto.DatasetStats:
    """What the job's validation would find in the file. Raises BadRequest and NotFound."""
    row = FILES.known(context.db, file_id, caller, "training_file")
    await settings.refuse_unsafe(context, base)
    report = await storage.checked(
        context, context.files_dir / row.id, method=method, tokenizer=settings.tokenizer_of(context, base)
    )
    if report.ok and (reason := method.refuses(report.shape)) is not None:
        report.add_error(1, reason)
    if not report.ok:
        raise BadRequest(
            f"The file {row.id} has {storage.summary(report)}", param="training_file", code="invalid_training_file"
        )
    return settings.dataset_of(report)
