"""/v1/batches (https://platform.openai.com/docs/api-reference/batch), and the work of one batch: validating, in
progress, finalizing, and one of four final states.

State that must outlive the controller is in the batch's row (its status) and in its answers on disk: `<folder>/<batch
id>.output.jsonl` and `.error.jsonl` are appended to and synced before a line counts as answered. A crash can leave one
torn line at the end, which opening cuts off; when the batch ends, they become files of the box. After a restart the
batch resumes from there and repeats at most the lines that were in flight.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import orjson
from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from appliance.controller.access.limits import ANSWERS_PER_INPUT
from appliance.controller.access.model_access import caller_of, usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, finished
from appliance.controller.files import storage
from appliance.controller.files.storage import FILES, ExpiresAfter
from appliance.controller.http.resource import Resource, new_row, object_of, part
from appliance.controller.http.routers import Metadata, StrictBody, json_of
from appliance.controller.interfaces.errors import ApiError, BadRequest, Conflict, message_of, shown
from appliance.controller.interfaces.principal import INFERENCE, Caller
from appliance.store import files as file_rows
from appliance.store.database import Database
from appliance.store.rows import BATCHES as ROWS
from appliance.store.rows import BatchRow, BatchStatus, FileRow, TaskRow, columns, new_id
from train.data.records import MARK, foreign_file

T = TypeVar("T")
TASKS = "batches"
WINDOW_S = 24 * 3600.0
AT_ONCE = 256
"""Lines of a batch whose requests run, or wait for a slot of an engine, at once."""
DISK_POLL_S = 2.0
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
CONVERSING = ("/v1/chat/completions", "/v1/responses")
"""Those whose answers a client may have stored."""
_MAX_ERRORS = 100
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
_RECORDED = ("endpoint", "input_file_id", "status")
BATCHES = Resource("batch", "/v1/batches", (INFERENCE,), ROWS.find_visible, fields=_RECORDED)


class BatchCreate(StrictBody):
    completion_window: Literal["24h"]
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def routes(context: ControllerContext) -> APIRouter:
    db, view = context.db, partial(_view, context)
    router = BATCHES.serve(context, view, ROWS.page_visible, part(20, most=100))

    @router.post("")
    async def create(body: BatchCreate, request: Request, caller: Caller) -> dict[str, Any]:
        def make() -> BatchRow:
            file = FILES.known(db, body.input_file_id, caller, "input_file_id")
            if file.purpose != "batch":
                message = f"The file {file.id} has the purpose {file.purpose!r}; a batch reads one of purpose 'batch'."
                raise BadRequest(message, "input_file_id", "invalid_file_purpose")
            context.quotas.check(caller, ANSWERS_PER_INPUT * file.bytes, begins=True)
            now_s = time.time()
            row = new_row(
                BatchRow,
                "batch_",
                caller,
                **columns(body, "endpoint input_file_id metadata"),
                created_s=now_s,
                expires_s=now_s + WINDOW_S,
                output_keep_s=body.output_expires_after.seconds if body.output_expires_after else None,
            )
            context.tasks.start(TASKS, row.id, row.key_id)
            return ROWS.insert(db, row)

        return view(BATCHES.once(request, caller, await request.body(), make))

    @router.post("/{batch_id}/cancel")
    async def cancel(batch_id: str, caller: Caller) -> dict[str, Any]:
        row = BATCHES.known(db, batch_id, caller)
        if row.status in ("validating", "in_progress"):
            set_status(db, row, "cancelling")
            context.tasks.restart(TASKS, row.id)
        elif row.status not in ("cancelling", "cancelled"):
            raise Conflict(f"Cannot cancel a batch with status '{row.status}'.", "batch_id", "batch_not_cancellable")
        return view(BATCHES.known(db, batch_id, caller))

    return router


def _view(context: ControllerContext, row: BatchRow) -> dict[str, Any]:
    """Return OpenAI's object, plus `waiting_for`: why an unfinished batch makes no progress now, None if it does."""
    waits, tokens = "", row.usage or {}
    if row.status == "in_progress":
        waits = context.asking.why(row.key_id, row.model or "")
        waits = waits if context.quotas.disk.room_bytes() > 0 else "the disk of the box is short of space"
    usage = {
        **{name: tokens.get(name, 0) for name in ("input_tokens", "output_tokens", "total_tokens")},
        "input_tokens_details": {"cached_tokens": tokens.get("cached_tokens", 0)},
        "output_tokens_details": {"reasoning_tokens": tokens.get("reasoning_tokens", 0)},
    }
    return object_of(
        row,
        "batch",
        "endpoint model input_file_id status output_file_id error_file_id metadata",
        usage=None if row.usage is None else usage,
        errors=None if row.errors is None else {"object": "list", "data": row.errors},
        completion_window="24h",
        **{f"{name}_at": int(row.moments[name]) if name in row.moments else None for name in _MOMENTS},
        request_counts=columns(row, "total completed failed"),
        waiting_for=waits or None,
    )


# --- the work


def set_status(db: Database, row: BatchRow, status: BatchStatus, **changes: Any) -> None:
    ROWS.update(db, row.id, status=status, moments={status: time.time(), **row.moments}, **changes)


def kind(context: ControllerContext) -> Kind:
    """Return the kind of task for batches."""

    async def opened(task: TaskRow) -> Batch | None:
        row = ROWS.find(context.db, task.id)
        if row is None or row.finished:
            return None
        return Batch(context, row, await _run_to_completion(partial(Answers, context.batches_dir, row.id)))

    async def run(task: TaskRow) -> None:
        if (batch := await opened(task)) is not None:
            await batch.run()

    async def fail(task: TaskRow, error: TaskFailed) -> None:
        errors = [{"code": error.code, "line": None, "message": str(error), "param": None}]
        if (batch := await opened(task)) is not None:
            await batch.end("failed", errors=errors)

    return Kind(TASKS, run, fail, "batch")


class Batch:
    """An unfinished batch with its answers so far."""

    def __init__(self, context: ControllerContext, row: BatchRow, answers: Answers):
        self._context, self._db, self._row, self._answers = context, context.db, row, answers

    async def run(self) -> None:
        """Run the batch to its end. Raises OSError, TaskFailed."""
        row = self._row
        if row.status in ("finalizing", "cancelling"):
            await self.end("completed" if row.status == "finalizing" else "cancelled")
            return
        # Ignores the expiry: the file was valid when the batch was created.
        if file_rows.find(self._db, row.input_file_id, viewer=None, now_s=0) is None:
            raise TaskFailed("file_unreadable", f"The file {row.input_file_id} was deleted.")
        path, config = self._context.files_dir / row.input_file_id, self._context.config
        read = partial(read_lines, path, row.endpoint, config.batch_max_lines, config.json_body_bytes)
        lines = await to_thread.run_sync(read, limiter=self._context.file_threads)
        if row.status == "validating":
            if not lines.errors:
                try:
                    usable_model(self._db, caller_of(self._db, row.key_id), lines.model or "")
                except ApiError as error:
                    lines.add_error(error.code or "", error.message, 1, "body.model")
            ROWS.update(self._db, row.id, total=len(lines.requests))
        if lines.errors:  # also ends a batch in progress, if validation has become stricter since its start
            await self.end("failed", errors=lines.errors)
            return
        row = ROWS.get(self._db, row.id)
        if row.status == "validating":  # a batch that was cancelled meanwhile runs again
            set_status(self._db, row, "in_progress", model=lines.model)
        end: BatchStatus = "completed"
        with open(path, "rb") as source:

            def unanswered() -> list[str]:
                return [custom_id for custom_id in lines.requests if custom_id not in self._answers.custom_ids]

            requests = (self._ask(name, lines.requests[name], lines.model or "", source) for name in unanswered())
            try:
                async with (
                    asyncio.timeout(row.expires_s - time.time()),
                    aclosing(finished(requests, AT_ONCE)) as groups,
                ):
                    async for answered in groups:
                        await self._store(answered)
            except TimeoutError:
                end = "expired"
                await self._store([{**_line(name), "response": None, "error": _EXPIRED} for name in unanswered()])
        await self.end(end)

    async def _ask(self, custom_id: str, span: tuple[int, int], model: str, source: BinaryIO) -> dict[str, Any]:
        """Send one line of the input file; return the line of the output. span: the line's offset and size in bytes."""
        url, request_id = self._row.endpoint, new_id("req_")

        async def body() -> dict[str, Any]:
            source.seek(span[0])
            request = orjson.loads(source.read(span[1]))["body"]
            # Not stored, because no client knows the ids of these answers.
            return {**request, "store": False} if url in CONVERSING else request

        while self._context.quotas.disk.room_bytes() <= 0:
            await asyncio.sleep(DISK_POLL_S)
        answer = await self._context.asking.ask(self._row.key_id, model, url, body, request_id=request_id)
        response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        return {**_line(custom_id), "error": None, "response": response}

    def _file(self, path: Path, name: str) -> FileRow:
        row = self._row
        filename, sha256 = f"{row.id}_{name}.jsonl", storage.digest_of(path)
        return storage.row_of(path, filename, "batch_output", sha256, row.owner, row.key_id, row.output_keep_s)

    async def _store(self, lines: list[dict[str, Any]]) -> None:
        def write() -> None:
            self._answers.append(lines)
            ROWS.update(self._db, self._row.id, **columns(self._answers, "completed failed"))

        await _run_to_completion(write)

    async def end(self, status: BatchStatus, **changes: Any) -> None:
        """Make files of the answers and end the batch. Raises OSError."""
        row, answers = ROWS.get(self._db, self._row.id), self._answers
        if status == "completed" and row.status == "cancelling":
            status = "cancelled"  # cancellation arrived together with the last answer
        if status == "completed":
            set_status(self._db, row, "finalizing")
        files = {
            name: await to_thread.run_sync(self._file, path, name)
            for name, path in answers.paths.items()
            if path.stat().st_size
        }
        with storage.growing(self._context.files_dir, *(file.id for file in files.values())) as places:
            for name, place in zip(files, places, strict=True):
                os.link(answers.paths[name], place)
            with self._db.transaction():
                for file, place in zip(files.values(), places, strict=True):
                    storage.keep(self._context, file, place)
                counted = columns(answers, "completed failed") | {"usage": answers.tokens}
                ids = {f"{name}_file_id": file.id for name, file in files.items()}
                set_status(self._db, ROWS.get(self._db, row.id), status, **counted, **ids, **changes)
        for path in answers.paths.values():
            path.unlink()


async def _run_to_completion(work: Callable[[], T]) -> T:
    """Run work on a file in a thread. A cancelled caller waits for its end, so that no two threads write the file."""
    running = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])  # ignore its result: an error would hide the cancellation
        raise


def _line(custom_id: str) -> dict[str, Any]:
    return {"id": new_id("batch_req_"), "custom_id": custom_id}


# --- the answers on disk


_TOKENS = ("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "reasoning_tokens")
_RENAMED = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
"""Counters of chat completions."""


class Answers:
    """The answered lines of a batch, in its files on disk. Create it and call `append` on a thread; create it again
    after an OSError. tokens: usage of lines that succeeded. paths: {"output": path, "error": path}. Raises OSError."""

    def __init__(self, folder: Path, batch_id: str):
        self.paths = {name: folder / f"{batch_id}.{name}.jsonl" for name in ("output", "error")}
        self.custom_ids: set[str] = set()
        self.completed = self.failed = 0
        self.tokens = Counter[str]()
        for path in self.paths.values():
            path.touch(0o600)
            with open(path, "rb+") as file:
                whole = 0
                for line in file:
                    if line.endswith(b"\n"):  # the last line is not torn
                        self._count(orjson.loads(line))
                        whole += len(line)
                file.truncate(whole)

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Append answers, each {"id", "custom_id", "response", "error"}; they are synced on return. Raises OSError."""
        for name, path in self.paths.items():
            if group := [line for line in lines if _is_good(line) == (name == "output")]:
                with open(path, "ab") as file:
                    file.writelines(orjson.dumps(line) + b"\n" for line in group)
                    file.flush()
                    os.fsync(file.fileno())
                for line in group:
                    self._count(line)

    def _count(self, line: dict[str, Any]) -> None:
        self.custom_ids.add(line["custom_id"])
        if not _is_good(line):
            self.failed += 1
            return
        self.completed += 1
        self.tokens.update(_usage_of(line["response"]["body"]))


def _usage_of(body: Any) -> dict[str, int]:
    """Return the token counts of an answer under the names of /v1/responses."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return {}
    details = [usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion", "input", "output")]
    counted = {_RENAMED.get(name, name): tokens for part in (usage, *details) for name, tokens in part.items()}
    return {name: counted.get(name) or 0 for name in _TOKENS}


def _is_good(line: dict[str, Any]) -> bool:
    response = line["response"]
    return response is not None and response["status_code"] == 200


# --- the input file, checked line by line before anything runs
#
# A line is {"custom_id": text, "method": "POST", "url": the batch's endpoint, "body": {"model": …, …}}
# (https://platform.openai.com/docs/api-reference/batch/request-input). Apart from its model, a body is checked when the
# line runs, as for any request: then one line fails and the others continue.


@dataclass
class Lines:
    """Offset and size in bytes of each request, by its custom_id and in file order; the one model they use; and the
    errors (at most 100 {"code", "line", "message", "param"}; lines count from 1)."""

    requests: dict[str, tuple[int, int]] = field(default_factory=dict)
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add_error(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        self.errors.append({"code": code, "line": line, "message": message, "param": param})


def read_lines(path: Path, endpoint: str, max_lines: int, line_bytes: int) -> Lines:
    """Check the file, up to a line that is too long: a file may be one line of 8 GiB. Raises OSError."""
    lines, offset = Lines(), 0
    with open(path, "rb") as source:
        if foreign := foreign_file(source):
            kind_of_file, command = foreign[0], foreign[1].replace("train.jsonl", "requests.jsonl")
            message = f"The file is {kind_of_file}; expected JSON lines in UTF-8: {command}."
            lines.add_error("invalid_json_line", message, 1)
            return lines
        for number, raw in enumerate(iter(partial(source.readline, line_bytes + 1), b""), 1):
            if len(raw) > line_bytes:
                lines.add_error("line_too_long", f"The line has more than {line_bytes} bytes.", number)
                return lines
            text = raw.removeprefix(MARK)  # the byte order mark of files from Windows, also within joined files
            if text.strip():
                if len(lines.requests) == max_lines:
                    lines.add_error("too_many_requests", f"The file holds more than {max_lines} requests.", number)
                    return lines
                try:
                    custom_id, lines.model = _checked(text, endpoint, lines)
                    lines.requests[custom_id] = offset + len(raw) - len(text), len(text)
                except TaskFailed as error:
                    lines.add_error(error.code, str(error), number, error.param)
                if len(lines.errors) >= _MAX_ERRORS:
                    return lines
            offset += len(raw)
    if not lines.requests and not lines.errors:
        lines.add_error("empty_file", "The input file holds no requests.")
    return lines


class _Request(BaseModel):
    model_config = ConfigDict(strict=True)

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def _checked(raw: bytes, endpoint: str, before: Lines) -> tuple[str, str]:
    """Check a line; return (custom_id, model). Raises TaskFailed."""
    data, why = json_of(raw)
    if not isinstance(data, dict):
        raise TaskFailed("invalid_json_line", f"This line is not a JSON object: {why or 'it is another value'}.")
    try:
        line = _Request.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"]))
        message, code = message_of(param, dict(first))
        raise TaskFailed(code, message, param) from error
    if line.url != endpoint:
        message = f"url is {shown(line.url)}; the batch was created for {endpoint}."
        raise TaskFailed("mismatched_endpoint", message, "url")
    model = line.body.get("model")
    if not isinstance(model, str) or not model:
        raise TaskFailed("missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model")
    for name in ("stream", "background"):
        if line.body.get(name):
            raise TaskFailed("unsupported_parameter", f"Requests of a batch have no `{name}`.", f"body.{name}")
    if line.custom_id in before.requests:
        raise TaskFailed("duplicate_custom_id", f"The custom_id {shown(line.custom_id)} is used twice.", "custom_id")
    if before.model not in (None, model):
        message = f"All requests of a batch ask one model: {shown(model)} was given after {shown(before.model)}."
        raise TaskFailed("mismatched_model", message, "body.model")
    return line.custom_id, model
