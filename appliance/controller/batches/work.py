"""Runs one batch: validating, in progress, finalizing, and one of five final states.

State that must outlive the controller is in the batch's row (its status) and in its answers on disk (answers.py); after
a restart the batch resumes from there and repeats at most the lines that were in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from anyio import to_thread

from appliance.controller.access.model_access import viewer_of, why_no_chat
from appliance.controller.access.naming import resolve
from appliance.controller.batches import input_lines
from appliance.controller.batches.answers import Answers
from appliance.controller.batches.input_lines import CONVERSING, Line, Lines
from appliance.controller.bus.asking import Asker
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, finished, is_full, until_room
from appliance.controller.files import storage
from appliance.controller.interfaces.errors import shown
from appliance.store.ids import new_id
from appliance.store.objects import batches, models
from appliance.store.objects import files as file_rows
from appliance.store.records import canaries
from appliance.store.rows import BatchRow, FileRow, ModelRow, TaskRow

log = logging.getLogger("appliance.controller")

BATCHES = "batches"
AT_ONCE = 256
"""Lines of a batch that are asked, or wait for a place, at once."""
LOOK_EVERY_S = 2.0
_TASK_OF = {"/v1/embeddings": "embed"}
_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class Batches:
    """Runs batches as tasks."""

    def __init__(self, context: ControllerContext):
        self._context = context
        context.tasks.add(Kind(BATCHES, self.run, self.fail, "batch"))

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = batches.find(self._context.db, task.id, viewer=None)
        if row is None or row.finished:
            return
        try:
            async with self._opened(row) as work:
                await work.run()
        except OSError as error:
            if is_full(error):
                raise
            message = f"The files of the batch could not be read or written: {error}."
            raise TaskFailed("file_unreadable", message) from error

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        """Fail the batch, with files of the lines that were answered."""
        row = batches.find(self._context.db, task.id, viewer=None)
        if row is None or row.finished:
            return
        refused = [{"code": error.code, "line": None, "message": str(error), "param": None}]
        errors = error.errors if isinstance(error, _Refused) else refused
        try:
            async with self._opened(row) as work:
                await work.end("failed", errors=errors)
        except (OSError, ValueError) as second:  # of the files of its answers
            if is_full(second):
                raise
            log.error("the answers of %s cannot be read or kept: %s", task.id, second)
            batches.update(self._context.db, task.id, status="failed", failed_s=time.time(), errors=errors)

    def waiting_for(self, row: BatchRow) -> str | None:
        """Why it makes no progress now; None: it does, or is not in progress."""
        context = self._context
        if row.status != "in_progress":
            return None
        return context.quotas.disk.why_short() or context.asking.why(row.key_id, row.model or "") or None

    @contextlib.asynccontextmanager
    async def _opened(self, row: BatchRow) -> AsyncIterator[BatchWork]:
        answers = await to_thread.run_sync(Answers, self._context.batches_dir, row.id)
        try:
            yield BatchWork(self._context, row, answers)
        finally:
            await to_thread.run_sync(answers.close)


class BatchWork:
    def __init__(self, context: ControllerContext, row: BatchRow, answers: Answers):
        self._context, self._db, self._row, self.answers = context, context.db, row, answers

    async def run(self) -> None:
        """Raises OSError, TaskFailed."""
        row = self._row
        if row.status in ("finalizing", "cancelling"):
            await self.end("completed" if row.status == "finalizing" else "cancelled")
            return
        path = self._input_path(row)
        lines = await to_thread.run_sync(self._read, path, row, limiter=self._context.file_threads)
        if row.status == "validating":
            self._check_model(lines, row)
            batches.update(self._db, row.id, total=len(lines.requests))
        if lines.errors:  # of one in progress, too: the box may have become stricter since it was validated
            raise _Refused(lines.errors)
        if row.status == "validating" and not self._in_progress(lines.model):
            await self.end("cancelled")
            return
        end, model = "completed", lines.model or ""
        with self._context.asking.wanted(model), open(path, "rb") as source:
            try:
                async with asyncio.timeout(row.expires_s - time.time()):
                    await self._answer_lines(lines.requests, model, source)
            except TimeoutError:
                end = "expired"
                await self._append(self._expired(lines.requests))
        await self.end(end)

    def _in_progress(self, model: str | None) -> bool:
        """False: it was cancelled while its file was read."""
        with self._db.transaction():
            row = batches.find(self._db, self._row.id, viewer=None)
            if row is None or row.status != "validating":
                return False
            batches.update(self._db, row.id, status="in_progress", in_progress_s=time.time(), model=model)
            return True

    # --- validating

    def _input_path(self, row: BatchRow) -> Path:
        # Ignores the expiry: a file that was valid when the batch was created stays valid while its bytes are here.
        if file_rows.find(self._db, row.input_file_id, viewer=None, now_s=0) is None:
            raise TaskFailed("file_unreadable", f"The file {row.input_file_id} was deleted.")
        return self._context.files_dir / row.input_file_id

    def _read(self, path: Path, row: BatchRow) -> Lines:
        config = self._context.config
        return input_lines.read(path, row.endpoint, config.batch_max_lines, config.json_body_bytes)

    def _check_model(self, lines: Lines, row: BatchRow) -> None:
        if lines.errors or lines.model is None:
            return
        name, found = lines.model, resolve(self._db, lines.model)
        code, why = "model_not_supported", ""
        if found is None or not models.is_visible(self._db, found.model.id, viewer_of(self._db, row.key_id)):
            code, why = "model_not_found", f"The model {shown(name)} does not exist or you do not have access to it"
        elif found.model.task != _TASK_OF.get(row.endpoint, "generate"):
            why = f"The model `{name}` does not support {row.endpoint}"
        elif row.endpoint in CONVERSING:
            why = why_no_chat(self._db, name)
        if not why and found is not None and found.pinned and found.version.version not in self._served(found.model):
            # No engine would ever serve it for a batch, which would wait until it expires.
            code = "model_version_not_served"
            why = (
                f"The version of `{name}` is not served; `{found.model.active_version}` of the model is. "
                "`appliance model rollback` or `appliance model canary` serve another"
            )
        if why:
            lines.add_error(code, f"{why}.", 1, "body.model")

    def _served(self, model: ModelRow) -> set[str | None]:
        canary = canaries.find_running(self._db, model.id)
        return {model.active_version, canary.version if canary is not None else None}

    # --- in progress

    async def _answer_lines(self, lines: list[Line], model: str, source: BinaryIO) -> None:
        """Ask for each line without an answer until all have one. Answers are synced in groups."""
        left = (line for line in lines if line.custom_id not in self.answers.custom_ids)
        async with contextlib.aclosing(finished((self._ask(line, model, source) for line in left), AT_ONCE)) as groups:
            async for answered in groups:
                await self._append(answered)

    async def _ask(self, line: Line, model: str, source: BinaryIO) -> dict[str, Any]:
        """The answered line."""
        asker, url, request_id = Asker(self._row.key_id, self._row.owner), self._row.endpoint, new_id("req_")

        async def body() -> dict[str, Any]:
            if self._context.quotas.disk.why_short():
                raise _NoRoom  # others may have its place
            source.seek(line.offset)
            asked = input_lines.parse(source.read(line.size))["body"]
            # Nobody could look for what was stored of it.
            return {**asked, "store": False} if url in CONVERSING else asked

        while True:
            with contextlib.suppress(_NoRoom):
                answer = await self._context.asking.ask(asker, model, url, body, request_id)
                if answer.status != 401:  # a gateway does not know its key yet, or the key has just ended
                    break
            await asyncio.sleep(LOOK_EVERY_S)
        response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        return {**_line(line.custom_id), "error": None, "response": response}

    async def _append(self, lines: list[dict[str, Any]]) -> None:
        """Raises OSError."""
        await until_room(partial(to_thread.run_sync, self._store, lines))

    def _store(self, lines: list[dict[str, Any]]) -> None:
        self.answers.append(lines)
        batches.update(self._db, self._row.id, completed=self.answers.completed, failed=self.answers.failed)

    def _expired(self, lines: list[Line]) -> list[dict[str, Any]]:
        """An error for each line that has no answer."""
        left = [line.custom_id for line in lines if line.custom_id not in self.answers.custom_ids]
        return [{**_line(custom_id), "response": None, "error": _EXPIRED} for custom_id in left]

    # --- finalizing

    async def end(self, status: str, **changes: Any) -> None:
        """Make files of the answers and end the batch, unless it has ended. Raises OSError."""
        row = batches.find(self._db, self._row.id, viewer=None)
        answers = self.answers
        if row is None or row.finished:
            answers.remove()
            return
        if status == "completed" and row.status == "cancelling":
            status = "cancelled"  # cancellation arrived together with the last answer
        if status == "completed":
            batches.update(self._db, row.id, status="finalizing", finalizing_s=row.finalizing_s or time.time())
        answers.close()
        paths = {"output": answers.output_path, "error": answers.error_path}
        files = {
            kind: await to_thread.run_sync(_file_row, path, f"{row.id}_{kind}.jsonl", row)
            for kind, path in paths.items()
            if path.stat().st_size
        }
        ids = [file.id for file in files.values()]
        with storage.growing(self._context.files_dir, *ids) as places:
            for kind, place in zip(files, places, strict=True):
                os.link(paths[kind], place)
            with self._db.transaction():
                for file, place in zip(files.values(), places, strict=True):
                    storage.keep(self._context, file, place)
                batches.update(
                    self._db,
                    row.id,
                    status=status,
                    completed=answers.completed,
                    failed=answers.failed,
                    usage=answers.usage_object(),
                    **{f"{status}_s": time.time()},
                    **{f"{kind}_file_id": file.id for kind, file in files.items()},
                    **changes,
                )
        answers.remove()


def _line(custom_id: str) -> dict[str, Any]:
    return {"id": new_id("batch_req_"), "custom_id": custom_id}


def _file_row(path: Path, filename: str, row: BatchRow) -> FileRow:
    now_s = time.time()
    return FileRow(
        id=new_id("file-"),
        filename=filename,
        purpose="batch_output",
        bytes=path.stat().st_size,
        sha256=storage.sha256_of(path),
        status="processed",
        created_s=now_s,
        key_id=row.key_id,
        owner=row.owner,
        expires_s=None if row.output_keep_s is None else now_s + row.output_keep_s,
    )


class _NoRoom(Exception):
    """No answer may be stored now."""


class _Refused(TaskFailed):
    """Lines of the input file are refused."""

    def __init__(self, errors: list[dict[str, Any]]):
        super().__init__("invalid_input", f"{len(errors)} lines of the input file are refused.")
        self.errors = errors
