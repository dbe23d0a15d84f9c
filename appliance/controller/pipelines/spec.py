"""Defines the file of a pipeline, and translates it into the request for each run's job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from appliance.controller.access.model_access import base_for
from appliance.controller.context.context import ControllerContext
from appliance.controller.data_checks.requests import Changes, HeldAgainst
from appliance.controller.files import storage
from appliance.controller.gates.terms import checked
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Forbidden
from appliance.controller.interfaces.principal import ADMIN, Principal
from appliance.controller.jobs.gate_request import GateCanary, GateRequest, GateRules
from appliance.controller.jobs.requests import JobCreate, job_in, wrong
from scheduler.core.errors import InvalidSchedule
from scheduler.loop.mode_schedule import check_cron, check_zone
from train.data_checks.options import CHECKS, CheckName

STEPS = ("data", "check", "prepare", "train", "evaluate", "gate", "canary", "promote")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_OF_THE_RUN = ("training_file", "gate", "activate")
_NO_FILE = "file-of-the-run"


class Data(StrictBody):
    """Where data comes from; give one of file, uploads, folder and bucket.

    file: the id of an uploaded file, the same for every run. uploads: a pattern of names of the owner's uploaded files
    ("day-*.jsonl"). folder: a folder on the box, of which the files that fit `pattern` are taken. bucket: a bucket's
    name in the box's configuration, of which the objects below its prefix that fit `pattern` are taken. take: "new",
    what no run that ended well has trained on, or all of it.
    """

    file: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    uploads: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    folder: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]{0,4095}$")] | None = None
    bucket: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    pattern: Annotated[str, Field(min_length=1, max_length=256)] = "*.jsonl"
    take: Literal["new", "all"] = "new"

    @property
    def elsewhere(self) -> bool:
        """Whether it comes from a folder or a bucket, and becomes an uploaded file only with a run."""
        return self.folder is not None or self.bucket is not None


class Check(HeldAgainst):
    """at_most: by check of train.data_checks, the largest share of examples; with more the run fails. leave_out: checks
    that are not made."""

    at_most: dict[CheckName, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    leave_out: Annotated[list[CheckName], Field(max_length=len(CHECKS))] = Field(default_factory=list)


class Prepare(Changes, HeldAgainst):
    """split: the share of examples held back for validation."""


class Evaluate(GateRules):
    """One suite. `eval`: an evaluation that exists. Its other fields are those of a gate's suite; rules given here
    override those of `gate`."""

    eval: Annotated[str, Field(min_length=1, max_length=256)]
    data_source: dict[str, Any] | None = None
    criterion: str | None = None


class Gate(GateRules):
    """The rules of every suite, and the level of their tests."""

    level: float | None = None


class Schedule(StrictBody):
    """cron: five fields, in the time zone tz. on_new_data: begin when there is new data; look every `every_s`."""

    cron: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tz: Annotated[str, Field(min_length=1, max_length=64)] = "UTC"
    on_new_data: bool = False
    every_s: Annotated[float, Field(ge=5, le=86400)] = 60.0


class PipelineSpec(StrictBody):
    """The steps; one that is not given is skipped. train: the fields of a fine-tuning job except those that the run
    fills in. promote false: the version is made and judged, and does not answer."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    data: Data
    check: bool | Check = True
    prepare: Prepare | None = None
    train: dict[str, Any]
    evaluate: Evaluate | Annotated[list[Evaluate], Field(min_length=1, max_length=16)] | None = None
    gate: Gate | None = None
    canary: GateCanary | None = None
    promote: bool = True
    schedule: Schedule | None = None


def check_spec(context: ControllerContext, spec: PipelineSpec, caller: Principal) -> None:
    """Find every mistake that can be found before there is data. Raises ApiError."""
    _check_data(context, spec.data, caller)
    for name, step in (("check", spec.check), ("prepare", spec.prepare)):
        if isinstance(step, Check | Prepare) and step.against is not None:
            storage.known_file(context, step.against, caller, f"{name}.against")
    if spec.schedule is not None:
        _check_schedule(spec)
    if spec.prepare is not None and spec.prepare.split is not None and "validation_file" in spec.train:
        raise wrong("train.validation_file", "is given, and 'prepare.split' makes another")
    body = first_job_of(spec)
    base_for(context.db, caller, body.model)
    if body.gate is not None:
        if body.publish_as is None:
            raise wrong("train.publish_as", "is missing: a gate is for a name that goes on whatever comes of a run")
        checked(context, body.gate, caller, "gate")


def first_job_of(spec: PipelineSpec) -> JobCreate:
    """The request of a run's job as far as it is known before there is data. Raises BadRequest."""
    return job_of(spec, spec.data.file or _NO_FILE)


def job_of(spec: PipelineSpec, file_id: str, validation: str | None = None) -> JobCreate:
    """The request that creates a run's job. validation: a file that the run has made. Raises BadRequest."""
    for name in _OF_THE_RUN:
        if name in spec.train:
            raise wrong(f"train.{name}", "is given by the run; see 'data', 'gate' and 'promote'")
    fields = {**spec.train, "training_file": file_id} | ({"validation_file": validation} if validation else {})
    if (gate := gate_of(spec)) is not None:
        fields["gate"] = gate.model_dump(exclude_none=True)
    elif not spec.promote:
        fields["activate"] = False
    return job_in(fields)


def gate_of(spec: PipelineSpec) -> GateRequest | None:
    """The gate of the run's job; None if nothing is evaluated. Raises BadRequest."""
    if spec.evaluate is None:
        for name in ("gate", "canary"):
            if getattr(spec, name) is not None:
                raise wrong("evaluate", f"is missing: '{name}' goes by what an evaluation finds")
        return None
    if spec.canary is not None and not spec.promote:
        raise wrong("promote", "is false, and a canary is promoted by itself: leave 'canary' out")
    rules = spec.gate.model_dump(exclude_none=True) if spec.gate is not None else {}
    level = {"level": rules.pop("level")} if "level" in rules else {}
    suites = []
    for suite in spec.evaluate if isinstance(spec.evaluate, list) else [spec.evaluate]:
        own = suite.model_dump(exclude_none=True)
        suites.append({"eval_id": own.pop("eval"), **rules, **own})
    then = "hold" if not spec.promote else "activate" if spec.canary is None else "canary"
    canary = {} if spec.canary is None else {"canary": spec.canary.model_dump()}
    try:
        return GateRequest.model_validate({"suites": suites, "then": then, **level, **canary})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise wrong(".".join(["gate", *map(str, first["loc"][2:] or first["loc"])]), first["msg"]) from None


def skipped(spec: PipelineSpec) -> set[str]:
    """Names of the steps that the file leaves out."""
    left = {name: getattr(spec, name) is None for name in ("prepare", "evaluate", "gate", "canary")}
    left |= {"check": spec.check is False, "promote": not spec.promote}
    return {name for name, out in left.items() if out}


def _check_data(context: ControllerContext, data: Data, caller: Principal) -> None:
    if sum(one is not None for one in (data.file, data.uploads, data.folder, data.bucket)) != 1:
        raise wrong("data", "says where the data is by one of 'file', 'uploads', 'folder' and 'bucket'")
    if data.elsewhere and not caller.is_admin:
        raise Forbidden(ADMIN)  # the controller reads every file of the box, and buckets with the box's credentials
    if data.bucket is not None and data.bucket not in context.config.buckets:
        known = ", ".join(sorted(context.config.buckets)) or "none"
        raise wrong("data.bucket", f"is not a name of a bucket in the box's configuration; it has {known}")
    if data.file is not None:
        storage.known_file(context, data.file, caller, "data.file")


def _check_schedule(spec: PipelineSpec) -> None:
    schedule = spec.schedule
    assert schedule is not None
    if (schedule.cron is None) is not schedule.on_new_data:
        raise wrong("schedule", "says when by one of 'cron' and 'on_new_data = true'")
    if schedule.on_new_data and spec.data.file is not None:
        raise wrong(
            "schedule.on_new_data", "is for 'data.folder', 'data.bucket' and 'data.uploads'; a file does not change"
        )
    try:
        check_zone(schedule.tz)
        if schedule.cron is not None:
            check_cron(schedule.cron, "cron")
    except InvalidSchedule as error:
        raise BadRequest(f"{error}.", param=f"schedule.{error.param}", code="invalid_schedule") from error
