"""Evaluations by OpenAI's API (https://platform.openai.com/docs/api-reference/evals): /v1/evals, and the work of a run,
in groups of items: each item gets a sample, if a model answers it, and then grades.

State that must outlive the controller is in the rows: an item gets its row once it is judged, and the counters of its
run change in the same transaction. After a restart a run continues with the remaining items. An owner's runs proceed
one after another.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Literal

import orjson
from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from pydantic import TypeAdapter

from appliance.controller.access.model_access import caller_of, check_may_ask
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, finished
from appliance.controller.files.storage import FILES
from appliance.controller.grading import shapes
from appliance.controller.grading.judging import (
    Grading,
    Judged,
    check_code,
    check_completion,
    check_form,
    check_schema,
    grader_of,
)
from appliance.controller.grading.shapes import Entry, Jsonl, Sampled, sample_object
from appliance.controller.http.resource import Resource, list_object, new_row, part
from appliance.controller.interfaces.errors import ApiError, BadRequest, InvalidValue, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store import evals
from appliance.store import files as file_rows
from appliance.store.database import Part, owned_by
from appliance.store.rows import EVAL_ITEMS, EVAL_RUNS, EvalItemRow, EvalRow, EvalRunRow, TaskRow, columns, new_id
from train.graders.errors import GradingFailed, InvalidGrader
from train.graders.graders import Grader, ModelAnswer, judge_models, parse, sources
from train.graders.grading import Graded
from train.graders.sandbox import MOST_BROKEN, ForkBroke, WorkerBroke
from train.graders.templates import Sample

RUN_TASKS = "eval_runs"
WINDOW_S = 24 * 3600.0
AT_ONCE = 64
"""Items that are asked for, or wait for a place, at once."""
_CHUNK = 200
"""Items that are checked at once."""
_ERROR_CHARACTERS = 2000
_SOURCE: TypeAdapter[Jsonl | Sampled] = TypeAdapter(Jsonl | Sampled)


@dataclass
class Answered:
    """An item of the data with its sample. body: the request to the model. answer: the sample as a model's answer, or
    the reason why there is none. judged, results: judges' answers and grades by grader; grades are empty until the item
    is graded."""

    place: int
    item: dict[str, Any]
    sample: Sample
    body: dict[str, Any]
    answer: ModelAnswer
    judged: list[Judged]
    results: list[dict[str, Any]] = field(default_factory=list)

    def row(self, run_id: str) -> EvalItemRow:
        status = "pass" if all(result["passed"] for result in self.results) else "fail"
        if self.answer.error or any("error" in result for result in self.results):
            status = "error"
        named = new_id("outputitem_"), run_id, self.place, time.time()
        return EvalItemRow(*named, status, self.item, sample_object(self.body, [self.answer]), self.results)


def insert_run(
    context: ControllerContext, evaluation: EvalRow, caller: Principal, data_source: dict[str, Any], **more: Any
) -> EvalRunRow:
    """Make a run within the caller's bounds and start its task. Call it in a transaction. more: the run's name and
    metadata. Raises ApiError."""
    context.quotas.check(caller, begins=True)
    more |= {"eval_id": evaluation.id, "model": data_source.get("model") or "", "data_source": data_source}
    row = new_row(EvalRunRow, "evalrun_", caller, **more)
    context.tasks.start(RUN_TASKS, row.id, row.key_id)
    return evals.insert_run(context.db, row)


class EvalRunner:
    def __init__(self, context: ControllerContext, grading: Grading):
        self._context, self._db, self._grading = context, context.db, grading
        context.tasks.add(Kind(RUN_TASKS, self.run, self.fail, "run", per_owner=1))

    async def delete(self, object_id: str) -> None:
        """Delete an evaluation with its runs, or one run."""
        for run_id in evals.unfinished_ids(self._db, object_id):
            self.cancel(run_id)
        await asyncio.to_thread(evals.delete, self._db, object_id)

    def cancel(self, run_id: str) -> None:
        """End the run; judged items stay. Idempotent."""
        self._end(run_id, "canceled", None)
        self._context.tasks.restart(RUN_TASKS, run_id)

    async def run(self, task: TaskRow) -> None:
        """Sample and grade a run's remaining items. Raises TaskFailed."""
        row = evals.find_run(self._db, task.id)
        evaluation = evals.find(self._db, row.eval_id, viewer=None) if row is not None else None
        if row is None or evaluation is None or row.finished:
            return
        source = await asyncio.to_thread(_SOURCE.validate_python, row.data_source)
        try:
            graders = [parse(criterion) for criterion in evaluation.criteria]
            async with asyncio.timeout(row.created_s + WINDOW_S - time.time()):
                if row.status == "queued":
                    await self._check_data(row, evaluation, source)
                # Code gets small groups: it may take minutes per sample, and jobs need grades in between.
                group_size = MOST_BROKEN if any(map(sources, graders)) else AT_ONCE
                async with aclosing(finished(self._unjudged(row, source, graders), AT_ONCE)) as groups:
                    async for answered in groups:
                        for first in range(0, len(answered), group_size):
                            items = answered[first : first + group_size]
                            await self._grade(row, graders, items)
                            row = await to_thread.run_sync(self._store, row, items)
        except InvalidGrader as error:  # checked here because checks may be stricter than when the eval was made
            raise TaskFailed("invalid_grader", f"A criterion of the eval is refused: {error}.") from None
        except TimeoutError:
            raise TaskFailed("expired", f"The run did not end within {WINDOW_S / 3600:.0f} hours.") from None
        self._end(row.id, "completed", None)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        self._end(task.id, "failed", {"code": error.code, "message": str(error)})

    def _end(self, run_id: str, status: str, error: dict[str, str] | None) -> None:
        with self._db.transaction():
            row = evals.find_run(self._db, run_id)
            if row is not None and not row.finished:
                kept = shapes.without_items(row.data_source)
                evals.update_run(self._db, run_id, status=status, error=error, ended_s=time.time(), data_source=kept)

    # --- the data

    async def _check_data(self, row: EvalRunRow, evaluation: EvalRow, source: Jsonl | Sampled) -> None:
        """Check all items by the schema, in groups: parsed at once, a file would take 20 times its size in memory.
        Raises TaskFailed."""
        total, entries = 0, self._entries(row, source.source)
        while chunk := await asyncio.to_thread(lambda: list(islice(entries, _CHUNK))):
            try:
                items = [entry.item for entry in chunk]
                refused = await self._context.graders.refused_items(row.owner, evaluation.item_schema, items)
            except WorkerBroke as error:
                code = "invalid_data" if isinstance(error, ForkBroke) else "server_error"
                raise TaskFailed(code, f"The items could not be checked by the eval's item_schema: {error}") from None
            if refused:
                faults = "; ".join(f"line {at + total + 1}: {why}" if at >= 0 else why for at, why in refused)
                raise TaskFailed("invalid_data", f"Items do not follow the eval's item_schema: {faults}"[:4000])
            total += len(chunk)
        if not total:
            raise TaskFailed("invalid_data", "The data has no items.")
        with self._db.transaction():
            if evals.unfinished_ids(self._db, row.id):
                evals.update_run(self._db, row.id, status="in_progress", total=total)

    def _entries(self, row: EvalRunRow, source: shapes.FileContent | shapes.FileId) -> Iterator[Entry]:
        """Return an iterator over the entries of the data. Raises TaskFailed, also during iteration."""
        if isinstance(source, shapes.FileContent):
            return iter(source.content)
        file = file_rows.find(self._db, source.id, viewer=caller_of(self._db, row.key_id).viewer)
        if file is None:
            raise TaskFailed("file_not_found", f"The file {source.id} was deleted.")
        if file.bytes > shapes.MAX_DATA_BYTES:
            most = shapes.MAX_DATA_BYTES
            raise TaskFailed("file_too_large", f"The file has {file.bytes} bytes; a run reads {most} at most.")
        return shapes.entries(self._context.files_dir / source.id)

    # --- judging

    def _unjudged(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader]
    ) -> Iterator[Coroutine[Any, Any, Answered]]:
        """Yield each item without a row, with its sample and the judges' answers. Raises TaskFailed."""
        judged = evals.passed(self._db, row.id)
        for place, entry in enumerate(self._entries(row, source.source)):
            if place % AT_ONCE == 0:
                try:
                    self._context.quotas.check(caller_of(self._db, row.key_id))
                except ApiError as error:
                    raise TaskFailed(error.code or "limit_reached", error.message) from None
            if place not in judged:
                yield self._sampled(row, source, graders, place, entry)

    async def _sampled(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader], place: int, entry: Entry
    ) -> Answered:
        item, body = entry.item, dict[str, Any](messages=[])
        if isinstance(source, Sampled):
            try:
                body = await asyncio.to_thread(shapes.body_of, source, item)
                answer = await self._grading.chat(row.key_id, body)
            except GradingFailed as error:
                answer = ModelAnswer(model=source.model, error=str(error))
            sample = Sample(answer.text, answer.tools)
        else:
            sample = shapes.sample_of(entry.sample)
            answer = ModelAnswer(sample.output_text, row.model)
        needed = () if answer.error else graders
        judged = [await self._grading.ask_judges(row.key_id, grader, sample, item) for grader in needed]
        return Answered(place, item, sample, body, answer, judged)

    async def _grade(self, row: EvalRunRow, graders: list[Grader], items: list[Answered]) -> None:
        sampled = [item for item in items if not item.answer.error]
        for number, grader in enumerate(graders if sampled else ()):
            judged = [item.judged[number] for item in sampled]
            samples = [(item.sample, item.item) for item in sampled]
            graded = await self._grading.grade(row.key_id, grader, samples, judged)
            for item, reward, answers in zip(sampled, graded, judged, strict=True):
                item.results.append(_result(grader, reward, list(answers.values())))

    def _store(self, row: EvalRunRow, items: list[Answered]) -> EvalRunRow:
        """Store judged items and the run's counters, unless the run was cancelled meanwhile. Returns the run."""
        rows = [item.row(row.id) for item in items]
        results = {name: Counter(sums) for name, sums in row.results.items()}
        counts, size = Counter(row.counts), row.bytes
        usage = {model: Counter(sums) for model, sums in row.usage.items()}
        for item, stored in zip(items, rows, strict=True):
            counts[stored.status] += 1
            size += len(orjson.dumps([stored.item, stored.sample, stored.results]))
            answers = [answer for judged in item.judged for _, answer in judged.values()]
            for answer in (*answers, item.answer) if row.model else answers:
                if not answer.error:
                    counters = columns(answer, "prompt_tokens completion_tokens cached_tokens")
                    usage.setdefault(answer.model, Counter()).update(invocation_count=1, **counters)
            for result in item.results:
                sums = results.setdefault(result["name"], Counter())
                sums["passed" if result["passed"] else "failed"] += 1
                if "error" not in result:
                    sums.update(rewarded=1, reward=result["score"])
        changes: dict[str, Any] = {"results": results, "usage": usage, "counts": counts, "bytes": size}
        with self._db.transaction():
            if evals.unfinished_ids(self._db, row.id):
                for stored in rows:
                    EVAL_ITEMS.insert(self._db, stored)
                evals.update_run(self._db, row.id, **changes)
        return replace(row, **changes)


def _result(grader: Grader, graded: Graded, judged: list[tuple[dict[str, Any], ModelAnswer]]) -> dict[str, Any]:
    result = {"name": grader.name, "type": grader.type, "passed": graded.passed, "score": graded.reward}
    if judged:
        result["sample"] = sample_object(judged[0][0], [answer for _, answer in judged])
    if graded.errors:
        kind = "reason" if graded.errors.of_the_answer else "error"
        result[kind] = "; ".join(graded.messages)[:_ERROR_CHARACTERS]
    return result


# --- routes


RunStatus = Annotated[Literal["queued", "in_progress", "completed", "canceled", "failed"] | None, Query()]
ItemStatus = Annotated[Literal["pass", "fail", "error"] | None, Query()]
EVALS = Resource("eval", "/v1/evals", (FINE_TUNING,), evals.find, fields=("name",))
_RECORDED = ("eval_id", "model", "status")
RUNS = Resource(
    "eval_run", "/v1/evals/{eval_id}/runs", (FINE_TUNING,), EVAL_RUNS.find_visible, param="run_id", fields=_RECORDED
)
ITEMS = Resource("output_item", f"{RUNS.prefix}/{{run_id}}/output_items", RUNS.scopes, EVAL_ITEMS.find)


def _known_run(eval_id: str, run_id: str, request: Request, caller: Caller) -> EvalRunRow:
    row = RUNS.known(request.app.state.context.db, run_id, caller)
    if row.eval_id != eval_id:
        raise RUNS.absent(run_id)
    return row


Run = Annotated[EvalRunRow, Depends(_known_run)]


_OF_STATUS = "(? IS NULL OR status = ?)"
"""A filter, and not part of the scope, so that a row of another status is a cursor, too."""


def _order(order_by: Annotated[Literal["created_at", "updated_at"], Query()] = "created_at") -> dict[str, Any]:
    return {"order_by": "updated_s" if order_by == "updated_at" else ""}


def routes(context: ControllerContext, runner: EvalRunner) -> list[APIRouter]:
    db = context.db
    of_evals = EVALS.serve(context, shapes.eval_object, evals.page, part(20, order="asc"), _order)

    @of_evals.post("", status_code=201)
    async def create(body: shapes.EvalCreate, request: Request, caller: Caller) -> dict[str, Any]:
        criteria = await _criteria(context, body, caller)
        schema, param = body.data_source_config.item_schema, "data_source_config.item_schema"
        await check_schema(context.graders, schema, caller, param)

        def make() -> EvalRow:
            size, now_s = len(orjson.dumps([schema, criteria])), time.time()
            context.quotas.check(caller, size)
            fields = {"name": body.name or "", "metadata": body.metadata, "item_schema": schema, "criteria": criteria}
            fields["include_sample"] = int(body.data_source_config.include_sample_schema)
            times = {"created_s": now_s, "updated_s": now_s}
            return evals.insert(db, new_row(EvalRow, "eval_", caller, bytes=size, **fields, **times))

        return shapes.eval_object(EVALS.once(request, caller, await request.body(), make))

    @of_evals.post("/{eval_id}")
    async def update(eval_id: str, body: shapes.EvalUpdate, caller: Caller) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        changes = body.model_dump(exclude_unset=True)
        changes |= {"name": body.name or ""} if "name" in changes else {}
        evals.update(db, eval_id, **changes, updated_s=time.time())
        return shapes.eval_object(EVALS.known(db, eval_id, caller))

    @of_evals.delete("/{eval_id}")
    async def delete(eval_id: str, caller: Caller) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        await runner.delete(eval_id)
        return {"object": "eval.deleted", "deleted": True, "eval_id": eval_id}

    of_runs, url = RUNS.router(), context.box["public_url"]

    def view(row: EvalRunRow) -> dict[str, Any]:
        waits = context.asking.why(row.key_id, row.model) if row.status == "in_progress" and row.model else ""
        return shapes.run_object(row, url, waits)

    @of_runs.post("", status_code=201)
    async def create_run(eval_id: str, body: shapes.RunCreate, request: Request, caller: Caller) -> dict[str, Any]:
        await _check_sampling(context, body.data_source, caller)
        source = body.data_source.model_dump(mode="json", exclude_unset=True)

        def make() -> EvalRunRow:
            evaluation = EVALS.known(db, eval_id, caller)  # another key may have made the eval
            for model in sorted(set[str]().union(*map(judge_models, evaluation.criteria))):
                check_may_ask(db, caller, model)
            if isinstance(body.data_source.source, shapes.FileId):
                FILES.known(db, body.data_source.source.id, caller, "data_source.source.id")
            if isinstance(body.data_source, Sampled):
                check_may_ask(db, caller, body.data_source.model, "data_source.model")
            return insert_run(context, evaluation, caller, source, name=body.name or "", metadata=body.metadata)

        return view(RUNS.once(request, caller, await request.body(), make))

    @of_runs.get("")
    def list_runs(
        eval_id: str, caller: Caller, part: Annotated[Part, part(20, order="asc")], status: RunStatus = None
    ) -> dict[str, Any]:
        EVALS.known(db, eval_id, caller)
        scope = {"eval_id": eval_id, **owned_by(caller.viewer)}  # an administrator may also run another owner's eval
        return list_object(EVAL_RUNS.page(db, scope, where=_OF_STATUS, parameters=[status, status], **part), view)

    @of_runs.get("/{run_id}")
    def retrieve_run(run: Run) -> dict[str, Any]:
        return view(run)

    # The SDK has the first URL, OpenAI's specification the second.
    @of_runs.post("/{run_id}/cancel")
    @of_runs.post("/{run_id}")
    async def cancel_run(run: Run, caller: Caller) -> dict[str, Any]:
        runner.cancel(run.id)
        return view(RUNS.known(db, run.id, caller))

    @of_runs.delete("/{run_id}")
    async def delete_run(run: Run) -> dict[str, Any]:
        await runner.delete(run.id)
        return {"object": "eval.run.deleted", "deleted": True, "run_id": run.id}

    of_items = ITEMS.router()

    @of_items.get("")
    def list_items(run: Run, part: Annotated[Part, part(20, order="asc")], status: ItemStatus = None) -> dict[str, Any]:
        part["order_by"] = "place"
        page = EVAL_ITEMS.page(db, {"run_id": run.id}, where=_OF_STATUS, parameters=[status, status], **part)
        return list_object(page, lambda row: shapes.item_object(row, run))

    @of_items.get("/{item_id}")
    def retrieve_item(run: Run, item_id: str) -> dict[str, Any]:
        if (row := EVAL_ITEMS.find(db, item_id)) is None or row.run_id != run.id:
            raise ITEMS.absent(item_id)
        return shapes.item_object(row, run)

    return [of_evals, of_runs, of_items]


async def _check_sampling(context: ControllerContext, source: Jsonl | Sampled, caller: Principal) -> None:
    """Check the sampling fields of a request. Raises ApiError."""
    if isinstance(source, Jsonl):
        return
    try:
        shapes.check_sampled(source)
    except InvalidGrader as error:
        where = f"data_source.{error.param}"
        raise InvalidValue(f"Invalid '{where}': {error.message}.", where) from None
    fields, param = shapes.fields_of(source), "data_source.sampling_params"
    # Checked on a thread: the schema of answers may have 25,000 parts.
    await asyncio.to_thread(check_completion, fields, param)
    await check_form(context.graders, fields.get("response_format"), caller, f"{param}.response_format")


async def _criteria(context: ControllerContext, body: shapes.EvalCreate, caller: Principal) -> list[dict[str, Any]]:
    """Return the graders in their stored form. Raises BadRequest, NotFound."""
    kept: dict[str, dict[str, Any]] = {}
    for place, criterion in enumerate(body.testing_criteria):
        grader = grader_of(context, criterion, caller, f"testing_criteria.{place}")
        await check_code(context.graders, grader, caller, f"testing_criteria.{place}")
        if grader.name in kept:
            message = f"Two testing criteria are called {shown(grader.name)}; results are listed by name."
            raise BadRequest(message, f"testing_criteria.{place}.name", "invalid_grader")
        kept[grader.name] = grader.as_given()
        if grader.type == "text_similarity":
            kept[grader.name].setdefault("pass_threshold", grader.default_threshold)
    return list(kept.values())
