"""The request for a fine-tuning job, and what it says of the training: pure checks, nothing is stored here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, StringConstraints

from appliance.controller.http.strict_body import Metadata, StrictBody
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, shown
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS
from train.plan.errors import InvalidHyperparameter

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Devices = Annotated[int, Field(ge=1, le=65536)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
Moment = Annotated[float, Field(gt=0, lt=1e11)]
MOST_BYTES = 16_384
Hyperparameters = dict[Annotated[str, StringConstraints(max_length=64)], Any]
_JUDGES = {
    "grader": "which gives an answer its reward",
    "teacher": "the model of the box that says how likely it finds an answer",
}


class MethodChoice(StrictBody):
    """The name of a method of `train.methods.methods`, and the blocks of methods by their names (`training_of`)."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Name


class Wandb(StrictBody):
    """W&B's own limits: names of 128 characters, a project's without certain ones, tags of 64. W&B refuses anything
    else every time, and the job would have no run there."""

    project: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]
    entity: Annotated[str, StringConstraints(max_length=128)] | None = None
    name: Annotated[str, StringConstraints(max_length=128)] | None = None
    tags: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=64)]], Field(max_length=32)] | None
    ) = None


class Integration(StrictBody):
    type: Literal["wandb"]
    wandb: Wandb


class Gate(StrictBody):
    """An evaluation that has been run on a file. pass_rate_at_least: the share of its items that the version has to
    pass; None: the version must not be shown to be worse than the one that answers."""

    eval_id: Name
    pass_rate_at_least: Annotated[float, Field(ge=0, le=1)] | None = None


class JobCreate(StrictBody):
    """OpenAI's request plus our own fields (`extra_body` in the SDK) for how the job may use the box's devices.

    publish_as: the model that the job makes a version of, new or the owner's; None: a model of its own. activate: the
    version answers at once. gate: it answers once an evaluation lets it. deadline_s: seconds since 1970.
    held: stays in the queue until it is released.
    """

    model: Name
    training_file: Name
    validation_file: Name | None = None
    suffix: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None
    method: MethodChoice | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: Annotated[list[Integration], Field(max_length=5)] | None = None
    min_devices: Devices | None = None
    max_devices: Devices | None = None
    priority: Priority = 0
    deadline_s: Moment | None = None
    preemptible: bool = True
    held: bool = False
    publish_as: Name | None = None
    activate: bool = True
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """The training that a request describes. where: the path of the hyperparameters, for errors. block: the fields of
    the method's block apart from its hyperparameters (`Method.takes`)."""

    method: Method
    hyperparameters: dict[str, Any]
    where: str
    block: dict[str, Any]

    def path(self, name: str) -> str:
        """Where the request has a field of `block`."""
        return f"method.{self.method.name}.{name}"


def training_of(request: JobCreate) -> Training:
    """The deprecated top-level hyperparameters and those of the method may both be present; where they disagree, the
    intent is unknown. Raises BadRequest."""
    method = METHODS.get(request.method.type) if request.method else DEFAULT
    if method is None:
        assert request.method is not None
        raise BadRequest(
            f"The method {shown(request.method.type)} is not supported; expected one of {', '.join(METHODS)}.",
            param="method.type",
            code="unsupported_method",
        )
    where = f"method.{method.name}.hyperparameters"
    block = _block(request.method, method)
    old, new = request.hyperparameters or {}, block.pop("hyperparameters", None)
    new = {} if new is None else new
    if not isinstance(new, dict):
        raise InvalidValue(f"Invalid value for '{where}': {shown(new)} was given, expected an object.", where)
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise InvalidValue(
                f"hyperparameters.{name} is {shown(old[name])} and {where}.{name} is {shown(new[name])}; give it once.",
                f"hyperparameters.{name}",
            )
    training = Training(method, old | new, where if request.method else "hyperparameters", block)
    # The scheduler reads the job's row in each of its rounds.
    if (size := len(orjson.dumps(training.hyperparameters, default=str))) > MOST_BYTES:
        raise BadRequest(
            f"The hyperparameters are {size} bytes long, at most {MOST_BYTES} are allowed.",
            param=training.where,
            code="invalid_hyperparameters",
        )
    if method.judged_by and method.judged_by not in block:
        param = training.path(method.judged_by)
        raise BadRequest(
            f"Missing required parameter: '{param}', {_JUDGES[method.judged_by]}.",
            param=param,
            code="missing_required_parameter",
        )
    return training


def _block(given: MethodChoice | None, method: Method) -> dict[str, Any]:
    """The block of the method. Those of others may stand beside it, unread, as at OpenAI (its SDK's own tests send
    all), but not in its place. Raises BadRequest."""
    blocks = (given.model_extra if given else None) or {}
    if unknown := sorted(blocks.keys() - METHODS.keys()):
        raise _unknown(f"method.{unknown[0][:64]}")
    block, own = blocks.get(method.name), f"method.{method.name}"
    other = next((name for name, block in blocks.items() if block is not None), None)
    if block is None and other is not None:
        raise InvalidValue(
            f"Invalid value for 'method.{other}': the type of the method is '{method.name}', which reads '{own}'.",
            f"method.{other}",
        )
    if not isinstance(block, dict | None):
        expected = "{'hyperparameters': {...}}"
        raise InvalidValue(f"Invalid value for '{own}': {shown(block)} was given, expected {expected}.", own)
    block = dict(block or {})
    if unknown := sorted(block.keys() - {"hyperparameters", *method.takes}):
        raise _unknown(f"{own}.{unknown[0][:64]}")
    return block


def _unknown(param: str) -> BadRequest:
    return BadRequest(f"Unrecognized request argument supplied: {param}.", param=param, code="unknown_parameter")


def refused(error: InvalidHyperparameter, where: str) -> BadRequest:
    return BadRequest(
        f"Invalid value for '{where}.{error.param}': {shown(error.given)} was given, expected {error.expected}.",
        param=f"{where}.{error.param}",
        code="invalid_hyperparameter",
    )
