"""Runs evaluations, some items at a time: for each item first a sample, if a model is to make one, then the graders.

What must outlive the controller is in the rows: an item gets one once it is judged, and the counters of its run change
in the same transaction. After a restart the rest continues. The runs of one owner wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from anyio import to_thread
from pydantic import TypeAdapter, ValidationError

from appliance.controller.access.model_access import caller_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, finished
from appliance.controller.evals import shapes
from appliance.controller.evals.shapes import Entry, FileContent, FileId, Jsonl, Sampled, sample_object, sample_of
from appliance.controller.grading.checks import MAX_DEPTH
from appliance.controller.grading.judging import Grading, Judged
from appliance.controller.http.error_handlers import first_error
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.objects import files as file_rows
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow, TaskRow, columns
from train.data.lines import MARK
from train.graders.errors import GradingFailed, InvalidGrader
from train.graders.graders import Grader, ModelAnswer, parse, sources
from train.graders.grading import Graded
from train.graders.hosts import MOST_BROKEN, ForkBroke, WorkerBroke
from train.graders.templates import Sample
from weights.format.foreign_json import is_deeper

EVAL_RUNS = "eval_runs"
WINDOW_S = 24 * 3600.0
AT_ONCE = 64
"""Items that are asked for, or wait for a place, at once."""
ITEM_BYTES = 256
"""Bytes that an item takes in addition to its texts: 10,000 items of 11 bytes are 3 MB on the disk."""
_CHUNK = 200
"""Items that are checked at once."""
_ERROR_CHARACTERS = 2000
_SOURCE: TypeAdapter[Jsonl | Sampled] = TypeAdapter(Jsonl | Sampled)


@dataclass
class Answered:
    """An item of the data. error: empty, or the reason for a missing sample. answers: of the model. judged: of each
    grader. results: of each grader, once it is graded."""

    place: int
    item: dict[str, Any]
    sample: Sample
    sample_shown: dict[str, Any]
    error: str
    answers: list[ModelAnswer]
    judged: list[Judged]
    results: list[dict[str, Any]] = field(default_factory=list)

    def row(self, run_id: str) -> EvalItemRow:
        status = "pass" if all(one["passed"] for one in self.results) else "fail"
        if self.error or any("error" in one for one in self.results):
            status = "error"
        made = new_id("outputitem_"), run_id, self.place, time.time()
        return EvalItemRow(*made, status, self.item, self.sample_shown, self.results)


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
    context.quotas.check(caller, begins=True)
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
        bytes=len(orjson.dumps(data_source)),
    )
    evals.insert_run(context.db, row)
    context.tasks.start(EVAL_RUNS, row.id, row.key_id)
    return row


class EvalRunner:
    def __init__(self, context: ControllerContext, grading: Grading):
        self._context, self._db, self._grading = context, context.db, grading
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

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = evals.find_run(self._db, task.id)
        of = evals.find(self._db, row.eval_id, viewer=None) if row is not None else None
        if row is None or of is None or row.finished:
            return
        source = await asyncio.to_thread(_SOURCE.validate_python, row.data_source)
        try:
            graders = [parse(criterion) for criterion in of.criteria]
            async with asyncio.timeout(row.created_s + WINDOW_S - time.time()):
                if row.status == "queued":
                    await self._check_data(row, of, source)
                # Code may take minutes for a sample: jobs grade in between, and no call gives up the rest of it.
                together = MOST_BROKEN if any(map(sources, graders)) else AT_ONCE
                async with aclosing(finished(self._unjudged(row, source, graders), AT_ONCE)) as groups:
                    async for answered in groups:
                        for first in range(0, len(answered), together):
                            items = answered[first : first + together]
                            await self._grade(row, graders, items)
                            rows = [item.row(row.id) for item in items]
                            row = _counted(row, items, rows)
                            await to_thread.run_sync(self._store, row, rows)
        except InvalidGrader as error:  # the box may have become stricter since the eval was made
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
                kept, now_s = shapes.without_items(row.data_source), time.time()
                size = row.bytes - len(orjson.dumps(row.data_source)) + len(orjson.dumps(kept))
                changes = {"status": status, "error": error, "ended_s": now_s, "data_source": kept, "bytes": size}
                evals.update_run(self._db, run_id, **changes)

    def _check_bytes(self, row: EvalRunRow, more_bytes: int = 0) -> None:
        try:
            self._context.quotas.check(caller_of(self._db, row.key_id), more_bytes)
        except ApiError as error:
            raise TaskFailed(error.code or "limit_reached", error.message) from None

    # --- the data

    async def _check_data(self, row: EvalRunRow, of: EvalRow, source: Jsonl | Sampled) -> None:
        """Check all items by the schema, some at a time: as objects, a whole file takes 20 times its size. Raises
        TaskFailed."""
        total, size, found = 0, 0, self._entries(row, source.source)
        while chunk := await asyncio.to_thread(lambda: list(islice(found, _CHUNK))):
            size += sum(length + ITEM_BYTES for _, length in chunk)
            self._check_bytes(row, size)
            try:
                items = [entry.item for entry, _ in chunk]
                refused = await self._context.graders.refused_items(row.owner, of.item_schema, items)
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

    def _entries(self, row: EvalRunRow, source: FileContent | FileId) -> Iterator[tuple[Entry, int]]:
        """Raises TaskFailed, also while they are read."""
        if isinstance(source, FileContent):
            return ((entry, len(entry.model_dump_json())) for entry in source.content)
        file = file_rows.find(self._db, source.id, viewer=caller_of(self._db, row.key_id).viewer)
        if file is None:
            raise TaskFailed("file_not_found", f"The file {source.id} was deleted.")
        if file.bytes > shapes.MAX_DATA_BYTES:
            most = shapes.MAX_DATA_BYTES
            raise TaskFailed("file_too_large", f"The file has {file.bytes} bytes; a run reads {most} at most.")
        return entries(self._context.files_dir / source.id)

    # --- judging

    def _unjudged(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader]
    ) -> Iterator[Coroutine[Any, Any, Answered]]:
        """Make the sample of each item that has no row, with the answers of judges. Raises TaskFailed."""
        have = evals.passed(self._db, row.id)
        for place, (entry, _) in enumerate(self._entries(row, source.source)):
            if place % AT_ONCE == 0:
                self._check_bytes(row)
            if place not in have:
                yield self._sampled(row, source, graders, place, entry)

    async def _sampled(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader], place: int, entry: Entry
    ) -> Answered:
        item = entry.item
        body: dict[str, Any] = {"messages": []}
        if isinstance(source, Sampled):
            try:
                body = await asyncio.to_thread(shapes.body_of, source, item)
            except GradingFailed as error:
                answer = ModelAnswer(model=source.model, error=str(error))
            else:
                answer = await self._grading.chat(row.key_id, body)
            sample, answers = Sample(answer.text, answer.tools), [answer]
        else:
            sample, answers = sample_of(entry.sample), []
            answer = ModelAnswer(sample.output_text, row.model)
        asked = () if answer.error else graders
        judged = [await self._grading.ask_judges(row.key_id, grader, sample, item) for grader in asked]
        return Answered(place, item, sample, sample_object(body, [answer]), answer.error, answers, judged)

    async def _grade(self, row: EvalRunRow, graders: list[Grader], items: list[Answered]) -> None:
        sampled = [item for item in items if not item.error]
        for number, grader in enumerate(graders if sampled else ()):
            judged = [item.judged[number] for item in sampled]
            samples = [(item.sample, item.item) for item in sampled]
            graded = await self._grading.grade(row.key_id, grader, samples, judged)
            for item, reward, answers in zip(sampled, graded, judged, strict=True):
                item.results.append(_result(grader, reward, list(answers.values())))

    def _store(self, row: EvalRunRow, items: list[EvalItemRow]) -> None:
        """Store judged items together with the run's counters, unless it was cancelled meanwhile."""
        with self._db.transaction():
            if evals.unfinished_ids(self._db, row.id):
                evals.insert_items(self._db, items)
                evals.update_run(self._db, row.id, **columns(row, "results usage counts bytes"))


def _counted(row: EvalRunRow, items: list[Answered], rows: list[EvalItemRow]) -> EvalRunRow:
    """The run with these items in its counters."""
    results, counts, size = {name: Counter(of) for name, of in row.results.items()}, Counter(row.counts), row.bytes
    usage = {model: Counter(of) for model, of in row.usage.items()}
    for item in items:
        for answer in (*item.answers, *(answer for judged in item.judged for _, answer in judged.values())):
            if not answer.error:
                counters = columns(answer, "prompt_tokens completion_tokens cached_tokens")
                usage.setdefault(answer.model, Counter()).update(invocation_count=1, **counters)
        for result in item.results:
            sums = results.setdefault(result["name"], Counter())
            sums["passed" if result["passed"] else "failed"] += 1
            if "error" not in result:
                sums.update(rewarded=1, reward=result["score"])
    for stored in rows:
        counts[stored.status] += 1
        size += ITEM_BYTES + len(orjson.dumps([stored.item, stored.sample, stored.results]))
    return replace(row, results=results, usage=usage, counts=counts, bytes=size)


def _result(grader: Grader, graded: Graded, judged: list[tuple[dict[str, Any], ModelAnswer]]) -> dict[str, Any]:
    result = {"name": grader.name, "type": grader.type, "passed": graded.passed, "score": graded.reward}
    if judged:
        result["sample"] = sample_object(judged[0][0], [answer for _, answer in judged])
    if graded.errors:
        kind = "reason" if graded.errors.of_the_answer else "error"
        result[kind] = "; ".join(graded.messages)[:_ERROR_CHARACTERS]
    return result


def entries(path: Path) -> Iterator[tuple[Entry, int]]:
    """Entries of a JSONL file, each with its bytes. Raises TaskFailed."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, shapes.MAX_ENTRY_BYTES + 1), b""), 1):
                if number > shapes.MAX_ITEMS:
                    raise TaskFailed("invalid_data", f"The file has more than {shapes.MAX_ITEMS} lines.")
                if len(line) > shapes.MAX_ENTRY_BYTES:
                    raise TaskFailed("invalid_data", f"Line {number} is longer than {shapes.MAX_ENTRY_BYTES} bytes.")
                if text := line.removeprefix(MARK).strip():
                    yield _entry(number, text), len(text)
    except OSError as error:
        raise TaskFailed("file_unreadable", f"The file could not be read: {error}") from None


def _entry(number: int, line: bytes) -> Entry:
    """Raises TaskFailed."""
    try:
        # The parser of requests reads it: pydantic's accepts NaN, and integers that no engine takes.
        entry = Entry.model_validate(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise TaskFailed("invalid_data", f"Line {number} is not JSON: {error}.") from None
    except ValidationError as error:
        first = first_error(error.errors(include_url=False, include_input=False))
        where = ".".join(map(str, first["loc"])) or "the line"
        why = f'is not {{"item": {{...}}, "sample": {{...}}}}: {where}: {first["msg"]}'
        raise TaskFailed("invalid_data", f"Line {number} {why}.") from None
    if is_deeper(entry.item, MAX_DEPTH) or is_deeper(entry.sample, MAX_DEPTH):
        raise TaskFailed("invalid_data", f"Line {number} is nested deeper than {MAX_DEPTH} levels.")
    return entry
