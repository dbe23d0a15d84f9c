"""POST /admin/v1/plan: checks whether something would fit, with the estimate that every job passes before queueing."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from appliance.controller.access.naming import Resolved, resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest, NotFound, shown
from appliance.controller.jobs.fit import box_facts, job_verdict, shape_of
from appliance.controller.jobs.requests import Hyperparameters, Name, refused, supported
from appliance.controller.models import capacity
from runtime.devices.kinds import kind_of
from train.methods.methods import DEFAULT
from train.plan import auto
from train.plan.errors import InvalidHyperparameter

Count = Annotated[int, Field(ge=1, le=65536)]
TYPICAL_EXAMPLES = 1000


class ServePlan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Name
    replicas: Count = 1
    tensor_parallel: Count = 1


class JobPlan(BaseModel):
    """method: as a job's `method.type`. examples: number in the training file, for resolving "auto"."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Name
    method: Name = DEFAULT.name
    hyperparameters: Hyperparameters = Field(default_factory=dict)
    devices: Count | None = None
    examples: Count = TYPICAL_EXAMPLES


class PlanRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    serve: ServePlan | None = None
    job: JobPlan | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""

    @router.post("/plan")
    async def plan(body: PlanRequest) -> dict[str, Any]:
        if (body.serve is None) == (body.job is None):
            raise BadRequest("Give either 'serve' or 'job'.", param="serve", code="invalid_value")
        return _serve(context, body.serve) if body.serve else _job(context, body.job)  # type: ignore[arg-type]


def _known(context: ControllerContext, name: str) -> Resolved:
    base = resolve(context.db, name)
    if base is None:
        raise NotFound(
            f"The model {shown(name)} does not exist on this box; GET /v1/models lists those that do.",
            param="model",
            code="model_not_found",
        )
    return base


def _serve(context: ControllerContext, body: ServePlan) -> dict[str, Any]:
    base = _known(context, body.model)
    verdict = capacity.serve(
        shape_of(base), base.version.bytes, body.replicas, body.tensor_parallel, box_facts(context)
    )
    return {
        "object": "plan",
        "kind": "serve",
        "model": base.name,
        "replicas": body.replicas,
        "tensor_parallel": body.tensor_parallel,
        **verdict.as_dict(),
    }


def _job(context: ControllerContext, body: JobPlan) -> dict[str, Any]:
    base, method = _known(context, body.model), supported(body.method, "job.method")
    facts = box_facts(context)
    most = min(body.devices or facts.node_devices, facts.node_devices)
    stats = auto.ModelStats(
        base.model.params,
        base.model.max_model_len or 2048,
        facts.device_kind,
        adapter_max_rank=context.adapter_rank_limit(base.model),
        computes_bf16=kind_of(facts.device_kind).computes_bf16(),
        tensor_slices=shape_of(base).tensor_slices,
    )
    dataset = auto.DatasetStats(body.examples, 200 * method.sequences * body.examples, 400)
    try:
        fields = method.resolve(body.hyperparameters, dataset, stats, most)
    except InvalidHyperparameter as error:
        raise refused(error, "hyperparameters") from error
    sizes = auto.allowed_sizes(fields["batch_size"], most, fields["micro_batch"], fields["tensor_parallel"])
    verdict = job_verdict(context, base, fields, sizes, method)
    chosen = (
        "full",
        "lora_rank",
        "zero_stage",
        "precision",
        "offload",
        "activation_checkpointing",
        "batch_size",
        "micro_batch",
        "max_length",
        "tensor_parallel",
    )
    return {
        "object": "plan",
        "kind": "job",
        "model": base.name,
        "method": method.name,
        "hyperparameters": fields.get("options", {}) | {name: fields[name] for name in chosen},
        **verdict.as_dict(),
    }
