"""Makes runs of evaluations: for requests, and for gates of jobs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from appliance.controller.access.model_access import check_may_ask
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.requests import (
    ROW_BYTES,
    FileId,
    Jsonl,
    Sampled,
    check_sampled,
    check_source,
    fields_of,
    size_of,
)
from appliance.controller.files.storage import FILES
from appliance.controller.grading.given import check_asked, check_form
from appliance.controller.interfaces.errors import InvalidValue
from appliance.controller.interfaces.principal import Principal
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.rows import EvalRow, EvalRunRow
from train.graders.errors import InvalidGrader
from train.graders.graders import judge_models
from train.graders.hosts import GraderHosts

EVAL_RUNS = "eval_runs"


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


async def check_new_run(
    context: ControllerContext, hosts: GraderHosts, of: EvalRow, given: Jsonl | Sampled, caller: Principal
) -> None:
    """of: the eval. Raises ApiError."""
    try:
        if isinstance(given, Sampled):
            check_sampled(given, of.item_schema)
    except InvalidGrader as error:
        where = f"data_source.{error.param}"
        raise InvalidValue(f"Invalid '{where}': {error.message}.", where) from None
    if isinstance(given.source, FileId):
        FILES.known(context.db, given.source.id, caller, "data_source.source.id")
    if isinstance(given, Sampled):
        # On a thread: the schema of its answers may have 25,000 parts.
        await asyncio.to_thread(check_asked, fields_of(given), "data_source.sampling_params")
        if (sampling := given.sampling_params) is not None:
            await check_form(hosts, sampling.response_format, caller, "data_source.sampling_params.response_format")
            if sampling.text is not None:
                await check_form(hosts, sampling.text.format, caller, "data_source.sampling_params.text.format")
