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
from collections import deque
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from anyio import to_thread

from appliance.controller.access.model_access import viewer_of, why_no_chat
from appliance.controller.access.naming import resolve
from appliance.controller.batches import input_lines
from appliance.controller.batches.answers import Answers
from appliance.controller.batches.input_lines import CONVERSING, Lines
from appliance.controller.bus.asking import Asker
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, is_full, until_room
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
_EXPIRED_AT_ONCE_BYTES = 4 << 20  # on a thread
_TASK_OF = {"/v1/embeddings": "embed"}
_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class Batches:
    """Runs batches as tasks, and reports the progress of those that run."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._works: dict[str, BatchWork] = {}
        context.tasks.add(Kind(BATCHES, self.run, self.fail, "batch"))

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        async with self._opened(task) as work:
            try:
                await work.run()
            except OSError as error:
                if is_full(error):
                    raise
                message = f"The files of the batch could not be read or written: {error}."
                raise TaskFailed("file_unreadable", message) from error

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        """Fail the batch, with files of the lines that were answered."""
        refused = [{"code": error.code, "line": None, "message": str(error), "param": None}]
        errors = error.errors if isinstance(error, _Refused) else refused
        async with self._opened(task) as work:
            try:
                await work.end("failed", errors=errors)
            except (OSError, ValueError) as second:  # of the files of its answers
                if is_full(second):
                    raise
                log.error("the answers of %s cannot be read or kept: %s", task.id, second)
                batches.update(self._context.db, task.id, status="failed", failed_s=time.time(), errors=errors)

    def progress(self, row: BatchRow) -> tuple[int, int, str | None]:
        """(completed, failed, why it makes no progress now or None)."""
        work = self._works.get(row.id)
        if row.finished or work is None:
            return row.completed, row.failed, None
        context = self._context
        why = context.quotas.disk.why_short() or context.asking.why(row.key_id, row.model or "")
        return work.answers.completed, work.answers.failed, (why or None) if row.status == "in_progress" else None

    @contextlib.asynccontextmanager
    async def _opened(self, task: TaskRow) -> AsyncIterator[BatchWork]:
        work = self._works[task.id] = BatchWork(self._context, task.id)
        try:
            yield work
        finally:
            del self._works[task.id]
            await to_thread.run_sync(work.close)


class BatchWork:
    """One batch. close: waits for a write in progress, so that the next one may open the files."""

    def __init__(self, context: ControllerContext, batch_id: str):
        self._context, self._db, self._id = context, context.db, batch_id
        self.answers = Answers(context.batches_dir, batch_id)
        self._lines = Lines()
        self._ready: dict[str, dict[str, Any]] = {}  # answered lines to be stored, by id
        self._storing = asyncio.Lock()

    async def run(self) -> None:
        """Raises OSError, TaskFailed."""
        row = batches.find(self._db, self._id, viewer=None)
        if row is None or row.finished:
            return
        if row.status in ("finalizing", "cancelling"):
            await self.end("completed" if row.status == "finalizing" else "cancelled")
            return
        path = self._input_path(row)
        lines = self._lines = await to_thread.run_sync(self._read, path, row, limiter=self._context.file_threads)
        if row.status == "validating":
            self._check_model(lines, row)
            batches.update(self._db, self._id, total=len(lines))
        if lines.errors:  # of one in progress, too: the box may have become stricter since it was validated
            raise _Refused(lines.errors)
        if row.status == "validating" and not self._in_progress(lines.model):
            await self.run()  # it was cancelled while its file was read
            return
        await self._open()
        end = "completed"
        with self._context.asking.wanted(lines.model or ""), open(path, "rb") as source:
            try:
                async with asyncio.timeout(row.expires_s - time.time()):
                    await self._answer_lines(row, source)
            except TimeoutError:
                end = "expired"
                await self._expire(source)
        await self.end(end)

    def _in_progress(self, model: str | None) -> bool:
        """Whether it still was in validation, and is in progress now."""
        with self._db.transaction():
            row = batches.find(self._db, self._id, viewer=None)
            if row is None or row.status != "validating":
                return False
            batches.update(self._db, self._id, status="in_progress", in_progress_s=time.time(), model=model)
            return True

    def close(self) -> None:
        self.answers.close()

    async def _open(self) -> None:
        if not self.answers.opened:
            await to_thread.run_sync(self.answers.open)

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
        found = resolve(self._db, lines.model)
        if found is None or not models.is_visible(self._db, found.model.id, viewer_of(self._db, row.key_id)):
            lines.add_error(
                "model_not_found",
                f"The model {shown(lines.model)} does not exist or you do not have access to it.",
                1,
                "body.model",
            )
        elif found.model.task != _TASK_OF.get(row.endpoint, "generate"):
            lines.add_error(
                "model_not_supported", f"The model `{lines.model}` does not support {row.endpoint}.", 1, "body.model"
            )
        elif row.endpoint in input_lines.CONVERSING and (why := why_no_chat(self._db, lines.model)):
            lines.add_error("model_not_supported", f"{why}.", 1, "body.model")
        elif found.pinned and found.version.version not in self._served(found.model):
            # No engine would ever serve it for a batch, which would wait until it expires.
            lines.add_error(
                "model_version_not_served",
                f"The version of `{lines.model}` is not served; "
                f"`{found.model.active_version}` of the model is. `appliance model rollback` or `appliance "
                "model canary` serve another.",
                1,
                "body.model",
            )

    def _served(self, model: ModelRow) -> set[str | None]:
        canary = canaries.find_running(self._db, model.id)
        return {model.active_version, canary.version if canary is not None else None}

    # --- in progress

    async def _answer_lines(self, row: BatchRow, source: BinaryIO) -> None:
        """Ask for each line without an answer until all have one. What has an answer when this ends early is stored."""
        numbers = iter(self._unanswered())
        asking = [asyncio.create_task(self._ask_lines(row, numbers, source)) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*asking)
        finally:
            for task in asking:  # one that failed leaves the others at work
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            if self._ready:
                with contextlib.suppress(OSError):
                    await to_thread.run_sync(self.answers.append, list(self._ready.values()))

    def _unanswered(self) -> list[int]:
        return [number for number in range(len(self._lines)) if not self.answers.has(self._lines.digest(number))]

    async def _ask_lines(self, row: BatchRow, numbers: Iterator[int], source: BinaryIO) -> None:
        """numbers: shared with others who ask."""
        asker, url = Asker(row.key_id, row.owner), row.endpoint
        for number in numbers:
            line, request_id = dict[str, Any](), new_id("req_")

            async def body(line: dict[str, Any] = line, number: int = number) -> dict[str, Any]:
                if self._context.quotas.disk.why_short():
                    raise _NoRoom  # others may have its place
                line.update(self._request(source, number))
                # Nobody could look for what was stored of it.
                return {**line["body"], "store": False} if url in CONVERSING else line["body"]

            while True:
                with contextlib.suppress(_NoRoom):
                    answer = await self._context.asking.ask(asker, self._lines.model or "", url, body, request_id)
                    if answer.status != 401:  # a gateway does not know its key yet, or the key has just ended
                        break
                await asyncio.sleep(LOOK_EVERY_S)
            response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
            answered = {"id": new_id("batch_req_"), "custom_id": line["custom_id"], "error": None, "response": response}
            await self._store(answered)

    async def _store(self, answered: dict[str, Any]) -> None:
        """Returns once it is on disk, synced together with all that came meanwhile."""
        self._ready[answered["id"]] = answered
        async with self._storing:
            if answered["id"] in self._ready:
                await self._append(list(self._ready.values()))

    async def _append(self, lines: list[dict[str, Any]]) -> None:
        """Raises OSError."""
        await until_room(partial(to_thread.run_sync, self.answers.append, lines))
        for line in lines:
            self._ready.pop(line["id"], None)

    def _request(self, source: BinaryIO, number: int) -> dict[str, Any]:
        line = self._lines[number]
        source.seek(line.offset)
        return input_lines.parse(source.read(line.size))

    # --- finalizing

    async def end(self, status: str, **changes: Any) -> None:
        """Make files of the answers and end the batch, unless it has ended. Raises OSError."""
        row = batches.find(self._db, self._id, viewer=None)
        if row is None or row.finished:
            return
        if status == "completed" and row.status == "cancelling":
            status = "cancelled"  # cancellation arrived together with the last answer
        if status == "completed":
            batches.update(self._db, self._id, status="finalizing", finalizing_s=row.finalizing_s or time.time())
        await self._open()
        answers = self.answers
        answers.close()
        paths = {"output": answers.output_path, "error": answers.error_path}
        files = {
            kind: await to_thread.run_sync(_file_row, path, f"{row.id}_{kind}.jsonl", row)
            for kind, path in paths.items()
            if path.stat().st_size
        }
        ids = [file.id for file in files.values()]
        with storage.growing(self._context, *ids) as places:
            for kind, place in zip(files, places, strict=True):
                os.link(paths[kind], place)
            with self._db.transaction():
                for file, place in zip(files.values(), places, strict=True):
                    storage.keep(self._context, file, place)
                batches.update(
                    self._db,
                    self._id,
                    status=status,
                    completed=answers.completed,
                    failed=answers.failed,
                    usage=answers.usage_object(),
                    **{f"{status}_s": time.time()},
                    **{f"{kind}_file_id": file.id for kind, file in files.items()},
                    **changes,
                )
        answers.remove()

    async def _expire(self, source: BinaryIO) -> None:
        """Store an error for each line that has no answer. Their custom_ids are read some at a time."""
        unanswered = deque(self._unanswered())
        while unanswered:
            some, size = [], 0
            while unanswered and size < _EXPIRED_AT_ONCE_BYTES:
                some.append(unanswered.popleft())
                size += self._lines[some[-1]].size
            ids = await to_thread.run_sync(lambda some=some: [self._request(source, n)["custom_id"] for n in some])
            await self._append(
                [{"id": new_id("batch_req_"), "custom_id": one, "response": None, "error": _EXPIRED} for one in ids]
            )


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
