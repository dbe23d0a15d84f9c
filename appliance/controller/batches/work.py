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
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, finished, is_full
from appliance.controller.files import storage
from appliance.controller.interfaces.errors import shown
from appliance.store.ids import new_id
from appliance.store.objects import batches, models
from appliance.store.objects import files as file_rows
from appliance.store.records import canaries
from appliance.store.rows import BatchRow, BatchStatus, FileRow, TaskRow

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


def kind(context: ControllerContext) -> Kind:
    """The kind of task that batches are."""

    async def run(task: TaskRow) -> None:
        try:
            async with _opened(context, task.id) as batch:
                if batch is not None:
                    await batch.run()
        except OSError as error:
            if is_full(error):
                raise
            message = f"The files of the batch could not be read or written: {error}."
            raise TaskFailed("file_unreadable", message) from error

    async def fail(task: TaskRow, error: TaskFailed) -> None:
        """With files of the lines that were answered."""
        errors = [{"code": error.code, "line": None, "message": str(error), "param": None}]
        try:
            async with _opened(context, task.id) as batch:
                if batch is not None:
                    await batch.end("failed", errors=errors)
        except (OSError, ValueError) as second:  # of the files of its answers
            if is_full(second):
                raise
            log.error("the answers of %s cannot be read or kept: %s", task.id, second)
            batches.set_status(context.db, task.id, "failed", errors=errors)

    return Kind(BATCHES, run, fail, "batch")


def waiting_for(context: ControllerContext, row: BatchRow) -> str | None:
    """Why it makes no progress now; None: it does, or is not in progress."""
    if row.status != "in_progress":
        return None
    return context.quotas.disk.why_short() or context.asking.why(row.key_id, row.model or "") or None


@contextlib.asynccontextmanager
async def _opened(context: ControllerContext, batch_id: str) -> AsyncIterator[Batch | None]:
    """None for one that has ended."""
    row = batches.find(context.db, batch_id, viewer=None)
    if row is None or row.finished:
        yield None
        return
    answers = await to_thread.run_sync(Answers, context.batches_dir, row.id)
    try:
        yield Batch(context, row, answers)
    finally:
        await to_thread.run_sync(answers.close)


class Batch:
    """An unfinished batch with what was answered of it."""

    def __init__(self, context: ControllerContext, row: BatchRow, answers: Answers):
        self._context, self._db, self._row, self._answers = context, context.db, row, answers

    async def run(self) -> None:
        """Raises OSError, TaskFailed."""
        row = self._row
        if row.status in ("finalizing", "cancelling"):
            await self.end("completed" if row.status == "finalizing" else "cancelled")
            return
        # Ignores the expiry: a file that was valid when the batch was created stays valid while its bytes are here.
        if file_rows.find(self._db, row.input_file_id, viewer=None, now_s=0) is None:
            raise TaskFailed("file_unreadable", f"The file {row.input_file_id} was deleted.")
        path, config = self._context.files_dir / row.input_file_id, self._context.config
        read = partial(input_lines.read, path, row.endpoint, config.batch_max_lines, config.json_body_bytes)
        lines = await to_thread.run_sync(read, limiter=self._context.file_threads)
        if row.status == "validating":
            self._check_model(lines)
            batches.update(self._db, row.id, total=len(lines.requests))
        if lines.errors:  # of one in progress, too: the box may have become stricter since it was validated
            await self.end("failed", errors=lines.errors)
            return
        now = batches.find(self._db, row.id, viewer=None)
        if now is not None and now.status == "cancelling":  # since its file was read
            await self.end("cancelled")
            return
        if row.status == "validating":
            batches.set_status(self._db, row.id, "in_progress", model=lines.model)
        end: BatchStatus = "completed"
        with open(path, "rb") as source:
            have = self._answers.custom_ids
            left = (line for line in lines.requests.values() if line.custom_id not in have)
            asked = (self._ask(line, lines.model or "", source) for line in left)
            try:
                async with (
                    asyncio.timeout(row.expires_s - time.time()),
                    contextlib.aclosing(finished(asked, AT_ONCE)) as groups,
                ):
                    async for answered in groups:
                        await to_thread.run_sync(self._store, answered)
            except TimeoutError:
                end = "expired"
                left = (line for line in lines.requests.values() if line.custom_id not in have)
                expired = [{**_line(line), "response": None, "error": _EXPIRED} for line in left]
                await to_thread.run_sync(self._store, expired)
        await self.end(end)

    def _check_model(self, lines: Lines) -> None:
        if lines.errors or lines.model is None:
            return
        row, name, found = self._row, lines.model, resolve(self._db, lines.model)
        code, why = "model_not_supported", ""
        if found is None or not models.is_visible(self._db, found.model.id, viewer_of(self._db, row.key_id)):
            code, why = "model_not_found", f"The model {shown(name)} does not exist or you do not have access to it"
        elif found.model.task != _TASK_OF.get(row.endpoint, "generate"):
            why = f"The model `{name}` does not support {row.endpoint}"
        elif row.endpoint in CONVERSING:
            why = why_no_chat(self._db, name)
        if not why and found is not None and found.pinned:
            canary = canaries.find_running(self._db, found.model.id)
            if found.version.version not in (found.model.active_version, canary and canary.version):
                # No engine would ever serve it for a batch, which would wait until it expires.
                code = "model_version_not_served"
                why = (
                    f"The version of `{name}` is not served; `{found.model.active_version}` of the model is. "
                    "`appliance model rollback` or `appliance model canary` serve another"
                )
        if why:
            lines.add_error(code, f"{why}.", 1, "body.model")

    async def _ask(self, line: Line, model: str, source: BinaryIO) -> dict[str, Any]:
        """The answered line."""
        url, request_id = self._row.endpoint, new_id("req_")

        async def body() -> dict[str, Any]:
            source.seek(line.offset)
            asked = input_lines.parse(source.read(line.size))["body"]
            # Nobody could look for what was stored of it.
            return {**asked, "store": False} if url in CONVERSING else asked

        while self._context.quotas.disk.why_short():
            await asyncio.sleep(LOOK_EVERY_S)
        answer = await self._context.asking.ask(self._row.key_id, model, url, body, request_id=request_id)
        response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        return {**_line(line), "error": None, "response": response}

    def _store(self, lines: list[dict[str, Any]]) -> None:
        self._answers.append(lines)
        batches.update(self._db, self._row.id, completed=self._answers.completed, failed=self._answers.failed)

    async def end(self, status: BatchStatus, **changes: Any) -> None:
        """Make files of the answers and end the batch, unless it has ended. Raises OSError."""
        row = batches.find(self._db, self._row.id, viewer=None)
        answers = self._answers
        if row is None or row.finished:
            answers.remove()
            return
        if status == "completed" and row.status == "cancelling":
            status = "cancelled"  # cancellation arrived together with the last answer
        if status == "completed":
            batches.set_status(self._db, row.id, "finalizing")
        answers.close()
        files = {
            name: await to_thread.run_sync(_file_row, path, f"{row.id}_{name}.jsonl", row)
            for name, path in answers.paths.items()
            if path.stat().st_size
        }
        with storage.growing(self._context.files_dir, *(file.id for file in files.values())) as places:
            for name, place in zip(files, places, strict=True):
                os.link(answers.paths[name], place)
            with self._db.transaction():
                for file, place in zip(files.values(), places, strict=True):
                    storage.keep(self._context, file, place)
                batches.set_status(
                    self._db,
                    row.id,
                    status,
                    completed=answers.completed,
                    failed=answers.failed,
                    usage=answers.tokens,
                    **{f"{name}_file_id": file.id for name, file in files.items()},
                    **changes,
                )
        answers.remove()


def _line(line: Line) -> dict[str, Any]:
    return {"id": new_id("batch_req_"), "custom_id": line.custom_id}


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
