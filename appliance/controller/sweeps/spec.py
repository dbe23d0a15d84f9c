"""Defines the file of a sweep, and translates it into the job of each trial."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator

from appliance.controller.access.model_access import base_for
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.requests import JobCreate, job_in, wrong
from appliance.controller.openai.new_job import check_job, check_judging
from appliance.controller.sweeps import halving
from train.graders.hosts import GraderHosts

MAX_TRIALS = 64
_OF_THE_SWEEP = ("publish_as", "activate", "gate", "suffix")
_OF_A_TRIAL = {"publish": "end"}
"""Nobody asks what a trial was after its first epochs, and there may be hundreds of them."""
Parameter = Annotated[str, Field(min_length=1, max_length=64)]
Values = Annotated[list[Any], Field(min_length=1, max_length=MAX_TRIALS)]


Bound = Annotated[float, Field(ge=-1e15, le=1e15)]
"""What a hyperparameter may be; neither the difference of much larger numbers nor a whole number can be written."""
MAX_TRIALS_BYTES = 64 << 10
"""The largest size of all trials together: they are in the sweep's row, which every look reads."""


class Range(StrictBody):
    low: Bound
    high: Bound
    log: bool = False
    integer: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.low < self.high:
            raise ValueError("low is less than high")
        if self.log and self.low <= 0:
            raise ValueError("a range on the scale of its logarithm is above 0")
        return self


class Drawn(StrictBody):
    trials: Annotated[int, Field(ge=2, le=MAX_TRIALS)]
    parameters: Annotated[dict[Parameter, Range | Values], Field(min_length=1, max_length=16)]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


class SweepSpec(StrictBody):
    """Give grid, every combination of these values, or random. train: the fields of a fine-tuning job; trials are
    compared on its validation file. first: the share of the data in the first round. After each round one in
    `keep_one_in` trials goes on, with `keep_one_in` times the data. device_hours: of all jobs together; beyond them no
    job begins."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    train: dict[str, Any]
    grid: Annotated[dict[Parameter, Values], Field(min_length=1, max_length=16)] | None = None
    random: Drawn | None = None
    first: Annotated[float, Field(gt=0, le=1)] = 0.01
    keep_one_in: Annotated[int, Field(ge=2, le=16)] = 3
    device_hours: Annotated[float, Field(gt=0, le=1e6)]


def trials_of(spec: SweepSpec) -> list[dict[str, Any]]:
    """Raises BadRequest."""
    if (spec.grid is None) is (spec.random is None):
        raise wrong("grid", "or 'random' says what is tried; give one of them")
    if spec.grid is not None:
        number = math.prod(map(len, spec.grid.values()))
        if not 2 <= number <= MAX_TRIALS:
            raise wrong("grid", f"has {number} combinations; expected 2 to {MAX_TRIALS}")
        return halving.grid(spec.grid)
    assert spec.random is not None
    among = {name: one.model_dump() if isinstance(one, Range) else one for name, one in spec.random.parameters.items()}
    return halving.drawn(spec.random.trials, among, spec.random.seed)


async def check_spec(context: ControllerContext, hosts: GraderHosts, spec: SweepSpec, caller: Principal) -> None:
    """Checks the job of every trial too, with the loop free in between: a job that is refused later would end the sweep
    midway. Raises ApiError."""
    trials = trials_of(spec)
    if (size := len(orjson.dumps(trials))) > MAX_TRIALS_BYTES:
        raise wrong("grid" if spec.grid else "random", f"makes trials of {size} bytes; at most {MAX_TRIALS_BYTES}")
    body = job_of(spec, trials[0], str(spec.train.get("training_file", "")))
    if body.validation_file is None:
        raise wrong("train.validation_file", "is missing: trials are compared by their loss on it")
    for name in ("training_file", "validation_file"):
        storage.known_file(context, getattr(body, name), caller, f"train.{name}")
    base_for(context.db, caller, body.model)
    await check_judging(context, hosts, body, caller)
    for parameters in trials:
        check_job(context, job_of(spec, parameters, body.training_file), caller)
        await asyncio.sleep(0)


def job_of(spec: SweepSpec, parameters: dict[str, Any], training_file: str) -> JobCreate:
    """The request for a trial's job. Raises BadRequest."""
    for name in _OF_THE_SWEEP:
        if name in spec.train:
            raise wrong(f"train.{name}", "is not for a sweep: its models are tries, and all but the best are deleted")
    fields = {**spec.train, "training_file": training_file}
    method = fields.get("method")
    if isinstance(method, dict) and isinstance(kind := method.get("type"), str):
        block = method.get(kind) or {}
        known = (block.get("hyperparameters") or {}) if isinstance(block, dict) else None
        if isinstance(known, dict):  # what is none, the job's own check refuses
            fields["method"] = {**method, kind: {**block, "hyperparameters": {**_OF_A_TRIAL, **known, **parameters}}}
    elif isinstance(known := fields.get("hyperparameters") or {}, dict):
        fields["hyperparameters"] = {**_OF_A_TRIAL, **known, **parameters}
    return job_in(fields)


class SweepCreate(StrictBody):
    spec: SweepSpec
