"""Runs evaluations, some items at a time: for each item first a sample, if a model is to make one, then the graders.

What must outlive the controller is in the rows: an item is queued until it is judged, and the counters of a run change
in the transaction that judges its items. After a restart the rest continues. The runs of one owner wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

from pydantic import TypeAdapter

from appliance.controller.access.model_access import caller_of, viewer_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, until_room
from appliance.controller.evals import requests
from appliance.controller.evals.new_run import EVAL_RUNS
from appliance.controller.evals.requests import Jsonl, Sampled, body_of, sample_of
from appliance.controller.evals.run_items import entries
from appliance.controller.evals.views import judges_sample
from appliance.controller.grading.judged import graded_with_answers
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.interfaces.errors import ApiError
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.objects import files as file_rows
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow, TaskRow
from train.graders.errors import GradingFailed, InvalidGrader
from train.graders.graders import Grader, parse
from train.graders.grading import ModelAnswer
from train.graders.hosts import ForkBroke, GraderHosts, WorkerBroke
from train.graders.templates import Sample

WINDOW_S = 24 * 3600.0
AT_ONCE = 32
_CHUNK = 200
"""Items that are checked and stored at once."""
_ERROR_CHARACTERS = 2000
Entries = Iterator[tuple[dict[str, Any], int]]
_SOURCE: TypeAdapter[Jsonl | Sampled] = TypeAdapter(Jsonl | Sampled)


def _grader(kept: dict[str, Any]) -> Grader:
    """Raises TaskFailed: the box may have become stricter since the eval was made."""
    try:
        return parse(kept)
    except InvalidGrader as error:
        raise TaskFailed(
            "invalid_grader",
            f"The criterion {kept.get('name')!r} is refused: {error}; make the eval again with another.",
        ) from None


class EvalRunner:
    def __init__(self, context: ControllerContext, hosts: GraderHosts, answers: ModelAnswers):
        self._context, self._db, self._hosts, self._answers = context, context.db, hosts, answers
        context.tasks.add(Kind(EVAL_RUNS, self.run, self.fail, "run", per_owner=1))

    async def delete(self, object_id: str) -> None:
        """Delete an eval, with its runs, or a run."""
        for run_id in evals.unfinished_ids(self._db, object_id):
            self.cancel(run_id)
        await asyncio.to_thread(evals.delete, self._db, object_id)

    def cancel(self, run_id: str) -> None:
        """Items that are judged stay so. Idempotent."""
        self._end(run_id, "canceled", None)
        self._context.tasks.restart(EVAL_RUNS, run_id)

    def waits_for(self, row: EvalRunRow) -> str:
        """Why a run does not proceed at the moment, "" if it does."""
        if row.finished:
            return ""
        if self._context.tasks.waits(EVAL_RUNS, row.id):
            return "the runs of one owner take turns, and another one goes on"
        if row.status == "queued" or not row.model:
            return ""
        return self._context.asking.why(row.key_id, row.model)

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = evals.find_run(self._db, task.id)
        of = evals.find(self._db, row.eval_id, viewer=None) if row is not None else None
        if row is None or of is None or row.finished:
            return
        source = await asyncio.to_thread(_SOURCE.validate_python, row.data_source)
        graders = [_grader(criterion) for criterion in of.criteria]
        if row.status == "queued":
            self._check_may_go_on(row)
            if not await self._prepare(row, of, source):
                return  # it was cancelled or deleted meanwhile
            if source.source.type == "file_content":
                source.source.content.clear()
        row = replace(row, data_source={})
        judging: dict[asyncio.Task[dict[str, Any]], EvalItemRow] = {}
        place = -1
        try:
            while True:
                self._check_may_go_on(row)
                for item in evals.queued_items(self._db, row.id, AT_ONCE - len(judging), place):
                    judging[asyncio.create_task(self._item(row, source, graders, item))] = item
                    place = item.place
                if not judging:
                    break
                done, _ = await asyncio.wait(judging, return_when=asyncio.FIRST_COMPLETED)
                judged = [(judging.pop(task), task.result()) for task in done]
                if not await until_room(partial(asyncio.to_thread, self._store, row.id, judged)):
                    return  # it was cancelled or deleted meanwhile
        finally:
            for item_task in judging:
                item_task.cancel()
            await asyncio.gather(*judging, return_exceptions=True)
        self._end(row.id, "completed", None)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        self._end(task.id, "failed", {"code": error.code, "message": str(error)})

    def _check_may_go_on(self, row: EvalRunRow) -> None:
        try:
            self._context.quotas.check(caller_of(self._db, row.key_id), "eval_items")
        except ApiError as error:
            raise TaskFailed(error.code or "limit_reached", error.message) from None
        if time.time() > row.created_s + WINDOW_S:
            raise TaskFailed("expired", f"The run did not end within {WINDOW_S / 3600:.0f} hours.")

    def _end(self, run_id: str, status: str, error: dict[str, str] | None) -> None:
        with self._db.transaction():
            row = evals.find_run(self._db, run_id)
            if row is not None and not row.finished:
                kept, has_items = requests.without_items(row.data_source), evals.has_items(self._db, run_id)
                evals.update_run(
                    self._db,
                    run_id,
                    status=status,
                    error=error,
                    ended_s=time.time(),
                    data_source=kept,
                    total=row.total if has_items else 0,
                    bytes=row.bytes if has_items else requests.own_bytes(kept),
                )

    # --- the data

    async def _prepare(self, row: EvalRunRow, of: EvalRow, source: Jsonl | Sampled) -> bool:
        """Put its items into the store, checked by the schema, some at a time: as objects, a whole file takes 20 times
        its size. False: the run has ended or was deleted meanwhile. Raises TaskFailed."""
        clear = partial(asyncio.to_thread, evals.delete_items, self._db, row.id)
        await clear()  # what a preparation that was cut short has left
        try:
            return await self._take(row, of.item_schema, self._entries(row, source))
        except TaskFailed:
            await clear()
            raise

    async def _take(self, row: EvalRunRow, schema: dict[str, Any], entries: Entries) -> bool:
        """False: the run has ended or was deleted meanwhile. Raises TaskFailed."""
        kept = requests.without_items(row.data_source)
        place, size = 0, requests.own_bytes(kept)
        while chunk := await asyncio.to_thread(lambda: list(islice(entries, _CHUNK))):
            self._check_may_go_on(row)
            try:
                refused = await self._hosts.refused_items(row.owner, schema, [entry["item"] for entry, _ in chunk])
            except WorkerBroke as error:
                whose = "invalid_data" if isinstance(error, ForkBroke) else "server_error"
                raise TaskFailed(whose, f"The items could not be checked by the eval's item_schema: {error}") from None
            if refused:
                faults = "; ".join(f"line {at + place + 1}: {why}" if at >= 0 else why for at, why in refused)
                raise TaskFailed("invalid_data", f"Items do not follow the eval's item_schema: {faults}"[:4000])
            now_s = time.time()
            rows = [
                EvalItemRow(new_id("outputitem_"), row.id, at, now_s, item=entry["item"], sample=entry.get("sample"))
                for at, (entry, _) in enumerate(chunk, place)
            ]
            place, size = place + len(rows), size + sum(length + requests.ITEM_BYTES for _, length in chunk)
            if not await asyncio.to_thread(self._insert, rows, total=place, bytes=size):
                return False
        with self._db.transaction():
            if self._is_over(row.id):
                return False
            evals.update_run(self._db, row.id, status="in_progress", data_source=kept)
        return True

    def _insert(self, rows: list[EvalItemRow], **counted: int) -> bool:
        """Store items together with the run's counters, which hold whenever it ends. False: it has ended meanwhile."""
        run_id = rows[0].run_id
        with self._db.transaction():
            if self._is_over(run_id):
                return False
            evals.insert_items(self._db, rows)
            evals.update_run(self._db, run_id, **counted)
        return True

    def _is_over(self, run_id: str) -> bool:
        now = evals.run_in_short(self._db, run_id)
        return now is None or now.finished

    def _entries(self, row: EvalRunRow, source: Jsonl | Sampled) -> Entries:
        """Raises TaskFailed, also while they are read."""
        if source.source.type == "file_content":
            return entries(source.source)
        file_id = source.source.id
        viewer = viewer_of(self._db, row.key_id) if row.key_id else None
        file = file_rows.find(self._db, file_id, viewer=viewer, now_s=time.time())
        if file is None:
            raise TaskFailed("file_not_found", f"The file {file_id} was deleted.")
        if file.bytes > requests.MAX_DATA_BYTES:
            raise TaskFailed(
                "file_too_large", f"The file has {file.bytes} bytes; a run reads {requests.MAX_DATA_BYTES} at most."
            )
        return entries(self._context.files_dir / file_id)

    # --- an item

    async def _item(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader], item: EvalItemRow
    ) -> dict[str, Any]:
        """The new contents of its row, with a sample if one was made, and under `usage` the tokens that models used for
        it."""
        usage: list[ModelAnswer] = []
        sample, made = sample_of(item.sample), dict[str, Any]()
        if isinstance(source, Sampled) and source.model is not None:
            try:
                body = await asyncio.to_thread(body_of, source, item.item)
            except GradingFailed as error:
                body, answer = {"messages": []}, ModelAnswer(model=source.model, error=str(error))
            else:
                answer = await self._ask(row, body)
            made = {"sample": {"input": body["messages"], "answer": asdict(answer)}}
            if answer.error:
                return {"status": "error", **made, "results": [], "usage": usage}
            usage.append(answer)
            sample = Sample(answer.text, answer.tools)
        results = [await self._result(row, grader, sample, item.item, usage) for grader in graders]
        bad = any("error" in result for result in results)
        status = "error" if bad else "pass" if all(result["passed"] for result in results) else "fail"
        return {"status": status, **made, "results": results, "usage": usage}

    async def _ask(self, row: EvalRunRow, body: dict[str, Any]) -> ModelAnswer:
        return await self._answers.ask(row.key_id, body, max(1.0, row.created_s + WINDOW_S - time.time()))

    async def _result(
        self,
        row: EvalRunRow,
        grader: Grader,
        sample: Sample,
        item: dict[str, Any],
        usage: list[ModelAnswer],
    ) -> dict[str, Any]:
        """Raises TaskFailed: the run may not go on."""
        self._check_may_go_on(row)  # a few items of python graders may take hours
        bodies = list[dict[str, Any]]()

        async def ask(body: dict[str, Any]) -> ModelAnswer:
            bodies.append(body)
            return await self._ask(row, body)

        try:
            graded, judged = await graded_with_answers(self._hosts, row.owner, grader, (sample, item), ask)
        except WorkerBroke as error:
            return {"name": grader.name, "type": grader.type, "passed": False, "score": 0.0, "error": str(error)}
        usage += [answer for answer in judged if not answer.error]
        result = {"name": grader.name, "type": grader.type, "passed": graded.passed, "score": graded.reward}
        if judged:
            result["sample"] = judges_sample(bodies[0], judged)
        if graded.errors:
            field = "reason" if graded.errors.of_the_answer else "error"
            result[field] = "; ".join(graded.messages)[:_ERROR_CHARACTERS]
        return result

    def _store(self, run_id: str, judged: list[tuple[EvalItemRow, dict[str, Any]]]) -> bool:
        """Store items together with the run's counters. False: the run has ended meanwhile."""
        with self._db.transaction():
            row = evals.find_run(self._db, run_id)
            if row is None or row.finished:
                return False
            results = {name: dict(of) for name, of in row.results.items()}
            usage = {model: Counter(of) for model, of in row.usage.items()}
            counts, size = Counter(row.counts), row.bytes
            for item, one in judged:
                for answer in one["usage"]:
                    usage.setdefault(answer.model, Counter()).update(
                        invocation_count=1,
                        prompt_tokens=answer.prompt_tokens,
                        completion_tokens=answer.completion_tokens,
                        cached_tokens=answer.cached_tokens,
                    )
                for result in one["results"]:
                    rewarded = "error" not in result
                    _add(
                        results.setdefault(result["name"], {}),
                        **{"passed" if result["passed"] else "failed": 1},
                        rewarded=int(rewarded),
                        reward=result["score"] if rewarded else 0.0,
                    )
                counts[one["status"]] += 1
                size += len(json.dumps([one.get("sample"), one["results"]]))
                evals.update_item(self._db, item.id, **{name: value for name, value in one.items() if name != "usage"})
            evals.update_run(
                self._db,
                row.id,
                results=results,
                usage={model: dict(of) for model, of in usage.items()},
                counts=dict(counts),
                bytes=size,
            )
        return True


def _add(sums: dict[str, float], **more: float) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + value
