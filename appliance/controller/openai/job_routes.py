"""/v1/fine_tuning/jobs (https://platform.openai.com/docs/api-reference/fine-tuning); and the box's own routes: whether
a job would fit (/admin/v1/plan), statistics of its data (/v1/files/{id}/check), the queue and an operator's changes to
jobs.

The API writes the wanted state and wakes the scheduler; it never waits for devices to move.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from appliance.controller.access.model_access import resolve, usable_model
from appliance.controller.context.context import ControllerContext, name_of
from appliance.controller.devices import mode
from appliance.controller.files import storage
from appliance.controller.files.storage import FILES
from appliance.controller.http.resource import MOST, list_object, listed, metadata_of, object_of, part
from appliance.controller.http.routers import Status, StrictBody, audited, make_router, needs, unaudited
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue
from appliance.controller.interfaces.principal import ADMIN, FINE_TUNING, READ, Caller, Principal
from appliance.controller.jobs import settings
from appliance.controller.jobs.events import JOBS, VALIDATIONS, add_message, pause_reason, set_wanted
from appliance.controller.models.capacity import Estimator
from appliance.controller.openai.new_job import (
    Hyperparameters,
    JobClaims,
    JobCreate,
    Name,
    check_judges,
    insert_job,
    refused,
    training_of,
)
from appliance.store import jobs
from appliance.store.database import PAGE_BYTES, Part
from appliance.store.rows import JOB_EVENTS, VERSIONS, JobJudgeRow, JobRow, VersionRow, columns
from train.data_checks.process import CheckFailed, report_apart
from train.methods.methods import DEFAULT, METHODS, method_of
from train.plan import auto
from train.plan.errors import InvalidHyperparameter, UnsupportedModel

# OpenAI has no "paused" or "suspended"; the events have the phase and the reason.
_STATUS_OF_PHASE = {"validating": "validating_files", "suspended": "queued"}
_OPENAI_HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
_WORKED_OUT = ("n_epochs", "batch_size")
_JUDGED = frozenset(name for name, method in METHODS.items() if method.judged_by)
_reads = needs(FINE_TUNING, READ)


def routes(context: ControllerContext) -> APIRouter:
    """Routes of jobs. A key of the scope `read` sees every job and its progress."""
    router, db = JOBS.router(), context.db

    def known(job_id: str, caller: Principal) -> JobRow:
        return JOBS.known(db, job_id, replace(caller, scopes=frozenset({ADMIN})) if caller.may(READ) else caller)

    @router.get("")
    @_reads
    def list_jobs(request: Request, caller: Caller, part: Annotated[Part, part(20)]) -> dict[str, Any]:
        """Filters: `metadata[key]=value`, any number of pairs, or `metadata=null` for jobs without metadata."""
        viewer, pairs = None if caller.may(READ) else caller.viewer, metadata_of(request)
        if (whole := request.query_params.get("metadata")) not in (None, "null") or (whole and pairs):
            raise InvalidValue("metadata: expected metadata[key]=value, or metadata=null, not both.", "metadata")
        where = "1" if whole is None else "metadata IS NULL"
        page, views, size = jobs.page(db, viewer=viewer, metadata=pairs, where=where, **part), [], 0
        for row in page.data:
            views.append(_view(context, row, caller))
            if (size := size + len(str(views[-1]["method"]))) > PAGE_BYTES:  # a grader may have 2 MiB
                break
        return listed(views, page.has_more or len(views) < len(page.data))

    @router.get("/{job_id}")
    @_reads
    def retrieve(job_id: str, caller: Caller) -> dict[str, Any]:
        row = known(job_id, caller)
        return _view(context, row, caller) | {"energy": mode.of_job(db, row, time.time())}

    @router.get("/{job_id}/metrics")
    @_reads
    def metrics(
        job_id: str,
        caller: Caller,
        after_step: Annotated[int, Query(ge=-1, lt=2**62)] = -1,
        limit: Annotated[int, Query(ge=1, le=MOST)] = 1000,
    ) -> dict[str, Any]:
        """List the metrics of steps after `after_step`, oldest first."""
        known(job_id, caller)
        rows = jobs.list_metrics(db, job_id, after_step=after_step, limit=limit + 1)
        return {"object": "list", "data": [asdict(row) for row in rows[:limit]], "has_more": len(rows) > limit}

    @router.post("")
    async def create(body: JobCreate, request: Request, caller: Caller) -> dict[str, Any]:
        training = training_of(body)
        await check_judges(context.graders, training, caller)

        def make() -> JobRow:
            row = insert_job(context, body, training, caller)
            context.tasks.start(VALIDATIONS, row.id, row.key_id)
            return row

        return _view(context, JOBS.once(request, caller, await request.body(), make), caller)

    @router.post("/{job_id}/cancel")
    async def cancel(job_id: str, caller: Caller) -> dict[str, Any]:
        return _view(context, set_wanted(context, job_id, "cancel", caller), caller)

    @router.post("/{job_id}/pause")
    async def pause(job_id: str, caller: Caller) -> dict[str, Any]:
        return _view(context, set_wanted(context, job_id, "pause", caller), caller)

    @router.post("/{job_id}/resume")
    async def resume(job_id: str, caller: Caller) -> dict[str, Any]:
        return _view(context, set_wanted(context, job_id, "run", caller), caller)

    @router.get("/{job_id}/events")
    def events(job_id: str, caller: Caller, part: Annotated[Part, part(20)]) -> dict[str, Any]:
        JOBS.known(db, job_id, caller)
        page, names = JOB_EVENTS.page(db, {"job_id": job_id}, **part), "level message type"
        return list_object(page, lambda row: object_of(row, "fine_tuning.job.event", names, data=row.data or {}))

    @router.get("/{job_id}/checkpoints")
    def checkpoints(job_id: str, caller: Caller, part: Annotated[Part, part(10)]) -> dict[str, Any]:
        JOBS.known(db, job_id, caller)
        return list_object(VERSIONS.page(db, {"job_id": job_id}, **part), checkpoint_object)

    return router


def _view(context: ControllerContext, row: JobRow, caller: Principal) -> dict[str, Any]:
    """Return the job's object, with its grader or teacher unless the caller has only the scope `read`."""
    sees = row.method in _JUDGED and caller.viewer in (None, row.owner)
    return job_object(row, context.config.organization, jobs.find_judge(context.db, row.id) if sees else None)


def method_routes() -> APIRouter:
    """/v1/fine_tuning/methods: the box's training methods and their fields."""
    router = make_router("/v1/fine_tuning/methods", FINE_TUNING)

    @router.get("")
    def list_methods() -> dict[str, Any]:
        """`takes`: fields of a request besides hyperparameters; `options`: hyperparameters of this method alone."""
        methods = []
        for method in METHODS.values():
            options = [asdict(option) for option in method.options]
            known = columns(method, "name summary takes")
            methods.append({"object": "fine_tuning.method", **known, "options": options})
        return {"object": "list", "data": methods, "has_more": False}

    return router


# --- objects; times that end in `_s` are Unix times with fractions


def job_phase(row: JobRow) -> str:
    """Return the detailed phase for operators: also pausing, paused, cancelling."""
    if row.finished:
        return row.phase
    if row.wanted == "cancel":
        return "cancelling"
    if row.wanted == "pause":
        return "pausing" if row.phase == "running" else "paused"
    return row.phase


def hyperparameters(row: JobRow) -> dict[str, Any]:
    """Return the requested values, with "auto" replaced by the chosen value; an "auto" multiplier is 1."""
    own = [option.name for option in METHODS[row.method].options]
    values = {name: "auto" for name in (*_OPENAI_HYPERPARAMETERS, *own)} | row.hyperparameters
    if row.resolved:
        values |= {name: row.resolved["options"][name] for name in own if values[name] == "auto"}
        values |= {name: row.resolved[name] for name in _WORKED_OUT if values[name] == "auto"}
        if values["learning_rate_multiplier"] == "auto":
            values["learning_rate_multiplier"] = 1.0
    return values


_JOB_COLUMNS = (
    "error model result_files seed training_file validation_file metadata reason output_model gate devices"
    " estimate min_devices max_devices allowed_sizes priority deadline_s step total_steps loss valid_loss tokens_per_s"
    " eta_s snapshot resolved created_s started_s finished_s"
)


def job_object(row: JobRow, organization: str, judge: JobJudgeRow | None = None) -> dict[str, Any]:
    """Return OpenAI's object of a job with the box's own fields. Names in `_s` are Unix times with fractions. judge:
    the job's judge, if any."""
    judged_by = judge.judge if judge is not None else {}
    succeeded, trained_with = row.phase == "succeeded", hyperparameters(row)
    # An accepted cancellation is final, so it shows before the devices are free.
    cancelled = row.wanted == "cancel" and not row.finished
    status = "cancelled" if cancelled else _STATUS_OF_PHASE.get(row.phase, row.phase)
    return object_of(
        row,
        "fine_tuning.job",
        _JOB_COLUMNS,
        fine_tuned_model=row.output_model if succeeded else None,
        finished_at=None if row.finished_s is None else int(row.finished_s),
        # At the top level only for the supervised method, as at OpenAI.
        hyperparameters=trained_with if row.method == DEFAULT.name else {},
        organization_id=f"org-{organization}",
        status=status,
        trained_tokens=row.trained_tokens if succeeded else None,
        user_provided_suffix=row.suffix,
        estimated_finish=int(time.time() + row.eta_s) if row.eta_s is not None and status == "running" else None,
        integrations=row.integrations or [],
        method={"type": row.method, row.method: judged_by | {"hyperparameters": trained_with}},
        phase=job_phase(row),
        publish_as=row.output_model if row.stable_name else None,
        **{name: bool(getattr(row, name)) for name in ("activate", "preemptible")},
    )


def checkpoint_object(row: VersionRow) -> dict[str, Any]:
    of = {"fine_tuned_model_checkpoint": row.checkpoint, "fine_tuning_job_id": row.job_id, "step_number": row.step}
    return object_of(row, "fine_tuning.job.checkpoint", "", **of, metrics={"step": row.step, **row.metrics})


# --- POST /admin/v1/plan: whether a job would fit, by the same estimate as before queueing

TYPICAL_EXAMPLES, TYPICAL_TOKENS = 1000, 200
Count = Annotated[int, Field(ge=1, le=65536)]
_CHOSEN = (
    *("full", "lora_rank", "n_epochs", "batch_size", "max_length", "learning_rate", "zero_stage", "precision"),
    *("offload", "activation_checkpointing", "micro_batch", "tensor_parallel", "sequence_parallel"),
)


class JobPlan(StrictBody):
    """training_file: file whose tokens are counted; without it, `examples` of typical length are assumed, on which
    "auto" depends. devices: most devices of the job."""

    model: Name
    hyperparameters: Hyperparameters = Field(default_factory=dict)
    devices: Count | None = None
    training_file: Name | None = None
    examples: Count | None = None
    method: Literal[tuple(METHODS)] = DEFAULT.name  # type: ignore[valid-type]


def plan_routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""

    @router.post("/plan")
    @needs(FINE_TUNING)
    @unaudited  # nothing is changed
    async def plan(body: JobPlan, caller: Caller) -> dict[str, Any]:
        base, method = usable_model(context.db, caller, body.model), METHODS[body.method]
        counted = body.training_file is not None
        if body.training_file is not None:  # counted as in the job's validation
            row = FILES.known(context.db, body.training_file, caller, "training_file")
            tokenizer = settings.tokenizer_of(context, base)
            report = await storage.checked(context, context.files_dir / row.id, method=method, tokenizer=tokenizer)
            if not report.ok:
                why = f"The file {row.id} has {storage.summary(report)}"
                raise BadRequest(why, "training_file", "invalid_training_file")
            dataset = settings.dataset_of(report)
        else:
            examples = body.examples or TYPICAL_EXAMPLES
            dataset = auto.DatasetStats(examples, TYPICAL_TOKENS * method.sequences * examples, 2 * TYPICAL_TOKENS)
        bounds = settings.DeviceBounds(max_devices=body.devices)
        try:
            request = settings.SettingsRequest(context, base, method, body.hyperparameters, dataset, bounds)
            fields, verdict, layouts = request.choose()
        except InvalidHyperparameter as error:
            raise refused(error, "hyperparameters") from error
        best = next(iter(layouts), None)
        if counted:
            verdict = replace(verdict, warnings=(*verdict.warnings, *settings.cut_warning(method, dataset, fields)))
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
            **asdict(verdict),
            "device_hours": best["hours"] * best["devices"] if best and best["hours"] is not None else None,
            "layouts": layouts[:3],
        }


# --- POST /v1/files/{id}/check: statistics of training data. The request waits for the answer, as an upload does.


class CheckRequest(StrictBody):
    """against: id of a validation file. max_tokens: default: the model's context."""

    model: Name | None = None
    method: Literal[tuple(METHODS)] | None = None  # type: ignore[valid-type]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    against: Name | None = None


def check_routes(context: ControllerContext) -> APIRouter:
    router, db = FILES.router(), context.db

    @router.post("/{file_id}/check")
    @unaudited  # reads a file
    async def check(file_id: str, body: CheckRequest, caller: Caller) -> dict[str, Any]:
        row = FILES.known(db, file_id, caller)
        options: dict[str, Any] = {"max_tokens": body.max_tokens, "method": body.method}
        if body.model is not None:
            base = usable_model(db, caller, body.model)
            if (directory := settings.tokenizer_of(context, base)) is None:
                why = f"The tokenizer of {base.name} is not on this box's disk now; ask again once the model is."
                raise BadRequest(why, "model", "model_not_ready")
            options |= {"model": str(directory), "max_tokens": body.max_tokens or base.model.max_model_len}
        if body.against is not None:
            options["against"] = str(context.files_dir / FILES.known(db, body.against, caller, "against").id)
        try:
            async with context.file_threads:
                report = await report_apart(context.files_dir / row.id, row.id, **options)
        except UnsupportedModel as error:
            raise BadRequest(f"{error}.", "model", "invalid_value") from error
        except CheckFailed as error:
            # Without the box's own paths.
            message = f"{error}.".replace(f"{context.files_dir}/", "")
            raise BadRequest(message, code="invalid_training_file") from error
        return report

    return router


# --- /admin/v1/queue, and an operator's changes to jobs: order and bounds

# Slurm's reason codes (https://slurm.schedmd.com/job_reason_codes.html), each with a sentence of the box's own.
VALIDATING = ("Dependency", "Its training file is being checked.")
SUBMITTED = ("Priority", "The scheduler has not looked at it yet.")


def queue_routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    @router.get("/queue")
    def show_queue(now: Status) -> dict[str, Any]:
        """Show every unfinished job in the planner's order, and each owner's devices."""
        planned = {job["id"]: job for job in now["queue"]}
        rows = [row for row in jobs.list_unfinished(db) if row.wanted != "cancel"]
        rows.sort(key=lambda row: (0, planned[row.id]["position"]) if row.id in planned else (1, row.created_s))
        data = [
            _entry(job_object(row, context.config.organization), place, planned.get(row.id), pause_reason(db, row))
            for place, row in enumerate(rows, 1)
        ]
        owners: dict[str | None, dict[str, Any]] = {}
        for entry in data:  # among equal priorities, everyone's first job comes before anyone's second
            nothing = {"owner": entry["owner"], "running": 0, "waiting": 0, "devices": 0}
            share = owners.setdefault(entry["owner"], nothing)
            share["running" if entry["devices"] else "waiting"] += 1
            share["devices"] += len(entry["devices"])
        return {"object": "list", "data": data, "owners": list(owners.values())}

    @router.patch("/jobs/{job_id}")
    @audited("job.update")
    async def update(job_id: str, body: JobClaims, caller: Caller) -> dict[str, Any]:
        row, fields = JOBS.known(db, job_id, caller), body.model_dump(exclude_unset=True)
        if row.finished or row.wanted == "cancel":
            message = f"The fine-tuning job {job_id} is {job_phase(row)}; it cannot be changed any more."
            raise Conflict(message, "fine_tune_id", "invalid_job_state")
        text = ", ".join(f"{name} {'none' if value is None else value}" for name, value in fields.items())
        with db.transaction():
            jobs.update(db, row.id, **_changes(context, row, fields))
            add_message(db, row.id, f"Changed by an operator: {text}.")
        context.scheduler.nudge(f"update of {row.id}", name_of(context, caller))
        return job_object(jobs.get(db, row.id), context.config.organization)


def _changes(context: ControllerContext, row: JobRow, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the columns to write for these fields. Raises BadRequest."""
    if not fields:
        raise BadRequest("The request changes nothing: give at least one field.", code="missing_required_parameter")
    changes = dict(fields)
    if not fields.keys().isdisjoint(("min_devices", "max_devices")):
        least, most = (fields.get(name, getattr(row, name)) for name in ("min_devices", "max_devices"))
        sizes = settings.DeviceBounds(least, most).check(row.resolved, settings.nodes_of(context))
        changes |= {"allowed_sizes": sizes} if row.resolved else {}
        if row.resolved and (base := resolve(context.db, row.model)) is not None:
            estimator = Estimator(settings.shape_of(base), settings.box_facts(context), method_of(row.method))
            changes["estimate"] = (row.estimate or {}) | {"memory": estimator.verdict(row.resolved, sizes).memory()}
    return changes


def _entry(job: dict[str, Any], position: int, planned: dict[str, Any] | None, paused: str | None) -> dict[str, Any]:
    """Return a job's entry in the queue. job: the API's object."""
    if planned is not None:
        reason, message = planned["reason"], paused or planned["message"]
    else:
        reason, message = VALIDATING if job["phase"] == "validating" else SUBMITTED
    names = "id owner phase priority devices min_devices max_devices allowed_sizes deadline_s preemptible created_s"
    return {"position": position, **{name: job[name] for name in names.split()}, "reason": reason, "message": message}
