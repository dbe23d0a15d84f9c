"""Makes fine-tuning jobs: of what a request says, checked as far as it can be before the data is converted."""

from __future__ import annotations

import secrets
import time
from typing import Any

from appliance.controller.access.model_access import usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.grading.given import check_code, check_form, form_of, grader_of, teacher_of
from appliance.controller.interfaces.errors import BadRequest, Forbidden, NotFound, shown
from appliance.controller.interfaces.principal import INFERENCE, Principal
from appliance.controller.jobs import claims, devices, requests, settings, stable_names
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.requests import Gate, JobCreate
from appliance.controller.models import node_sizes
from appliance.store.ids import new_id
from appliance.store.objects import evals, files, job_records, jobs
from appliance.store.rows import FileRow, JobJudgeRow, JobRow, columns
from train.data.check import DataReport
from train.graders.errors import InvalidGrader
from train.graders.graders import parse
from train.graders.hosts import GraderHosts
from train.plan import auto
from train.plan.errors import InvalidHyperparameter


def insert_job(context: ControllerContext, body: JobCreate, caller: Principal) -> JobRow:
    """With what belongs to it, in a transaction of the caller's; its validation has still to be started. Raises
    ApiError."""
    db = context.db
    context.quotas.check(caller, begins=True, makes_model=True)
    claims.check(db, body, caller)
    row, resolved = _new_job(context, body, caller)
    judge = _judge(context, body, resolved, caller)
    _check_forms(context, body, caller)
    jobs.insert(db, row)
    if judge is not None:
        job_records.insert_judge(db, JobJudgeRow(row.id, judge))
    add_message(db, row.id, f"Created fine-tuning job: {row.id}")
    if body.integrations:
        add_message(db, row.id, _of_wandb(context.wandb_mode), level="info" if context.wandb_mode else "warn")
    return row


async def check_judges(context: ControllerContext, hosts: GraderHosts, body: JobCreate, caller: Principal) -> None:
    """Reads the code of its grader's python graders; `insert_job` checks all else. Raises ApiError."""
    requests.check(body)
    try:
        grader = parse(requests.beside_hyperparameters(body).get("grader"))
    except InvalidGrader:
        return
    await check_code(hosts, grader, caller, f"method.{requests.method(body).name}.grader")
    await _check_form(hosts, body, caller)


async def _check_form(hosts: GraderHosts, body: JobCreate, caller: Principal) -> None:
    given = requests.beside_hyperparameters(body).get("response_format")
    await check_form(hosts, given, caller, f"method.{requests.method(body).name}.response_format")


def _of_wandb(mode: str | None) -> str:
    """What becomes of a job's wandb integration. A box without W&B takes the job all the same: scripts that name it are
    to run here unchanged."""
    if mode == "online":
        return "W&B gets a run of this job when it starts; its address follows here."
    if mode == "offline":
        return "A W&B run of this job is written on the box when it starts, for `wandb sync`; where follows here."
    return (
        "The wandb integration is recorded but not contacted: this box has none ([tracking] wandb_mode) and sends "
        "nothing out by itself. Metrics are in this job's events and in TensorBoard files."
    )


def _new_job(context: ControllerContext, body: JobCreate, caller: Principal) -> tuple[JobRow, dict[str, Any]]:
    """With its settings as far as they are known. Raises BadRequest and NotFound for all errors detectable before the
    data is converted."""
    requests.check(body)
    base = usable_model(context.db, caller, body.model)
    if base.model.task != "generate":
        raise BadRequest(
            f"The model {shown(body.model)} makes embeddings; only text-generating models can be tuned.",
            param="model",
            code="model_not_supported",
        )
    if base.model.info.get("quantized"):
        raise BadRequest(
            f"The weights of {shown(body.model)} are quantised: they can be served, not trained. Import the model as "
            "its publisher trained it (bf16 or fp16) and tune that, or import a GGUF file, which is dequantised.",
            param="model",
            code="model_not_supported",
        )
    training = _data_file(context, body.training_file, "training_file", caller)
    if body.validation_file is not None:
        _data_file(context, body.validation_file, "validation_file", caller)
    given, where = requests.hyperparameters(body)
    method = requests.method(body)
    nodes = node_sizes.known(context)
    devices.check_room(body.min_devices, body.allowed_sizes, nodes)
    asked_sizes = sorted(set(body.allowed_sizes)) if body.allowed_sizes else None
    wish = devices.Wish(body.min_devices, body.max_devices, asked_sizes)
    try:
        # Only to refuse errors while the client waits; the values are computed again from the checked data.
        chosen = settings.choose_on_box(context, base, method, given, _seen(training), wish)
        if body.validation_file is None:
            settings.refuse_without_validation(chosen.resolved)
    except InvalidHyperparameter as error:
        raise requests.refused(error, where) from error
    devices.check_sizes(wish, chosen.resolved, nodes)
    makes_adapter = not chosen.resolved["full"] and chosen.resolved["lora_publish"] == "adapter"
    output_model = stable_names.output_of(context, body, base, caller, makes_adapter=makes_adapter)
    row = JobRow(
        id=new_id("ftjob-"),
        key_id=caller.key_id,
        method=method.name,
        **columns(body, "model training_file validation_file suffix metadata"),
        **columns(body, "priority min_devices max_devices deadline_s"),
        seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        integrations=[item.model_dump(exclude_none=True) for item in body.integrations or []] or None,
        hyperparameters=given,
        asked_sizes=asked_sizes,
        preemptible=int(body.preemptible),
        held=int(body.held),
        owner=caller.owner,
        output_model=output_model,
        stable_name=int(body.publish_as is not None),
        activate=int(body.activate),
        gate=None if body.gate is None else _gate(context, body.gate, caller),
        created_s=time.time(),
        reason="the training file is being validated",
    )
    return row, chosen.resolved


def _gate(context: ControllerContext, given: Gate, caller: Principal) -> dict[str, Any]:
    """As `JobRow.gate` has it. Raises ApiError."""
    if not caller.may(INFERENCE):  # the box asks models for it
        raise Forbidden(INFERENCE)
    if evals.find(context.db, given.eval_id, viewer=caller.viewer) is None:
        message = f"No eval found with id {shown(given.eval_id)}."
        raise NotFound(message, param="gate.eval_id", code="eval_not_found")
    if evals.newest_sampled(context.db, given.eval_id, viewer=caller.viewer) is None:
        raise BadRequest(
            f"{given.eval_id} has no run yet in which a model answered items of a file, whose data the gate could use: "
            "run it once (`appliance eval run`).",
            param="gate.eval_id",
            code="eval_not_run",
        )
    open_gate = {"version": None, "before": None, "runs": {}, "verdict": None, "reason": "", "activated": None}
    return {**given.model_dump(), **open_gate}


_MISSING = {
    "grader": "which gives an answer its reward",
    "teacher": "the model of the box that says how likely it finds an answer",
}


def _judge(
    context: ControllerContext, body: JobCreate, resolved: dict[str, Any], caller: Principal
) -> dict[str, Any] | None:
    """Who judges the answers, for a method that learns from the model's own. Raises ApiError."""
    method = requests.method(body)
    if not method.judged_by:
        return None
    given, param = _who_judges(body)
    options, where = requests.beside_hyperparameters(body), f"method.{method.name}"
    if method.judged_by == "grader":
        grader = grader_of(context, given, caller, param).as_given()
        if resolved["options"]["rollouts"] == "engine" and not caller.may(INFERENCE):  # its key asks the engine
            raise Forbidden(INFERENCE)
        form = form_of(options.get("response_format"), f"{where}.response_format")
        if form and resolved["options"]["rollouts"] == "engine":
            raise BadRequest(
                f"'{where}.response_format' needs 'rollouts' to be 'ranks' or 'auto': what is learnt of a token "
                "depends on which others the form left, which an engine does not say.",
                param=f"{where}.response_format",
                code="unsupported_value",
            )
        return {"grader": grader, **({"response_format": form} if form else {})}
    student = usable_model(context.db, caller, body.model)
    return {"teacher": teacher_of(context, given, student, resolved["max_length"], caller, param)}


def _who_judges(body: JobCreate) -> tuple[Any, str]:
    """What the request says of it, and where. Raises BadRequest: it says nothing."""
    method, options = requests.method(body), requests.beside_hyperparameters(body)
    param = f"method.{method.name}.{method.judged_by}"
    if method.judged_by not in options:
        raise BadRequest(
            f"Missing required parameter: '{param}', {_MISSING[method.judged_by]}.",
            param=param,
            code="missing_required_parameter",
        )
    return options[method.judged_by], param


def _seen(file: FileRow) -> auto.DatasetStats:
    """What the check at the file's upload saw, without a tokenizer."""
    report = file.report or {}
    names = ("n_examples", "n_rows", "n_tokens_estimate", "longest_example_tokens")
    return settings.dataset_of(DataReport(**{name: report[name] for name in names if name in report}))


def _check_forms(context: ControllerContext, body: JobCreate, caller: Principal) -> None:
    """Refuse files whose check at the upload has found a form that the method does not take. The validation tells of
    bad lines, each by its number. Raises BadRequest."""
    method = requests.method(body)
    for param, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file)):
        if file_id is None:
            continue
        row = _data_file(context, file_id, param, caller)
        report = row.report or {}
        if report.get("n_errors") == 0 and (why := method.refuses(report["shape"])) is not None:
            raise BadRequest(
                f"invalid {param}: {shown(file_id)} ({shown(row.filename)}) {why}.",
                param=param,
                code=f"invalid_{param}",
            )


def _data_file(context: ControllerContext, file_id: str, param: str, caller: Principal) -> FileRow:
    row = files.find(context.db, file_id, viewer=caller.viewer, now_s=time.time())
    if row is None:
        raise BadRequest(
            f"invalid {param}: {shown(file_id)} is not a file on this box; upload it and pass its id.",
            param=param,
            code="file_not_found",
        )
    if row.purpose != "fine-tune":
        raise BadRequest(
            f"invalid {param}: {shown(file_id)} was uploaded for '{row.purpose}'; expected purpose 'fine-tune'.",
            param=param,
            code="invalid_file_purpose",
        )
    return row
