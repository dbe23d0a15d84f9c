"""Makes runs of evaluations: for requests, and for gates of jobs."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from appliance.controller.access.model_access import check_may_ask
from appliance.controller.access.naming import resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.requests import (
    ROW_BYTES,
    FileId,
    Jsonl,
    Sampled,
    Sampling,
    check_sampled,
    check_source,
    fields_of,
    size_of,
)
from appliance.controller.evals.run_items import check_items
from appliance.controller.files.storage import FILES
from appliance.controller.grading.given import check_asked, check_form
from appliance.controller.http.strict_body import out_of_bounds
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, shown
from appliance.controller.interfaces.principal import Principal
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.rows import EvalRow, EvalRunRow
from train.graders.errors import InvalidGrader
from train.graders.graders import judge_models
from train.graders.hosts import GraderHosts


def insert_run(
    context: ControllerContext,
    of: EvalRow,
    caller: Principal,
    data_source: dict[str, Any],
    *,
    name: str = "",
    metadata: dict[str, str] | None = None,
) -> EvalRunRow:
    """Makes a run within the caller's bounds and starts its task. Call it in a transaction. Raises ApiError."""
    context.quotas.check(caller, "eval_runs")
    row = EvalRunRow(
        id=new_id("evalrun_"),
        eval_id=of.id,
        name=name,
        created_s=time.time(),
        key_id=caller.key_id,
        owner=caller.owner,
        model=data_source.get("model") or "",
        data_source=data_source,
        metadata=metadata,
        bytes=size_of(data_source) + ROW_BYTES,
    )
    evals.insert_run(context.db, row)
    context.tasks.start(EVAL_RUNS, row.id, row.key_id)
    return row


EVAL_RUNS = "eval_runs"


def checked_source(given: Jsonl | Sampled) -> dict[str, Any]:
    """As it is kept. Raises BadRequest."""
    data_source = given.model_dump(mode="json", exclude_unset=True)
    try:
        check_source(data_source)
    except InvalidGrader as error:
        where = f"data_source.{error.param}".rstrip(".")
        raise InvalidValue(f"Invalid '{where}': {error.message}.", where) from None
    return data_source


def check_judges(context: ControllerContext, of: EvalRow, caller: Principal) -> None:
    """Checks the models that its graders ask: another key may have made the eval. Raises Forbidden, NotFound."""
    for model in sorted(set[str]().union(*map(judge_models, of.criteria))):
        check_may_ask(context.db, caller, model)


def check_given(context: ControllerContext, of: EvalRow, given: Jsonl | Sampled, caller: Principal) -> None:
    """of: the eval. Raises BadRequest, NotFound."""
    try:
        if isinstance(given, Sampled):
            check_sampled(given, of.item_schema)
    except InvalidGrader as error:
        where = f"data_source.{error.param}"
        raise InvalidValue(f"Invalid '{where}': {error.message}.", where) from None
    if isinstance(given.source, FileId):
        FILES.known(context.db, given.source.id, caller, "data_source.source.id")
    if isinstance(given, Sampled):
        check_asked(fields_of(given), "data_source.sampling_params")


async def check_new_run(
    context: ControllerContext,
    hosts: GraderHosts,
    of: EvalRow,
    given: Jsonl | Sampled,
    model: str | None,
    caller: Principal,
) -> None:
    """What `check_given` says, and what only a worker, a model's size or a file's lines tell: the schema of the
    answers, their length, and names that no item has. model: that will be asked. Raises ApiError."""
    # On a thread: the schema of its answers may have 25,000 parts.
    check = partial(check_given, context, of, given, caller)
    await asyncio.to_thread(check)
    if isinstance(given, Sampled) and (sampling := given.sampling_params) is not None:
        await check_form(hosts, sampling.response_format, caller, "data_source.sampling_params.response_format")
        if sampling.text is not None:
            await check_form(hosts, sampling.text.format, caller, "data_source.sampling_params.text.format")
        if model is not None:
            _check_room(context, sampling, model)
    try:
        await asyncio.to_thread(check_items, context.files_dir, of.criteria, given, "data_source")
    except InvalidGrader as error:
        raise BadRequest(
            f"Invalid '{error.param}': {error.message}.", param=error.param, code="invalid_grader"
        ) from None


def _check_room(context: ControllerContext, sampling: Sampling, model: str) -> None:
    """Raises BadRequest where an answer may have more tokens than the model's context: an engine takes no such request,
    and each item would be an error."""
    found = resolve(context.db, model)
    longest = context.sizes.context(found.model, found.version) if found is not None else None
    for name in ("max_completion_tokens", "max_completions_tokens"):
        value = getattr(sampling, name)
        if value is not None and longest is not None and value > longest:
            whose = f", the context of {shown(model)}"
            where = f"data_source.sampling_params.{name}"
            message, code = out_of_bounds(where, "less_than_equal", longest, value, whose)
            raise BadRequest(message, param=where, code=code)
