"""POST /admin/v1/plan: whether a job would fit, by the estimate that every job passes before queueing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from appliance.controller.access.model_access import Resolved, usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.files.storage import FILES
from appliance.controller.http.routers import StrictBody, needs, unaudited
from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.controller.jobs import settings
from appliance.controller.openai.new_job import Hyperparameters, Name, refused
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS
from train.plan import auto
from train.plan.errors import InvalidHyperparameter

TYPICAL_EXAMPLES, TYPICAL_TOKENS = 1000, 200
Count = Annotated[int, Field(ge=1, le=65536)]
_CHOSEN = (
    *("full", "lora_rank", "n_epochs", "batch_size", "max_length", "learning_rate", "zero_stage", "precision"),
    *("offload", "activation_checkpointing", "micro_batch", "tensor_parallel", "sequence_parallel"),
)
_OF_LAYOUT = (
    *("zero_stage", "offload", "activation_checkpointing", "micro_batch", "devices", "device_bytes", "room_bytes"),
    *("bound_by", "tokens_per_s", "hours", "kwh"),
)


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
    job: JobPlan


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""

    @router.post("/plan")
    @needs(FINE_TUNING)
    @unaudited  # nothing is changed
    async def plan(body: PlanRequest, caller: Caller) -> dict[str, Any]:
        return await _job(context, body.job, caller)


async def _job(context: ControllerContext, body: JobPlan, caller: Principal) -> dict[str, Any]:
    base, method = usable_model(context.db, caller, body.model), METHODS[body.method]
    counted = body.training_file is not None
    if body.training_file is not None:
        dataset = await _counted(context, base, body.training_file, method, caller)
    else:
        examples = body.examples or TYPICAL_EXAMPLES
        dataset = auto.DatasetStats(examples, TYPICAL_TOKENS * method.sequences * examples, 2 * TYPICAL_TOKENS)
    wish = settings.Wish(max_devices=body.devices)
    try:
        chosen = settings.choose(context, base, method, body.hyperparameters, dataset, wish)
    except InvalidHyperparameter as error:
        raise refused(error, "hyperparameters") from error
    fields, best = chosen.resolved, next(iter(chosen.layouts), None)
    assert chosen.verdict is not None, "without a wish for devices there is a number of them"
    answer = chosen.verdict.as_dict()
    if counted:
        answer["warnings"] += settings.cut_warning(method, dataset, fields)
    common = {name: fields[name] for name in _CHOSEN if fields["full"] is False or name != "lora_rank"}
    return {
        "object": "plan",
        "kind": "job",
        "model": base.name,
        "method": method.name,
        "hyperparameters": fields.get("options", {}) | common,
        "data": {
            "counted": counted,
            "examples": dataset.n_examples,
            "tokens": dataset.n_tokens,
            "longest_example_tokens": dataset.longest_example_tokens,
            "steps": auto.steps(method.rows(dataset), fields),
        },
        **answer,
        "device_hours": best["hours"] * best["devices"] if best and best["hours"] is not None else None,
        "layouts": [{name: value for name, value in one.items() if name in _OF_LAYOUT} for one in chosen.layouts[:3]],
    }


async def _counted(
    context: ControllerContext, base: Resolved, file_id: str, method: Method, caller: Principal
) -> auto.DatasetStats:
    """What the job's validation would find in the file. Raises BadRequest and NotFound."""
    row = FILES.known(context.db, file_id, caller, "training_file")
    tokenizer = settings.tokenizer_of(context, base)
    report = await storage.checked(context, context.files_dir / row.id, method=method, tokenizer=tokenizer)
    if not report.ok:
        raise BadRequest(
            f"The file {row.id} has {storage.summary(report)}", param="training_file", code="invalid_training_file"
        )
    return settings.dataset_of(report)
