"""The request for a fine-tuning job, and what it says of the training: pure checks, nothing is stored here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field, StringConstraints, create_model

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


def _choice() -> type[BaseModel]:
    """The name of a method, and blocks of methods by their names: hyperparameters, and what each method takes."""
    blocks = dict[str, Any]()
    for name, method in METHODS.items():
        fields: dict[str, Any] = {"hyperparameters": (Hyperparameters | None, None)}
        fields |= {taken: (Any, None) for taken in method.takes}
        blocks[name] = (create_model(name, __base__=StrictBody, **fields) | None, None)
    return create_model("MethodChoice", __base__=StrictBody, type=(Name, ...), **blocks)


MethodChoice = _choice()


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
    method: MethodChoice | None = None  # type: ignore[valid-type]
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
    given: Any = request.method
    method = METHODS.get(given.type) if given else DEFAULT
    if method is None:
        raise BadRequest(
            f"The method {shown(given.type)} is not supported; expected one of {', '.join(METHODS)}.",
            param="method.type",
            code="unsupported_method",
        )
    # OpenAI's SDK may send the blocks of other methods too, but not in place of the method's own.
    own = getattr(given, method.name, None)
    other = next((name for name in METHODS if getattr(given, name, None) is not None), None)
    if own is None and other is not None:
        raise InvalidValue(
            f"Invalid value for 'method.{other}': the type of the method is '{method.name}', which reads "
            f"'method.{method.name}'.",
            f"method.{other}",
        )
    block = {name: getattr(own, name) for name in own.model_fields_set} if own is not None else {}
    where = f"method.{method.name}.hyperparameters"
    old, new = request.hyperparameters or {}, block.pop("hyperparameters", None) or {}
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise InvalidValue(
                f"hyperparameters.{name} is {shown(old[name])} and {where}.{name} is {shown(new[name])}; give it once.",
                f"hyperparameters.{name}",
            )
    training = Training(method, old | new, where if given else "hyperparameters", block)
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


def refused(error: InvalidHyperparameter, where: str) -> BadRequest:
    return BadRequest(
        f"Invalid value for '{where}.{error.param}': {shown(error.given)} was given, expected {error.expected}.",
        param=f"{where}.{error.param}",
        code="invalid_hyperparameter",
    )
