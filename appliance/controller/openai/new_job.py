"""Creates jobs from requests, checked as far as possible before the data is converted: first the request's own fields
(`JobCreate`, `training_of`), then the objects that it names (`insert_job`)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, create_model

from appliance.controller.access import model_access
from appliance.controller.access.model_access import Resolved, resolve, root_base, usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.grading.evals import EVALS
from appliance.controller.grading.judging import check_code, check_form, form_of, grader_of, teacher_of
from appliance.controller.http.resource import new_row
from appliance.controller.http.routers import Metadata, StrictBody
from appliance.controller.interfaces.errors import ApiError, BadRequest, Conflict, Forbidden, InvalidValue, shown
from appliance.controller.interfaces.principal import INFERENCE, Principal
from appliance.controller.jobs import settings
from appliance.controller.jobs.events import add_message, max_priority
from appliance.models.checkpoint import TRAINED_FORM
from appliance.store import evals, files, jobs, models
from appliance.store.rows import FileRow, JobJudgeRow, JobRow, columns, new_id
from train.data_checks.check import DataReport
from train.graders.errors import InvalidGrader
from train.graders.graders import parse
from train.graders.sandbox import GraderHosts
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS
from train.plan.errors import InvalidHyperparameter

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Devices = Annotated[int, Field(ge=1, le=65536)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
Moment = Annotated[float, Field(gt=0, lt=1e11)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Hyperparameters = dict[Annotated[str, StringConstraints(max_length=64)], Any]
_JUDGES = {
    "grader": "which gives an answer its reward",
    "teacher": "the model of the box that says how likely it finds an answer",
}


def _choice() -> type[BaseModel]:
    """Build the Pydantic model of `method`: a type, and for each method a block of hyperparameters and other fields."""
    blocks = dict[str, Any]()
    for name, method in METHODS.items():
        fields: dict[str, Any] = {"hyperparameters": (Hyperparameters | None, None)}
        fields |= {taken: (Any, None) for taken in method.takes}
        blocks[name] = (create_model(name, __base__=StrictBody, **fields) | None, None)
    return create_model("MethodChoice", __base__=StrictBody, type=(Name, ...), **blocks)


MethodChoice = _choice()


class Wandb(StrictBody):
    """W&B's own limits: names of 128 characters, a project's without certain ones, tags of 64. W&B would refuse other
    values, and the job would have no run there."""

    project: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]
    entity: Annotated[str, StringConstraints(max_length=128)] | None = None
    name: Annotated[str, StringConstraints(max_length=128)] | None = None
    tags: Annotated[list[Tag], Field(max_length=32)] | None = None


class Integration(StrictBody):
    type: Literal["wandb"]
    wandb: Wandb


class Gate(StrictBody):
    """An evaluation that has been run on a file. pass_rate_at_least: share of items that the version must pass; None:
    the version must not be significantly worse than the active one."""

    eval_id: Name
    pass_rate_at_least: Annotated[float, Field(ge=0, le=1)] | None = None


class JobClaims(StrictBody):
    """A job's claims on devices. In a change of a job, null removes a bound or the deadline. deadline_s: seconds since
    1970."""

    priority: Priority = 0
    deadline_s: Moment | None = None
    preemptible: bool = True
    min_devices: Devices | None = None
    max_devices: Devices | None = None


class JobCreate(JobClaims):
    """OpenAI's request plus our own fields (`extra_body` in the SDK) for how the job may use the box's devices.

    publish_as: name of the owner's model, new or existing, that gets a version; None: a separate new model. activate:
    the version becomes active at once. gate: it becomes active after passing an evaluation.
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
    publish_as: Name | None = None
    activate: bool = True
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """The training that a request describes. where: path of the hyperparameters, for errors. block: other fields of the
    method's block (`Method.takes`)."""

    method: Method
    hyperparameters: dict[str, Any]
    where: str
    block: dict[str, Any]

    def path(self, name: str) -> str:
        """Return the path of a field of `block` in the request."""
        return f"method.{self.method.name}.{name}"


def training_of(request: JobCreate) -> Training:
    """Return the method and its hyperparameters, also from the deprecated top-level field, which may repeat but not
    contradict them. Raises BadRequest."""
    choice: Any = request.method
    method = METHODS.get(choice.type) if choice else DEFAULT
    if method is None:
        why = f"The method {shown(choice.type)} is not supported; expected one of {', '.join(METHODS)}."
        raise BadRequest(why, "method.type", "unsupported_method")
    # OpenAI's SDK may send the blocks of other methods too, but not in place of the method's own.
    own = getattr(choice, method.name, None)
    other = next((name for name in METHODS if getattr(choice, name, None) is not None), None)
    if own is None and other is not None:
        why = f"the type of the method is '{method.name}', which reads 'method.{method.name}'"
        raise InvalidValue(f"Invalid value for 'method.{other}': {why}.", f"method.{other}")
    block = {name: getattr(own, name) for name in own.model_fields_set} if own is not None else {}
    where = f"method.{method.name}.hyperparameters"
    old, new = request.hyperparameters or {}, block.pop("hyperparameters", None) or {}
    for name in sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
        param = f"hyperparameters.{name}"
        raise InvalidValue(f"{param} and {where}.{name} differ; give it once.", param)
    training = Training(method, old | new, where if choice else "hyperparameters", block)
    if method.judged_by and method.judged_by not in block:
        param = training.path(method.judged_by)
        why = f"Missing required parameter: '{param}', {_JUDGES[method.judged_by]}."
        raise BadRequest(why, param, "missing_required_parameter")
    return training


def refused(error: InvalidHyperparameter, where: str) -> BadRequest:
    param = f"{where}.{error.param}"
    message = f"Invalid value for '{param}': {shown(error.given)} was given, expected {error.expected}."
    return BadRequest(message, param, "invalid_hyperparameter")


# Event for a job's wandb integration, by wandb_mode. A box without W&B accepts the job, so that scripts run unchanged.
_WANDB = {
    "online": "W&B gets a run of this job when it starts; its address follows here.",
    "offline": "A W&B run of this job is written on the box when it starts, for `wandb sync`; where follows here.",
    None: "The wandb integration is recorded but not contacted: this box has none ([tracking] wandb_mode) and sends "
    "nothing out by itself. Metrics are in this job's events and in TensorBoard files.",
}


async def check_judges(hosts: GraderHosts, training: Training, caller: Principal) -> None:
    """Check the code of python graders, and a schema; `insert_job` checks all else. Raises ApiError."""
    try:
        grader = parse(training.block.get("grader"))
    except InvalidGrader:
        return
    await check_code(hosts, grader, caller, training.path("grader"))
    await check_form(hosts, training.block.get("response_format"), caller, training.path("response_format"))


def insert_job(context: ControllerContext, body: JobCreate, training: Training, caller: Principal) -> JobRow:
    """Insert the job's row, its judge and first events, in a transaction of the caller's, who then starts its
    validation. Raises ApiError."""
    db, method = context.db, training.method
    context.quotas.check(caller, begins=True)
    _check_claims(context, body, caller)
    base = _base(context, body.model, caller)
    data = {"training_file": _data_file(context, body.training_file, "training_file", caller)}
    if body.validation_file is not None:
        data["validation_file"] = _data_file(context, body.validation_file, "validation_file", caller)
    bounds, nodes = settings.DeviceBounds(body.min_devices, body.max_devices), settings.nodes_of(context)
    bounds.check(None, nodes)  # the bounds are needed before the batch size is derived from them
    # These are estimates from the check at upload, which had no tokenizer.
    counted, names = data["training_file"].report or {}, ("n_examples", "n_rows", "n_tokens_estimate")
    of_upload = DataReport(**{name: counted[name] for name in (*names, "longest_example_tokens") if name in counted})
    try:
        # Only to report errors while the client waits; validation computes the values again from the checked data.
        dataset = settings.dataset_of(of_upload)
        resolved = settings.SettingsRequest(context, base, method, training.hyperparameters, dataset, bounds).resolve()
        if body.validation_file is None:
            settings.refuse_without_validation(resolved)
    except InvalidHyperparameter as error:
        raise refused(error, training.where) from error
    bounds.check(resolved, nodes)
    row = new_row(
        JobRow,
        "ftjob-",
        caller,
        method=method.name,
        **columns(body, "model training_file validation_file suffix metadata"),
        **columns(body, "priority min_devices max_devices deadline_s"),
        seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        integrations=[item.model_dump(exclude_none=True) for item in body.integrations or []] or None,
        hyperparameters=training.hyperparameters,
        preemptible=int(body.preemptible),
        output_model=_output_model(context, body, base, resolved, caller),
        stable_name=int(body.publish_as is not None),
        activate=int(body.activate),
        gate=None if body.gate is None else _gate(context, body.gate, caller),
        reason="the training file is being validated",
    )
    judge = _judge(context, training, base, resolved, caller) if method.judged_by else None
    for param, file in data.items():
        # Known from the check at upload; the validation reports bad lines by their numbers.
        report = file.report or {}
        if report.get("n_errors") == 0 and (why := method.refuses(report["shape"])) is not None:
            message = f"invalid {param}: {shown(file.id)} ({shown(file.filename)}) {why}."
            raise BadRequest(message, param, f"invalid_{param}")
    jobs.insert(db, row)
    if judge is not None:
        jobs.insert_judge(db, JobJudgeRow(row.id, judge))
    add_message(db, row.id, f"Created fine-tuning job: {row.id}")
    if body.integrations:
        add_message(db, row.id, _WANDB[context.wandb_mode], level="info" if context.wandb_mode else "warn")
    return row


def _check_claims(context: ControllerContext, body: JobCreate, caller: Principal) -> None:
    """Refuse claims over other jobs beyond the `max_priority` of the key; admins have no limit. A `max_priority` above
    0 also allows jobs that are not preemptible, or have a deadline. Raises ApiError."""
    most, param, why = max_priority(context.db, caller), "", ""
    if body.priority > most:
        param, why = "priority", f"priority is {body.priority}; jobs of this API key have at most {most}."
    elif most <= 0 and (not body.preemptible or body.deadline_s is not None):
        param = "deadline_s" if body.preemptible else "preemptible"
        why = f"Only jobs of keys with a priority above 0 may set {param!r}."
    if why and not caller.is_admin:
        remedy = "An operator can raise that (`appliance key limit NAME --max-priority N`)."
        raise ApiError(403, f"{why} {remedy}", param, "insufficient_permissions")


def _base(context: ControllerContext, name: str, caller: Principal) -> Resolved:
    """Return the model to begin from. Raises BadRequest, NotFound."""
    base, why = usable_model(context.db, caller, name), ""
    if base.model.task != "generate":
        why = f"The model {shown(name)} makes embeddings; only text-generating models can be tuned."
    elif (form := base.quantization) not in (None, TRAINED_FORM):
        why = (
            f"The weights of {shown(name)} are quantised as {shown(form)}: they can be served, not trained. Import the "
            "model as its publisher trained it (bf16 or fp16) and tune that, or make one to tune in few bits of it: "
            "`appliance model quantize NAME --form int4`."
        )
    elif form is not None and base.version.meta.get("adapter"):
        why = (
            f"{shown(name)} is an adapter on quantised weights, into which it cannot be merged to train on. Tune "
            f"{shown(root_base(context.db, base.model))}, on the data of both."
        )
    if why:
        raise BadRequest(why, "model", "model_not_supported")
    return base


def _output_model(
    context: ControllerContext, body: JobCreate, base: Resolved, resolved: dict[str, Any], caller: Principal
) -> str:
    """Return the name of the job's model: a generated name, or `publish_as`, which gets a version. Raises
    BadRequest, Conflict."""
    db, name, suffix = context.db, body.publish_as, body.suffix
    if suffix is not None and not (len(suffix) <= 64 and model_access.suffix_in_name(suffix)):
        rule = "expected a string of at most 64 characters, with a letter from a to z or a digit"
        raise InvalidValue(f"Invalid value for 'suffix': {shown(suffix)} was given, {rule}.", "suffix")
    if name is None:
        if not body.activate or body.gate is not None:
            param = "gate" if body.gate is not None else "activate"
            why = f"'{param}' decides whether a new version of a chosen name answers: give 'publish_as' with it."
            raise InvalidValue(why, param)
        root, part = root_base(db, base.model), model_access.suffix_in_name(suffix or "")
        return f"ft:{root}:{context.config.organization}:{part}:{new_id('', 8)}"  # as OpenAI names them
    if suffix is not None:
        why = "'suffix' is a part of a name that the box makes up, and 'publish_as' is the whole name: give one."
        raise InvalidValue(why, "suffix")
    others = jobs.list_unfinished(db, " AND output_model = ?", name)
    existing = models.find(db, name)
    if existing is None and not model_access.is_stable_name(name):
        expected = f"expected the name of a fine-tuned model of yours, or a new one: {model_access.STABLE_NAME_RULE}"
        raise InvalidValue(f"Invalid value for 'publish_as': {shown(name)} was given, {expected}.", "publish_as")
    owners = {job.owner for job in others} | ({existing.owner} if existing is not None else set())
    is_import = existing is not None and existing.job_id is None
    if is_import or owners - {caller.owner} or models.find_checkpoint(db, name) is not None:
        raise _name_refused(name, "is taken: only fine-tuned models of your own get new versions. Choose another name.")
    # Engines have settings per model, so its versions must have the same architecture.
    root, bases = root_base(db, base.model), [(job.model, resolve(db, job.model)) for job in others]
    roots = {root_base(db, base.model) if base is not None else model for model, base in bases}
    if wrong := sorted((roots | ({root_base(db, existing)} if existing is not None else set())) - {root}):
        raise _name_refused(name, f"is made of {', '.join(wrong)}, and this job trains {root}.")
    active = resolve(db, name)
    makes_adapter = not resolved["full"] and resolved["lora_publish"] == "adapter"
    if active is not None and bool(active.version.meta.get("adapter")) is not makes_adapter:
        kinds, publish = ["an adapter", "whole weights"], "merged" if makes_adapter else "adapter"
        makes, has = kinds if makes_adapter else kinds[::-1]
        remedy = f"set the hyperparameter lora_publish to {publish}, or choose another name"
        more = "(What is trained on an adapter is merged; train on its base.)"
        raise _name_refused(name, f"is served as {has}, and this job would make {makes}: {remedy}. {more}")
    return name


def _name_refused(name: str, why: str) -> Conflict:
    return Conflict(f"The model {shown(name)} {why}", "publish_as", "model_exists")


def _gate(context: ControllerContext, gate: Gate, caller: Principal) -> dict[str, Any]:
    """Return the new job's `JobRow.gate`. Raises ApiError."""
    if not caller.may(INFERENCE):  # a gate needs inference, because the box asks models for it
        raise Forbidden(INFERENCE)
    EVALS.known(context.db, gate.eval_id, caller, "gate.eval_id")
    if evals.newest_sampled(context.db, gate.eval_id, viewer=caller.viewer) is None:
        why = f"{gate.eval_id} has no run yet in which a model answered items of a file, whose data the gate could use"
        raise BadRequest(f"{why}: run it once (`appliance eval run`).", "gate.eval_id", "eval_not_run")
    open_gate = {"version": None, "before": None, "runs": {}, "verdict": None, "reason": "", "activated": None}
    return {**gate.model_dump(), **open_gate}


def _judge(
    context: ControllerContext, training: Training, student: Resolved, resolved: dict[str, Any], caller: Principal
) -> dict[str, Any]:
    """Return the judge for a method that trains on the model's own answers. Raises ApiError."""
    kind = training.method.judged_by
    judge, param = training.block[kind], training.path(kind)
    if kind == "teacher":
        return {"teacher": teacher_of(context, judge, student, resolved["max_length"], caller, param)}
    grader = grader_of(context, judge, caller, param).as_given()
    if not caller.may(INFERENCE):  # the job's key sends requests to the engine
        raise Forbidden(INFERENCE)
    form_at = training.path("response_format")
    form = form_of(training.block.get("response_format"), form_at)
    return {"grader": grader, **({"response_format": form} if form else {})}


def _data_file(context: ControllerContext, file_id: str, param: str, caller: Principal) -> FileRow:
    """Return the row of a data file. Raises BadRequest."""
    row = files.find(context.db, file_id, viewer=caller.viewer)
    if row is None:
        why, code = "is not a file on this box; upload it and pass its id.", "file_not_found"
    elif row.purpose != "fine-tune":
        why, code = f"was uploaded for '{row.purpose}'; expected purpose 'fine-tune'.", "invalid_file_purpose"
    else:
        return row
    raise BadRequest(f"invalid {param}: {shown(file_id)} {why}", param, code)
