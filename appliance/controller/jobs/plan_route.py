"""POST /admin/v1/plan: would it fit? The same estimate that every job passes before it is queued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from appliance.controller.access.naming import Resolved, resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import node_sizes
from appliance.controller.interfaces.errors import BadRequest, NotFound, shown
from appliance.controller.jobs.requests import Hyperparameters, Name, refused
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts, Verdict
from runtime.devices.kinds import HOST, kind_of
from train.methods.method import Method
from train.methods.methods import DEFAULT
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ModelShape

Count = Annotated[int, Field(ge=1, le=65536)]
MAX_CONFIG_BYTES = 4 * 2**20
TYPICAL_EXAMPLES = 1000


class ServePlan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Name
    replicas: Count = 1
    tensor_parallel: Count = 1


class JobPlan(BaseModel):
    """examples: of the training file, for what "auto" makes of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Name
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


def box_facts(context: ControllerContext) -> BoxFacts:
    now = context.scheduler.status()
    devices = now["devices"]
    nodes = node_sizes.known(context)
    budget = now["memory"]["budget_bytes"]
    room = now["memory"].get("room_bytes")
    return BoxFacts(
        devices=max(1, len(devices)),
        node_devices=max(1, nodes.largest),
        device_kind=devices[0]["kind"] if devices else HOST.name,
        device_memory_bytes=min((d["memory_bytes"] for d in devices), default=0),
        store_budget_bytes=budget,
        host_memory_bytes=now["memory"].get("host_bytes"),
        store_room_bytes=room if room is not None else (budget or 0) - (now["memory"]["used_bytes"] or 0),
    )


def shape_of(base: Resolved) -> ModelShape:
    """From the version's config.json; of a model whose files are not at hand only the number of parameters counts."""
    for folder in (base.version.disk_path, base.version.shm_path):
        path = Path(folder, "config.json") if folder else None
        if path is not None and path.is_file() and path.stat().st_size <= MAX_CONFIG_BYTES:
            return ModelShape.from_config(json.loads(path.read_text()), base.model.params)
    return ModelShape(base.model.params)


def job_verdict(context: ControllerContext, base: Resolved, fields: dict[str, Any], sizes: list[int],
                method: Method = DEFAULT) -> Verdict:  # fmt: skip
    """Of a job with these fields of a TrainSpec at any of these world sizes."""
    return capacity.job(shape_of(base), fields, sizes, box_facts(context), method)


def _known(context: ControllerContext, name: str) -> Resolved:
    base = resolve(context.db, name)
    if base is None:
        raise NotFound(f"The model {shown(name)} does not exist on this box; GET /v1/models lists those that do.",
                       param="model", code="model_not_found")  # fmt: skip
    return base


def _serve(context: ControllerContext, body: ServePlan) -> dict[str, Any]:
    base = _known(context, body.model)
    verdict = capacity.serve(shape_of(base), base.version.bytes, body.replicas, body.tensor_parallel,
                             box_facts(context))  # fmt: skip
    return {"object": "plan", "kind": "serve", "model": base.name, "replicas": body.replicas,
            "tensor_parallel": body.tensor_parallel, **verdict.as_dict()}  # fmt: skip


def _job(context: ControllerContext, body: JobPlan) -> dict[str, Any]:
    base = _known(context, body.model)
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
    dataset = auto.DatasetStats(body.examples, 200 * body.examples, 400)
    try:
        fields = DEFAULT.resolve(body.hyperparameters, dataset, stats, most)
    except InvalidHyperparameter as error:
        raise refused(error, "hyperparameters") from error
    sizes = auto.allowed_sizes(fields["batch_size"], most, fields["micro_batch"], fields["tensor_parallel"])
    verdict = job_verdict(context, base, fields, sizes)
    chosen = ("full", "lora_rank", "zero_stage", "precision", "offload", "activation_checkpointing", "batch_size",
              "micro_batch", "max_length", "tensor_parallel")  # fmt: skip
    return {"object": "plan", "kind": "job", "model": base.name,
            "hyperparameters": {name: fields[name] for name in chosen}, **verdict.as_dict()}  # fmt: skip
