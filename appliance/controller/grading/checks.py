"""Checks of the graders, teachers and response formats that requests have; and /v1/fine_tuning/alpha/graders, which
tries a grader on one sample, or only checks it (https://platform.openai.com/docs/api-reference/graders)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field

from appliance.controller.access.model_access import Resolved, check_may_ask, unknown_model
from appliance.controller.access.model_access import resolve as resolve_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.grading.judging import LONGEST, MADE, Grading
from appliance.controller.http.routers import StrictBody, make_router
from appliance.controller.interfaces.errors import ApiError, BadRequest, InvalidValue, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.request_check import check_body
from serve.core.keywords import unenforced_in_tools
from train.graders import graders
from train.graders.errors import InvalidGrader, MissingField
from train.graders.graders import Grader, judges, leaves
from train.graders.grading import Graded
from train.graders.sandbox import ForkBroke, GraderHosts, WorkerBroke, refusal
from train.graders.templates import MAX_TEXT, Sample

_LIMITS, _CHAT = Limits(), resolve(b"POST", b"/v1/chat/completions")


def grader_of(context: ControllerContext, given: Any, caller: Principal, param: str = "grader") -> Grader:
    """Raises BadRequest for what is not a grader, or for one that this machine cannot run; Forbidden and NotFound for
    one that asks a model that the caller may not ask."""
    try:
        grader = graders.parse(given)
    except MissingField as error:
        raise _missing(f"{param}.{error.param}") from None
    except InvalidGrader as error:
        raise _invalid(f"{param}.{error.param}" if error.param else param, error.message, "invalid_grader") from None
    for name, leaf in leaves(grader).items():
        if isinstance(leaf, graders.Python) and (why := refusal()):
            raise BadRequest(f"{why[:1].upper()}{why[1:]}.", param=param, code="python_graders_unavailable")
        if isinstance(leaf, graders.ScoreModel | graders.LabelModel):
            check_may_ask(context.db, caller, leaf.model, param)
            field = "labels" if isinstance(leaf, graders.LabelModel) else "range"
            path = f"{param}.graders.{name}.{field}" if isinstance(grader, graders.Multi) else f"{param}.{field}"
            check_completion({"structured_outputs": leaf.answers_by}, path)
    return grader


async def check_code(hosts: GraderHosts, grader: Grader, caller: Principal, param: str) -> None:
    """Raises BadRequest for code of python graders that cannot grade, ApiError where the box could not check it."""
    if not (code := graders.sources(grader)):
        return
    try:
        faults = await hosts.unusable(caller.owner, code)
    except WorkerBroke as error:
        raise _not_checked(f"The code of {param!r}", error) from error
    for path, why in faults:
        raise _invalid(f"{param}.{path}", why, "invalid_grader")


async def check_schema(hosts: GraderHosts, schema: Mapping[str, Any], caller: Principal, param: str) -> None:
    """Raises BadRequest for what is no JSON schema, ApiError where the box could not check it."""
    try:
        refused = await hosts.refused_schema(caller.owner, schema)
    except ForkBroke as error:
        refused = str(error)
    except WorkerBroke as error:
        raise _not_checked(f"The schema of {param!r}", error) from error
    if refused:
        raise _invalid(param, refused, "invalid_json_schema")


async def check_form(hosts: GraderHosts, form: Any, caller: Principal, param: str) -> None:
    """Check the schema of a `response_format` (its kind and shape are checked elsewhere): engines and ranks read the
    schema only when they write the first answer. Raises as `check_schema` does."""
    named = form.get("json_schema") if isinstance(form, Mapping) else None
    if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
        await check_schema(hosts, named["schema"], caller, f"{param}.json_schema.schema")


def form_of(form: Any, param: str) -> dict[str, Any] | None:
    """The form that a job's ranks hold their answers to (train.rollouts.rollouts); None for plain text. Raises
    BadRequest."""
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("json_object", "json_schema"):
        raise _invalid(param, "expected an object of the type text, json_object or json_schema", "invalid_value")
    named = form.get("json_schema")
    if kind == "json_schema" and not (isinstance(named, dict) and isinstance(named.get("schema"), dict)):
        raise _missing(f"{param}.json_schema.schema")
    check_completion({"response_format": form}, param)
    if kind == "json_schema" and (place := next(unenforced_in_tools(form["json_schema"]["schema"]), "")):
        why = f"ranks do not enforce `{place}` of its schema; use a simpler form, or let the grader reward it"
        raise _invalid(param, why, "unsupported_value")
    return dict(form)


def teacher_of(
    context: ControllerContext, name: Any, student: Resolved, longest: int, caller: Principal, param: str
) -> str:
    """The name, checked. longest: tokens of a prompt with its answer. Raises Forbidden and NotFound for a model that
    the caller may not ask, BadRequest for one that cannot teach this student; whether both have the same tokens takes a
    second, so the job's validation checks it."""
    if not isinstance(name, str) or not name:
        raise InvalidValue(
            f"Invalid '{param}': {shown(name)} was given, expected the name of a model (MODEL, MODEL@VERSION).", param
        )
    check_may_ask(context.db, caller, name, param)
    teacher = resolve_model(context.db, name)
    if teacher is None:
        raise unknown_model(name, param)
    context_tokens = context.sizes.size(teacher.model, teacher.version).max_model_len or LONGEST
    room, why = min(LONGEST, context_tokens) - MADE, ""
    if teacher.model.task != "generate":
        why = "it makes embeddings, and a teacher says how likely a text is"
    elif longest > room:
        why = (
            f"its engines say how likely texts of at most {room:,} tokens are, and max_length, a prompt with its "
            f"answer, is {longest:,}; choose a smaller one, or a teacher with a longer context"
        )
    if why:
        message = f"{shown(name)} cannot teach {shown(student.name)}: {why}."
        raise BadRequest(message, param=param, code="invalid_teacher")
    return name


def _missing(path: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")


def _invalid(path: str, why: str, code: str) -> BadRequest:
    return BadRequest(f"Invalid '{path}': {why}.", param=path, code=code)


def _not_checked(noun: str, error: WorkerBroke) -> ApiError:
    """The worker broke by itself; the request is not at fault."""
    return ApiError(503, f"{noun} was not checked: {error}. Please retry.", kind="server_error", code="grader_not_run")


def check_completion(fields: dict[str, Any], param: str) -> None:
    """Check whether an engine takes a chat completion with these fields: once, and not for each of 10,000 items,
    because a check takes up to 50 ms. Raises BadRequest."""
    body = {"model": "m", "messages": [{"role": "user", "content": ""}], **fields}
    try:
        check_body(_CHAT, orjson.dumps(body), _LIMITS)
    except gateway_errors.HttpError as error:
        raise BadRequest(f"Invalid '{param}': {error.message}", param=param, code=error.code) from None


# --- routes that try a grader


ANSWER_WITHIN_S = 300.0


class Validate(StrictBody):
    grader: dict[str, Any]


class Run(Validate):
    model_sample: Annotated[str, Field(max_length=MAX_TEXT)]
    item: Any = None


def routes(context: ControllerContext, grading: Grading) -> APIRouter:
    router = make_router("/v1/fine_tuning/alpha/graders", FINE_TUNING)

    @router.post("/validate")
    async def validate(body: Validate, caller: Caller) -> dict[str, Any]:
        grader = grader_of(context, body.grader, caller)
        await check_code(context.graders, grader, caller, "grader")
        return {"grader": grader.as_given()}

    @router.post("/run")
    async def run(body: Run, caller: Caller) -> dict[str, Any]:
        grader = grader_of(context, body.grader, caller)
        sample, began_s = Sample(body.model_sample), time.perf_counter()
        judged = await grading.ask_judges(caller.key_id, grader, sample, body.item, ANSWER_WITHIN_S)
        (graded,) = await grading.grade(caller.key_id, grader, [(sample, body.item)], [judged])
        if not graded.was_run:
            message = f"The grader was not run: {'; '.join(graded.messages)}. Please retry."
            raise ApiError(503, message, kind="server_error", code="grader_not_run")
        return _result(grader, graded, time.perf_counter() - began_s)

    return router


def _result(grader: Grader, graded: Graded, took_s: float) -> dict[str, Any]:
    tokens = sum(graded.tokens_by_model.values())
    models = {judge.model for judge in judges(grader).values()}
    return {
        "reward": graded.reward,
        "sub_rewards": graded.sub_rewards,
        "metadata": {
            "name": grader.name,
            "type": grader.type,
            "errors": asdict(graded.errors),
            "execution_time": took_s,
            "scores": graded.sub_rewards or {grader.name: graded.reward},
            "token_usage": tokens if models else None,
            "sampled_model_name": ", ".join(sorted(models)) or None,
            # OpenAI's type does not have this: what went wrong, in words.
            "messages": graded.messages,
        },
        "model_grader_token_usage_per_model": {
            model: {"total_tokens": tokens} for model, tokens in graded.tokens_by_model.items()
        },
    }
