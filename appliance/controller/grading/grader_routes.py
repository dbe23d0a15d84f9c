"""/v1/fine_tuning/alpha/graders: tries a grader on one sample, or only checks it
(https://platform.openai.com/docs/api-reference/graders)."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from appliance.controller.context.context import ControllerContext
from appliance.controller.grading.checks import MAX_DEPTH, check_code, grader_of
from appliance.controller.grading.grading import Grading
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import ApiError, InvalidValue
from appliance.controller.interfaces.principal import FINE_TUNING, Caller
from train.graders.graders import Grader, judges
from train.graders.grading import Graded
from train.graders.templates import MAX_TEXT, Sample
from weights.format.foreign_json import is_deeper

ANSWER_WITHIN_S = 300.0


class Validate(StrictBody):
    grader: dict[str, Any]


class Run(StrictBody):
    grader: dict[str, Any]
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
        if is_deeper(body.item, MAX_DEPTH):
            raise InvalidValue(f"'item' is nested deeper than {MAX_DEPTH} levels.", "item")
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
