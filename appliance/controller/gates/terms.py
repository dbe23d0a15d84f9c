"""Checks the terms of a gate in a request, and fixes the data of every suite as it is then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.new_run import check_given, check_judges, check_new_run, checked_source
from appliance.controller.evals.requests import MAX_CRITERIA_BYTES, MAX_SCHEMA_BYTES, Sampled
from appliance.controller.http.strict_body import meant, place_in, said_of
from appliance.controller.interfaces.errors import BadRequest, Forbidden, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import INFERENCE, Principal
from appliance.controller.jobs.gate_request import RULES, GateCanary, GateRequest, GateSuite
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.rows import EvalRow, GateRow, JobRow
from train.graders.hosts import GraderHosts

_SOURCE: TypeAdapter[Sampled] = TypeAdapter(Sampled)
MAX_EVALS_BYTES = MAX_SCHEMA_BYTES + MAX_CRITERIA_BYTES
"""The largest size of a gate's evaluations together: as much as one evaluation may have."""
MAX_TERMS_BYTES = 512 << 10
"""The largest size of all data sources: two of the longest that a run may have, or sixteen of the usual length."""
MAX_SAMPLING_BYTES = 48 << 10
"""The largest size of the suites' different sampling parameters together. They hold an engine's tools and forms, of
which 32 KiB take 0.1 s to check."""
_ASKED_LATER = "the version that is judged"


def new_gate(context: ControllerContext, given: GateRequest, job: JobRow, caller: Principal) -> GateRow:
    """Raises ApiError."""
    return GateRow(
        id=new_id("gate_"),
        created_s=time.time(),
        job_id=job.id,
        model=job.output_model,
        key_id=caller.key_id,
        owner=caller.owner,
        terms=checked(context, given, caller),
        reason=f"{job.id} has not made its version yet",
    )


async def check_data(
    context: ControllerContext, hosts: GraderHosts, given: GateRequest, model: str, caller: Principal
) -> None:
    """What a run on a suite's data would be refused for, besides what `checked` says; of an eval that is not there and
    of items that are in no file, it does. Said after the training, the version has cost its device-hours and is not
    judged. model: from which the version is made. Raises ApiError."""
    _check_evals(context, given, caller, "gate")
    seen = set[bytes]()
    for place, suite in enumerate(given.suites):
        of, param = evals.find(context.db, suite.eval_id, viewer=caller.viewer), f"gate.suites.{place}.data_source"
        if of is None or suite.data_source is None or (said := orjson.dumps([of.id, suite.data_source])) in seen:
            continue
        seen.add(said)
        if (parsed := _parsed(suite.data_source, param)).source.type == "file_id":
            await check_new_run(context, hosts, of, parsed, model, caller, param, known=True)


def checked(context: ControllerContext, given: GateRequest, caller: Principal, param: str = "gate") -> dict[str, Any]:
    """{"suites": [{"eval_id", "name", "data_source", "criterion" and RULES}], "level", "then", "canary"}. Raises
    ApiError."""
    if not caller.may(INFERENCE):  # the box asks models for it
        raise Forbidden(INFERENCE)
    if given.canary is not None and given.then != "canary":
        raise InvalidValue(
            f"'{param}.canary' has the terms of a canary, and '{param}.then' is '{given.then}'.", f"{param}.canary"
        )
    _check_evals(context, given, caller, param)
    looked = _Looked()
    suites = [
        _suite(context, suite, caller, f"{param}.suites.{place}", looked) for place, suite in enumerate(given.suites)
    ]
    canary = (given.canary or GateCanary()).model_dump() if given.then == "canary" else None
    terms = {"suites": suites, "level": given.level, "then": given.then, "canary": canary}
    if (size := len(orjson.dumps(terms))) > MAX_TERMS_BYTES:
        raise _too_long(f"is {size} bytes long with the data of its suites; at most {MAX_TERMS_BYTES} are taken", param)
    return terms


def _check_evals(context: ControllerContext, given: GateRequest, caller: Principal, param: str) -> None:
    """Checks the sizes before anything is read, on the controller's loop. Raises BadRequest."""
    sizes = (evals.bytes_of(context.db, one.eval_id, viewer=caller.viewer) for one in given.suites)
    if (size := sum(sizes)) > MAX_EVALS_BYTES:
        raise _too_long(f"has evals of {size} bytes; at most {MAX_EVALS_BYTES} are taken", f"{param}.suites")


def _too_long(why: str, param: str) -> BadRequest:
    return InvalidValue(f"'{param}' {why}.", param)


@dataclass(slots=True)
class _Looked:
    """What was already checked for one gate on the controller's loop, so that each is checked once. models: those that
    graders ask. sampling: parameters, as JSON."""

    models: set[str] = field(default_factory=set)
    sampling: set[bytes] = field(default_factory=set)

    def knows(self, sampling: Any, param: str) -> bool:
        """Whether these parameters were checked before; remembers them. Raises BadRequest."""
        text = orjson.dumps(sampling)
        if text in self.sampling:
            return True
        self.sampling.add(text)
        if (size := sum(map(len, self.sampling))) > MAX_SAMPLING_BYTES:
            why = (
                f"and those before it have sampling parameters of {size} bytes; at most {MAX_SAMPLING_BYTES} are taken"
            )
            raise _too_long(why, param)
        return False


def _suite(
    context: ControllerContext, suite: GateSuite, caller: Principal, param: str, looked: _Looked
) -> dict[str, Any]:
    of = evals.find(context.db, suite.eval_id, viewer=caller.viewer)
    if of is None:
        raise NotFound(
            f"No eval found with id {shown(suite.eval_id)}.", param=f"{param}.eval_id", code="eval_not_found"
        )
    looked.models |= check_judges(context, of, caller, looked.models)
    names = [criterion["name"] for criterion in of.criteria]
    if suite.criterion is not None and suite.criterion not in names:
        raise InvalidValue(
            f"{shown(suite.criterion)} is not a grader of {of.id}; it has {', '.join(map(shown, names))}.",
            f"{param}.criterion",
        )
    source = suite.data_source if suite.data_source is not None else _last_source(context, of, caller, param)
    parsed = _parsed(source, f"{param}.data_source")
    known = looked.knows(source.get("sampling_params"), f"{param}.data_source")
    check_given(context, of, parsed, caller, f"{param}.data_source", known=known)
    kept = checked_source(parsed, f"{param}.data_source")
    if kept["source"]["type"] != "file_id":
        raise InvalidValue(
            "The items of a gate are kept for later: give them as a file, {'type': 'file_id', 'id': ...}.",
            f"{param}.data_source.source.type",
        )
    del kept["model"]
    return {
        "eval_id": of.id,
        "name": of.name or of.id,
        "criterion": suite.criterion,
        "data_source": kept,
        **{name: getattr(suite, name) for name in RULES},
    }


def _parsed(source: dict[str, Any], param: str) -> Sampled:
    if "model" in source:
        raise InvalidValue(
            f"'{param}' names a model; a gate asks the new version, and the one before.", f"{param}.model"
        )
    try:
        return _SOURCE.validate_python({**source, "model": _ASKED_LATER})
    except ValidationError as error:
        first = meant(error.errors(include_url=False))
        where = ".".join([param, *place_in(source, first["loc"])])
        message, code = said_of(where, first)
        raise BadRequest(message, param=where, code=code) from None


def _last_source(context: ControllerContext, of: EvalRow, caller: Principal, param: str) -> dict[str, Any]:
    last = evals.newest_sampled(context.db, of.id, viewer=caller.viewer)
    if last is None:
        raise BadRequest(
            f"{of.id} has no run yet in which a model answered items of a file, whose data the gate could use: run it "
            "once (`appliance eval run`), or give the suite's 'data_source'.",
            param=f"{param}.data_source",
            code="missing_required_parameter",
        )
    return {name: value for name, value in last.data_source.items() if name != "model"}
