"""Validates a job request and resolves it to training settings: pure checks, nothing is stored here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from appliance.controller.access.naming import SUFFIX_RULE, is_suffix
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, shown
from appliance.controller.jobs import devices
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS
from train.plan.errors import InvalidHyperparameter

MAX_METADATA_PAIRS = 16
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Devices = Annotated[int, Field(ge=1, le=65536)]
Sizes = Annotated[list[Devices], Field(min_length=1, max_length=64)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
Moment = Annotated[float, Field(gt=0, lt=1e11)]
MOST_BYTES = 16_384
Hyperparameters = dict[Annotated[str, StringConstraints(max_length=64)], Any]


class MethodBlock(StrictBody):
    hyperparameters: Hyperparameters | None = None


class MethodChoice(StrictBody):
    """Accepts blocks of the methods not chosen without reading them beside that of the chosen one, as OpenAI does (its
    SDK's own tests send all). The declared names are OpenAI's;
    train.methods.methods lists which of them the box has, and its own (`check` refuses any others)."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Name
    supervised: MethodBlock | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None


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
    allowed_sizes: numbers of devices. held: stays in the queue until it is released.
    """

    model: Name
    training_file: Name
    validation_file: Name | None = None
    suffix: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: dict[str, str] | None = None
    method: MethodChoice | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: Annotated[list[Integration], Field(max_length=5)] | None = None
    min_devices: Devices | None = None
    max_devices: Devices | None = None
    allowed_sizes: Sizes | None = None
    priority: Priority = 0
    deadline_s: Moment | None = None
    preemptible: bool = True
    held: bool = False
    publish_as: Name | None = None
    activate: bool = True
    gate: Gate | None = None


def check(request: JobCreate) -> None:
    """Checks beyond types. Raises BadRequest."""
    if request.method is not None:
        supported(request.method.type, "method.type")
        for name in sorted((request.method.model_extra or {}).keys() - METHODS.keys()):
            raise BadRequest(
                f"Unrecognized request argument supplied: method.{name[:64]}.",
                param=f"method.{name[:64]}",
                code="unknown_parameter",
            )
        _refuse_block_of_another(request.method)
    if request.suffix is not None and not is_suffix(request.suffix):
        raise InvalidValue(
            f"Invalid value for 'suffix': {shown(request.suffix)} was given, expected {SUFFIX_RULE}.", "suffix"
        )
    devices.check(request.min_devices, request.max_devices, request.allowed_sizes)
    check_metadata(request.metadata)


def _refuse_block_of_another(given: MethodChoice) -> None:
    """Nobody who writes `{"type": "dpo", "supervised": {…}}` means the block to be dropped. Raises BadRequest."""
    if getattr(given, given.type, None) is not None:
        return
    for name in METHODS:
        if getattr(given, name, None) is not None:
            raise InvalidValue(
                f"Invalid value for 'method.{name}': the type of the method is {shown(given.type)}, which reads "
                f"'method.{given.type}'.",
                f"method.{name}",
            )


def supported(name: str, param: str) -> Method:
    """Raises BadRequest."""
    if name not in METHODS:
        known = " and ".join(f"'{name}'" for name in METHODS)
        raise BadRequest(
            f"The method {shown(name)} is not supported yet; {known} {'is' if len(METHODS) == 1 else 'are'}.",
            param=param,
            code="unsupported_method",
        )
    return METHODS[name]


def check_metadata(metadata: dict[str, str] | None) -> None:
    """OpenAI's limits: 16 pairs, keys of 64 and values of 512 characters. Raises BadRequest."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_PAIRS:
        raise BadRequest(
            f"metadata has {len(metadata)} pairs; at most {MAX_METADATA_PAIRS} are allowed.",
            param="metadata",
            code="object_above_max_properties",
        )
    for key, value in metadata.items():
        if not 1 <= len(key) <= 64 or len(value) > 512:
            raise BadRequest(
                f"metadata {shown(key, 70)}: keys have 1 to 64 characters and values at most 512; "
                f"{len(key)} and {len(value)} were given.",
                param=f"metadata.{key[:64]}",
                code="string_above_max_length" if key else "invalid_value",
            )


def hyperparameters(request: JobCreate) -> tuple[dict[str, Any], str]:
    """All requested hyperparameters, and the path of their block (for error messages).

    The deprecated top-level block and that of the method may both be present; where they disagree, the intent is
    unknown. Raises BadRequest.
    """
    old = request.hyperparameters or {}
    name_of_method = method(request).name
    where = f"method.{name_of_method}.hyperparameters"
    block = getattr(request.method, name_of_method, None)
    if isinstance(block, dict):
        rest = {k: v for k, v in block.items() if k not in method(request).takes}
        for name in sorted(rest.keys() - MethodBlock.model_fields.keys()):
            param = f"method.{name_of_method}.{name[:64]}"
            raise BadRequest(f"Unrecognized request argument supplied: {param}.", param=param, code="unknown_parameter")
        try:
            block = MethodBlock.model_validate(rest)
        except ValidationError as error:
            raise InvalidValue(
                f"Invalid value for 'method.{name_of_method}': {shown(block)} was given, expected "
                "{'hyperparameters': {...}}.",
                f"method.{name_of_method}",
            ) from error
    new = (block.hyperparameters if block else None) or {}
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise InvalidValue(
                f"hyperparameters.{name} is {shown(old[name])} and {where}.{name} is {shown(new[name])}; give it once.",
                f"hyperparameters.{name}",
            )
    both = old | new
    where = where if request.method else "hyperparameters"
    # The scheduler reads the job's row in each of its rounds: 8 MB of hyperparameters each took it seconds.
    if (size := len(orjson.dumps(both, default=str))) > MOST_BYTES:
        raise BadRequest(
            f"The hyperparameters are {size} bytes long, at most {MOST_BYTES} are allowed.",
            param=where,
            code="invalid_hyperparameters",
        )
    return both, where


def beside_hyperparameters(request: JobCreate) -> dict[str, Any]:
    """The fields of the requested method's block that are no hyperparameters (`Method.takes`)."""
    chosen = method(request)
    block = getattr(request.method, chosen.name, None)
    return {k: v for k, v in block.items() if k in chosen.takes} if isinstance(block, dict) else {}


def method(request: JobCreate) -> Method:
    """The requested method, which `check` has found to be supported."""
    return METHODS[request.method.type] if request.method else DEFAULT


def refused(error: InvalidHyperparameter, where: str) -> BadRequest:
    return BadRequest(
        f"Invalid value for '{where}.{error.param}': {shown(error.given)} was given, expected {error.expected}.",
        param=f"{where}.{error.param}",
        code="invalid_hyperparameter",
    )
