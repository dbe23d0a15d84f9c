"""Runs evaluations, some items at a time: for each item first a sample, if a model is to make one, then the graders.

What must outlive the controller is in the rows: an item is queued until it is judged, and the counters of a run change
in the transaction that judges its items. After a restart the rest continues. The runs of one owner wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from appliance.controller.access.model_access import caller_of, viewer_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, finished, until_room
from appliance.controller.evals import requests
from appliance.controller.evals.requests import Entry, FileContent, FileId, Jsonl, Sampled, sample_of
from appliance.controller.evals.views import judges_sample
from appliance.controller.grading.given import MAX_DEPTH
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.http.strict_body import meant
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.store.ids import new_id
from appliance.store.objects import evals
from appliance.store.objects import files as file_rows
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow, TaskRow
from train.data.lines import MARK
from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader
from train.graders.graders import Grader, Python, judges, leaves, parse
from train.graders.grading import Graded, ModelAnswer
from train.graders.grading import requests as questions
from train.graders.hosts import ForkBroke, GraderHosts, WorkerBroke
from train.graders.templates import Sample
from train.graders.worker import MOST_TIMEOUTS
from weights.format.foreign_json import is_deeper

EVAL_RUNS = "eval_runs"
WINDOW_S = 24 * 3600.0
AT_ONCE = 64
"""Items that are asked for, or wait for a place, at once."""
ITEM_BYTES = 256
"""Bytes that an item takes in addition to its texts: 10,000 items of 11 bytes are 3 MB on the disk."""
_CHUNK = 200
"""Items that are checked and stored at once."""
_ERROR_CHARACTERS = 2000
_SOURCE: TypeAdapter[Jsonl | Sampled] = TypeAdapter(Jsonl | Sampled)


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


class _Over(Exception):
    """The run was cancelled or deleted meanwhile."""


@dataclass
class _Answered:
    """An item with the answers of models. sample: what is graded, None: there is none. made: the item's `sample`
    column, None: no model was asked. asked: by grader, body and answer by the name of the judge. results: of the
    graders."""

    item: EvalItemRow
    sample: Sample | None
    made: dict[str, Any] | None = None
    asked: list[dict[str, tuple[dict[str, Any], ModelAnswer]]] = field(default_factory=list)
    usage: list[ModelAnswer] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> str:
        if self.sample is None or any("error" in one for one in self.results):
            return "error"
        return "pass" if all(one["passed"] for one in self.results) else "fail"


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
        return "" if row.status == "queued" or not row.model else self._context.asking.why(row.key_id, row.model)

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
                    try:
                        await self._prepare(row, of, source)
                    except TaskFailed:  # nobody sees its items, and they would count for its owner
                        await asyncio.to_thread(evals.delete_items, self._db, row.id)
                        self._change(row.id, total=0, bytes=row.bytes)
                        raise
                await self._judge(replace(row, data_source={}), source, graders)
        except _Over:
            return
        except InvalidGrader as error:  # the box may have become stricter since the eval was made
            raise TaskFailed("invalid_grader", f"A criterion of the eval is refused: {error}.") from None
        except TimeoutError:
            raise TaskFailed("expired", f"The run did not end within {WINDOW_S / 3600:.0f} hours.") from None
        self._end(row.id, "completed", None)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        self._end(task.id, "failed", {"code": error.code, "message": str(error)})

    def _check_bytes(self, row: EvalRunRow) -> None:
        try:
            self._context.quotas.check(caller_of(self._db, row.key_id))
        except ApiError as error:
            raise TaskFailed(error.code or "limit_reached", error.message) from None

    def _end(self, run_id: str, status: str, error: dict[str, str] | None) -> None:
        with self._db.transaction():
            row = evals.find_run(self._db, run_id)
            if row is not None and not row.finished:
                kept, now_s = requests.without_items(row.data_source), time.time()
                evals.update_run(self._db, run_id, status=status, error=error, ended_s=now_s, data_source=kept)

    # --- the data

    async def _prepare(self, row: EvalRunRow, of: EvalRow, source: Jsonl | Sampled) -> None:
        """Put its items into the store, checked by the schema, some at a time: as objects, a whole file takes 20 times
        its size. Raises TaskFailed, _Over."""
        await asyncio.to_thread(evals.delete_items, self._db, row.id)  # of a preparation that was cut short
        kept, entries = requests.without_items(row.data_source), self._entries(row, source.source)
        place, size = 0, len(orjson.dumps(kept))
        while chunk := await asyncio.to_thread(lambda: list(islice(entries, _CHUNK))):
            self._check_bytes(row)
            await self._check_items(row, of, place, [entry.item for entry, _ in chunk])
            now_s = time.time()
            items = [
                EvalItemRow(new_id("outputitem_"), row.id, at, now_s, item=entry.item, sample=entry.sample)
                for at, (entry, _) in enumerate(chunk, place)
            ]
            place, size = place + len(items), size + sum(length + ITEM_BYTES for _, length in chunk)
            await asyncio.to_thread(self._change, row.id, items, total=place, bytes=size)
        if not place:
            raise TaskFailed("invalid_data", "The data has no items.")
        self._change(row.id, status="in_progress", data_source=kept)
        if isinstance(source.source, FileContent):
            source.source.content.clear()

    def _change(self, run_id: str, items: Iterable[EvalItemRow] = (), **changes: Any) -> None:
        """Raises _Over."""
        with self._db.transaction():
            now = evals.run_in_short(self._db, run_id)
            if now is None or now.finished:
                raise _Over
            evals.insert_items(self._db, items)
            evals.update_run(self._db, run_id, **changes)

    async def _check_items(self, row: EvalRunRow, of: EvalRow, place: int, items: list[dict[str, Any]]) -> None:
        """place: of the first of them. Raises TaskFailed."""
        try:
            refused = await self._hosts.refused_items(row.owner, of.item_schema, items)
        except WorkerBroke as error:
            code = "invalid_data" if isinstance(error, ForkBroke) else "server_error"
            raise TaskFailed(code, f"The items could not be checked by the eval's item_schema: {error}") from None
        if refused:
            faults = "; ".join(f"line {at + place + 1}: {why}" if at >= 0 else why for at, why in refused)
            raise TaskFailed("invalid_data", f"Items do not follow the eval's item_schema: {faults}"[:4000])

    def _entries(self, row: EvalRunRow, source: FileContent | FileId) -> Iterator[tuple[Entry, int]]:
        """Raises TaskFailed, also while they are read."""
        if isinstance(source, FileContent):
            return ((entry, len(entry.model_dump_json())) for entry in source.content)
        viewer = viewer_of(self._db, row.key_id) if row.key_id else None
        file = file_rows.find(self._db, source.id, viewer=viewer, now_s=time.time())
        if file is None:
            raise TaskFailed("file_not_found", f"The file {source.id} was deleted.")
        if file.bytes > requests.MAX_DATA_BYTES:
            most = requests.MAX_DATA_BYTES
            raise TaskFailed("file_too_large", f"The file has {file.bytes} bytes; a run reads {most} at most.")
        return entries(self._context.files_dir / source.id)

    # --- judging

    async def _judge(self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader]) -> None:
        """Raises TaskFailed, _Over."""
        asked = (self._answered(row, source, graders, item) for item in self._queued(row))
        async with aclosing(finished(asked, AT_ONCE)) as groups:
            async for answered in groups:
                await self._grade(row.owner, graders, [one for one in answered if one.sample is not None])
                await until_room(partial(asyncio.to_thread, self._store, row.id, answered))

    def _queued(self, row: EvalRunRow) -> Iterator[EvalItemRow]:
        """Raises TaskFailed."""
        place = -1
        while items := evals.queued_items(self._db, row.id, AT_ONCE, place):
            self._check_bytes(row)
            yield from items
            place = items[-1].place

    async def _answered(
        self, row: EvalRunRow, source: Jsonl | Sampled, graders: list[Grader], item: EvalItemRow
    ) -> _Answered:
        """The item with its sample, and what judges say of it."""
        ask = partial(self._answers.ask, row.key_id, within_s=WINDOW_S)
        found = _Answered(item, sample_of(item.sample))
        if isinstance(source, Sampled):
            try:
                body = await asyncio.to_thread(requests.body_of, source, item.item)
            except GradingFailed as error:
                body, answer = {"messages": []}, ModelAnswer(model=source.model, error=str(error))
            else:
                answer = await ask(body)
            found.made = {"input": body["messages"], "answer": asdict(answer)}
            found.sample = None if answer.error else Sample(answer.text, answer.tools)
            found.usage.append(answer)
        if found.sample is None:
            return found
        for grader in graders:
            bodies = await asyncio.to_thread(questions, grader, found.sample, item.item) if judges(grader) else {}
            answers = await asyncio.gather(*map(ask, bodies.values()))
            found.asked.append(dict(zip(bodies, zip(bodies.values(), answers, strict=True), strict=True)))
            found.usage += answers
        return found

    async def _grade(self, owner: str, graders: list[Grader], answered: list[_Answered]) -> None:
        """Add the results. Many items are given to a grader at once: each call takes a process of its own."""
        for place, grader in enumerate(graders):
            # Code may take minutes for an item: jobs grade in between, and no call gives the rest of its items up.
            has_code = any(isinstance(leaf, Python) for leaf in leaves(grader).values())
            left = iter(answered)
            while part := list(islice(left, MOST_TIMEOUTS if has_code else AT_ONCE)):
                samples = [(one.sample or Sample(""), one.item.item) for one in part]
                given = [{name: answer for name, (_, answer) in one.asked[place].items()} for one in part]
                try:
                    graded = await self._hosts.grade(owner, grader, samples, given)
                except WorkerBroke as error:
                    broke = Graded(0.0, False, errors=GradingErrors(other_error=True), messages=[str(error)])
                    graded = [broke] * len(part)
                for one, of in zip(part, graded, strict=True):
                    one.results.append(_result(grader, of, list(one.asked[place].values())))

    def _store(self, run_id: str, answered: list[_Answered]) -> None:
        """Store judged items together with the run's counters. Raises _Over."""
        with self._db.transaction():
            row = evals.run_in_short(self._db, run_id)
            if row is None or row.finished:
                raise _Over
            results = {name: Counter(of) for name, of in row.results.items()}
            usage = {model: Counter(of) for model, of in row.usage.items()}
            counts, size = Counter(row.counts), row.bytes
            for one in answered:
                for answer in one.usage:
                    if not answer.error:
                        usage.setdefault(answer.model, Counter()).update(
                            invocation_count=1,
                            prompt_tokens=answer.prompt_tokens,
                            completion_tokens=answer.completion_tokens,
                            cached_tokens=answer.cached_tokens,
                        )
                for result in one.results:
                    sums = results.setdefault(result["name"], Counter())
                    sums["passed" if result["passed"] else "failed"] += 1
                    if "error" not in result:
                        sums["rewarded"] += 1
                        sums["reward"] += result["score"]
                counts[one.status] += 1
                size += len(json.dumps([one.made, one.results]))
                sample = {} if one.made is None else {"sample": one.made}
                evals.update_item(self._db, one.item.id, status=one.status, results=one.results, **sample)
            evals.update_run(self._db, run_id, results=results, usage=usage, counts=counts, bytes=size)


def _result(grader: Grader, graded: Graded, asked: list[tuple[dict[str, Any], ModelAnswer]]) -> dict[str, Any]:
    result = {"name": grader.name, "type": grader.type, "passed": graded.passed, "score": graded.reward}
    if asked:
        result["sample"] = judges_sample(asked[0][0], [answer for _, answer in asked])
    if graded.errors:
        kind = "reason" if graded.errors.of_the_answer else "error"
        result[kind] = "; ".join(graded.messages)[:_ERROR_CHARACTERS]
    return result


def entries(path: Path) -> Iterator[tuple[Entry, int]]:
    """Entries of a JSONL file, each with its bytes. Raises TaskFailed."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, requests.MAX_ENTRY_BYTES + 1), b""), 1):
                if number > requests.MAX_ITEMS:
                    raise TaskFailed("invalid_data", f"The file has more than {requests.MAX_ITEMS} lines.")
                if len(line) > requests.MAX_ENTRY_BYTES:
                    raise TaskFailed("invalid_data", f"Line {number} is longer than {requests.MAX_ENTRY_BYTES} bytes.")
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
        first = meant(error.errors(include_url=False, include_input=False))
        where = ".".join(map(str, first["loc"])) or "the line"
        why = f'is not {{"item": {{...}}, "sample": {{...}}}}: {where}: {first["msg"]}'
        raise TaskFailed("invalid_data", f"Line {number} {why}.") from None
    if is_deeper(entry.item, MAX_DEPTH) or is_deeper(entry.sample, MAX_DEPTH):
        raise TaskFailed("invalid_data", f"Line {number} is nested deeper than {MAX_DEPTH} levels.")
    return entry
