"""Runs evaluations: for each item a sample, if a model is to make one, then the graders, a few items at a time.

What must outlive the controller is in the rows: an item is queued until it is judged, and the counters of a run change
in the transaction that judges its items. After a restart the rest goes on. The runs of one owner wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from appliance.controller.access.model_access import viewer_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals import requests
from appliance.controller.evals.requests import Jsonl, Sampled, body_of, sample_of
from appliance.controller.grading.given import MAX_DEPTH, is_deeper
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.objects import files as file_rows
from appliance.store.records import keys
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow
from train.graders.errors import GradingFailed
from train.graders.graders import Grader, LabelModel, ScoreModel, leaves, parse
from train.graders.grading import ModelAnswer
from train.graders.host import WorkerBroke
from train.graders.hosts import GraderHosts
from train.graders.templates import Sample

WINDOW_S = 24 * 3600.0
AT_ONCE = 8
_CHUNK = 500
_SOURCE: TypeAdapter[Jsonl | Sampled] = TypeAdapter(Jsonl | Sampled)


class _Failed(Exception):
    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class EvalRunner:
    def __init__(self, context: ControllerContext, hosts: GraderHosts, answers: ModelAnswers):
        self._context, self._db, self._hosts, self._answers = context, context.db, hosts, answers
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def start(self) -> None:
        """After a restart: go on with what has not ended."""
        for row in evals.unfinished_runs(self._db):
            self.begin(row.id)

    def begin(self, run_id: str) -> None:
        task = self._context.background.keep(f"evaluation: {run_id}", partial(self._run, run_id))
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    def cancel(self, run_id: str) -> None:
        """Items that are judged stay so. Idempotent."""
        row = evals.find_run(self._db, run_id)
        if row is not None and not row.finished:
            evals.update_run(self._db, run_id, status="canceled", ended_s=time.time())
        self.let_go(run_id)

    def let_go(self, run_id: str) -> None:
        if (task := self._tasks.get(run_id)) is not None:
            task.cancel()

    async def idle(self) -> None:
        """Returns when no run is under way."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, run_id: str) -> None:
        row = evals.find_run(self._db, run_id)
        if row is None or row.finished:
            return
        async with self._turns[row.owner]:
            try:
                await self._judged(run_id)
            except _Failed as error:
                self._end(run_id, "failed", {"code": error.code, "message": str(error)})
            except Exception as error:
                # A bug; without this the run would be under way forever, with the reason only in a log.
                self._end(run_id, "failed", {"code": "internal_error", "message": f"{type(error).__name__}: {error}"})
                raise

    async def _judged(self, run_id: str) -> None:
        """Raises _Failed."""
        row = evals.find_run(self._db, run_id)
        of = evals.find(self._db, row.eval_id, viewer=None) if row is not None else None
        if row is None or of is None or row.finished:
            return
        source = _SOURCE.validate_python(row.data_source)
        graders = [parse(criterion) for criterion in of.criteria]
        if row.status == "queued":
            await self._prepare(row, of, source)
        while items := evals.queued_items(self._db, run_id, AT_ONCE):
            self._check_may_go_on(row)
            judged = await asyncio.gather(*(self._item(row, source, graders, item) for item in items))
            if not self._store(run_id, items, judged):
                return  # it was cancelled or deleted meanwhile
        self._end(run_id, "completed", None)

    def _check_may_go_on(self, row: EvalRunRow) -> None:
        if row.key_id is not None and keys.is_revoked(self._db, row.key_id):
            raise _Failed("key_revoked", "The API key of this run was revoked.")
        if time.time() > row.created_s + WINDOW_S:
            raise _Failed("expired", f"The run did not end within {WINDOW_S / 3600:.0f} hours.")

    def _end(self, run_id: str, status: str, error: dict[str, str] | None) -> None:
        row = evals.find_run(self._db, run_id)
        if row is not None and not row.finished:
            evals.update_run(self._db, run_id, status=status, error=error, ended_s=time.time())

    # --- the data

    async def _prepare(self, row: EvalRunRow, of: EvalRow, source: Jsonl | Sampled) -> None:
        """Put its items into the store, checked by the schema. Raises _Failed."""
        entries = await self._entries(row, source)
        for place, entry in enumerate(entries):
            if is_deeper(entry, MAX_DEPTH):
                raise _Failed("invalid_data", f"Line {place + 1} is nested deeper than {MAX_DEPTH} levels.")
        try:
            async with self._hosts.of(row.owner) as host:
                refused = await host.refused_items(of.item_schema, [entry["item"] for entry in entries])
        except WorkerBroke as error:
            raise _Failed(
                "invalid_data", f"The items could not be checked by the eval's item_schema: {error}"
            ) from None
        if refused:
            told = "; ".join(f"line {place + 1}: {why}" for place, why in refused)
            raise _Failed("invalid_data", f"Items do not follow the eval's item_schema: {told}"[:4000])
        evals.clear_items(self._db, row.id)
        now_s = time.time()
        for first in range(0, len(entries), _CHUNK):
            evals.insert_items(
                self._db,
                [
                    EvalItemRow(
                        new_id("outputitem_"), row.id, place, now_s, item=entry["item"], sample=entry.get("sample")
                    )
                    for place, entry in enumerate(entries[first : first + _CHUNK], first)
                ],
            )
            await asyncio.sleep(0)
        size = sum(len(json.dumps(entry)) for entry in entries)
        evals.update_run(self._db, row.id, status="in_progress", total=len(entries), bytes=size)

    async def _entries(self, row: EvalRunRow, source: Jsonl | Sampled) -> list[dict[str, Any]]:
        """Raises _Failed."""
        if source.source.type == "file_content":
            return [entry.model_dump() for entry in source.source.content]
        file_id = str(getattr(source.source, "id", ""))
        viewer = viewer_of(self._db, row.key_id) if row.key_id else None
        file = file_rows.find(self._db, file_id, viewer=viewer, now_s=time.time())
        if file is None:
            raise _Failed("file_not_found", f"The file {file_id} was deleted.")
        if file.bytes > requests.MAX_DATA_BYTES:
            raise _Failed(
                "file_too_large", f"The file has {file.bytes} bytes; a run reads {requests.MAX_DATA_BYTES} at most."
            )
        return await asyncio.to_thread(_read, self._context.files_dir / file_id)

    # --- an item

    async def _item(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader], item: EvalItemRow
    ) -> dict[str, Any]:
        """What its row becomes, and under `usage` what models have used for it."""
        usage: list[ModelAnswer] = []
        sample, told = sample_of(item.sample), item.sample
        if isinstance(source, Sampled):
            answer, asked = await self._sample(row, source, item.item)
            told = {"input": asked.get("messages", []), "answer": asdict(answer)}
            if answer.error:
                return {"status": "error", "sample": told, "results": [], "usage": usage}
            usage.append(answer)
            sample = Sample(answer.text, answer.tools)
        results = []
        for grader in graders:
            results.append(await self._result(row, grader, sample, item.item, usage))
        bad = any("error" in result for result in results)
        status = "error" if bad else "pass" if all(result["passed"] for result in results) else "fail"
        return {"status": status, "sample": told, "results": results, "usage": usage}

    async def _sample(
        self, row: EvalRunRow, source: Sampled, item: dict[str, Any]
    ) -> tuple[ModelAnswer, dict[str, Any]]:
        try:
            body = body_of(source, item)
        except GradingFailed as error:
            return ModelAnswer(model=str(source.model), error=str(error)), {}
        return await self._ask(row, body), body

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
        try:
            asked = {}
            if any(isinstance(leaf, ScoreModel | LabelModel) for leaf in leaves(grader).values()):
                async with self._hosts.of(row.owner) as host:
                    (asked,) = await host.requests(grader, [(sample, item)])
            told = await asyncio.gather(*(self._ask(row, body) for body in asked.values()))
            usage += [answer for answer in told if not answer.error]
            async with self._hosts.of(row.owner) as host:
                (graded,) = await host.grade(grader, [(sample, item)], [dict(zip(asked, told, strict=True))])
        except WorkerBroke as error:
            return {"name": grader.name, "type": grader.type, "passed": False, "score": 0.0, "error": str(error)}
        result = {"name": grader.name, "type": grader.type, "passed": graded.passed, "score": graded.reward}
        if told:
            result["sample"] = {"output": [answer.text for answer in told]}
        if graded.errors:
            result["error"] = "; ".join(graded.messages)
        return result

    def _store(self, run_id: str, items: list[EvalItemRow], judged: list[dict[str, Any]]) -> bool:
        """All of it or nothing. False: the run has ended meanwhile."""
        with self._db.transaction():
            row = evals.find_run(self._db, run_id)
            if row is None or row.finished:
                return False
            results = {name: Counter(of) for name, of in row.results.items()}
            usage = {model: Counter(of) for model, of in row.usage.items()}
            size = row.bytes
            for item, one in zip(items, judged, strict=True):
                for answer in one.pop("usage"):
                    usage.setdefault(answer.model, Counter()).update(
                        invocation_count=1,
                        prompt_tokens=answer.prompt_tokens,
                        completion_tokens=answer.completion_tokens,
                        cached_tokens=answer.cached_tokens,
                    )
                for result in one["results"]:
                    results.setdefault(result["name"], Counter())["passed" if result["passed"] else "failed"] += 1
                evals.update_item(self._db, item.id, **one)
                size += len(json.dumps([one["sample"], one["results"]]))
            evals.update_run(
                self._db,
                run_id,
                results={name: dict(of) for name, of in results.items()},
                usage={model: dict(of) for model, of in usage.items()},
                bytes=size,
            )
        return True


def _read(path: Path) -> list[dict[str, Any]]:
    """Entries of a JSONL file. Raises _Failed."""
    entries: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8") as source:
            for number, line in enumerate(source, 1):
                if not line.strip():
                    continue
                if len(entries) == requests.MAX_ITEMS:
                    raise _Failed("invalid_data", f"The file has more than {requests.MAX_ITEMS} items.")
                try:
                    entries.append(requests.Entry.model_validate_json(line).model_dump())
                except ValidationError as error:
                    first = error.errors(include_url=False, include_input=False)[0]
                    where = ".".join(map(str, first["loc"])) or "the line"
                    raise _Failed(
                        "invalid_data",
                        f'Line {number} is not {{"item": {{...}}, "sample": {{...}}}}: {where}: {first["msg"]}.',
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _Failed("file_unreadable", f"The file could not be read: {error}") from None
    if not entries:
        raise _Failed("invalid_data", "The file has no items.")
    return entries
