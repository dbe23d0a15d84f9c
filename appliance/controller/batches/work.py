"""Runs one batch: validating, in progress, finalizing, and one of five final states.

State that must outlive the controller is in the batch's row (its status) and in its answers on disk (answers.py); after
a restart the batch resumes from there and repeats at most the lines that were in flight.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
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
from appliance.controller.files import storage
from appliance.controller.interfaces.errors import shown
from appliance.store.ids import new_id
from appliance.store.objects import batches, models
from appliance.store.objects import files as file_rows
from appliance.store.records import canaries, keys
from appliance.store.rows import BatchRow, FileRow, ModelRow
from appliance.store.upkeep.holdings import ANSWERS_PER_INPUT

log = logging.getLogger("appliance.controller")

AT_ONCE = 256
"""Lines of a batch that are asked, or wait for a place, at once."""
LOOK_EVERY_S = 2.0
ROOM_EVERY_S = 2.0  # on a full disk
ROOM_LOOK_EVERY_S, _LOOK_AFTER_BYTES = 0.5, 4 << 20  # of answers, for room
_EXPIRED_AT_ONCE_BYTES = 4 << 20  # on a thread
_TASK_OF = {"/v1/embeddings": "embed"}
_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class BatchWork:
    """One batch. no_room: why no answer may be written now, empty if it may."""

    def __init__(self, context: ControllerContext, batch_id: str):
        self._context, self._db, self.batch_id = context, context.db, batch_id
        self.model = ""
        self.asker = Asker(None, "")
        self.answers = Answers(context.batches_dir, batch_id)
        self.opened = False
        self.no_room = ""
        self.begun = False
        self.wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._lines = Lines()
        self._ready: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._written_s = 0.0
        self._looked_s, self._looked_at = -LOOK_EVERY_S, 0
        self._kept_free = 0  # bytes that its input has kept free for its answers

    async def run(self) -> None:
        self.begun = True
        try:
            await self._run()
        except (OSError, _Gone) as error:
            await self._fail("file_unreadable", f"The files of the batch could not be read or written: {error}.")
        except Exception as error:
            # A bug; without this the batch would wait forever, with the reason only in a log.
            await self._fail("internal_error", f"The batch failed: {type(error).__name__}: {error}.")
            raise
        finally:
            self.answers.close()
            self._context.quotas.answers_hold(self.batch_id, self.asker.owner, 0)

    async def _run(self) -> None:
        row = self._row()
        self.asker = Asker(row.key_id, row.owner)
        if row.status == "finalizing":
            await to_thread.run_sync(self.answers.open)
            self.opened = True
            await self._finish("completed")
            return
        path = self._input_path(row)
        read = partial(self._read, path, row.endpoint)
        lines = await to_thread.run_sync(read, limiter=self._context.file_threads)
        self._kept_free = ANSWERS_PER_INPUT * path.stat().st_size
        row = self._row()
        if row.status == "validating":
            self._check_model(lines, row)
            if lines.errors:
                self._set(status="failed", failed_s=time.time(), errors=lines.errors, total=len(lines))
                return
            self._set(status="in_progress", in_progress_s=time.time(), model=lines.model, total=len(lines))
        await to_thread.run_sync(self.answers.open)
        self.opened = True
        self._count_answers()
        self.model, self._lines = lines.model or "", lines
        with self._context.asking.wanted(self.model):
            end = await self._answer_lines(row.endpoint)
        await self._finish(end)

    # --- validating

    def _read(self, path: Path, endpoint: str) -> Lines:
        config = self._context.config
        return input_lines.read(path, endpoint, config.batch_max_lines, config.json_body_bytes)

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

    async def _answer_lines(self, url: str) -> str:
        """Ask for each line without an answer until all have one or the batch ends early; returns its final status."""
        left = [number for number in range(len(self._lines)) if not self.answers.has(self._lines.digest(number))]
        numbers, end = iter(left), ""
        with open(self._input_path(self._row()), "rb") as source:
            asking = [asyncio.create_task(self._ask_lines(numbers, source, url)) for _ in left[:AT_ONCE]]
            all_asked = asyncio.gather(*asking)
            all_asked.add_done_callback(lambda _: self.wake.set())
            try:
                while not (all_asked.done() and not self._ready):
                    self.wake.clear()
                    if end := self._early_end():
                        break
                    self._look_for_room()
                    await self._store_answers()
                    await self._woken()
                else:
                    await all_asked
            finally:
                for task in asking:  # one that failed leaves the others at work
                    task.cancel()
                await asyncio.gather(all_asked, *asking, return_exceptions=True)
        await self._store_answers()
        return end or "completed"

    def _early_end(self) -> str:
        row = self._row()
        if row.status == "cancelling":
            return "cancelled"
        if row.expires_s <= time.time():
            return "expired"
        if how := keys.how_ended(self._db, row.key_id):
            message = f"The API key of this batch {how}."
            self._set(errors=[{"code": "invalid_api_key", "line": None, "param": None, "message": message}])
            return "failed"
        return ""

    def _look_for_room(self) -> None:
        """Now and then, because it sums up all that is stored."""
        now_s, grown = time.monotonic(), self.answers.bytes - self._looked_at
        if now_s - self._looked_s >= ROOM_LOOK_EVERY_S or grown > min(self._kept_free, _LOOK_AFTER_BYTES):
            self._looked_s, self._looked_at = now_s, self.answers.bytes
            self._count_answers()  # those that a thread has just written are not counted yet
            self.no_room = self._context.quotas.no_room_for_answers(self.asker.key_id)
            (self._has_room.clear if self.no_room else self._has_room.set)()

    async def _woken(self) -> None:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self.wake.wait()
        except TimeoutError:
            return

    async def _ask_lines(self, numbers: Iterator[int], source: BinaryIO, url: str) -> None:
        """numbers: shared with others who ask."""
        for number in numbers:
            line, request_id = dict[str, Any](), new_id("req_")

            async def body(line: dict[str, Any] = line, number: int = number) -> dict[str, Any]:
                self._look_for_room()
                if self.no_room:
                    raise _NoRoom
                line.update(self._request(source, number))
                # Nobody could look for what was stored of it.
                return {**line["body"], "store": False} if url in CONVERSING else line["body"]

            while True:
                await self._has_room.wait()
                try:
                    answer = await self._context.asking.ask(self.asker, self.model, url, body, request_id)
                except _NoRoom:
                    continue
                if answer.status != 401:
                    break
                self.wake.set()  # its key has ended, or a gateway does not know it yet
                await asyncio.sleep(LOOK_EVERY_S)
            response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
            stored = asyncio.get_running_loop().create_future()
            answered = {"id": new_id("batch_req_"), "custom_id": line["custom_id"], "error": None, "response": response}
            self._ready.append((answered, stored))
            self.wake.set()
            await stored

    async def _store_answers(self) -> None:
        ready, self._ready = self._ready, []
        if ready:
            await self._append([line for line, _ in ready])
            for _, stored in ready:
                if not stored.done():
                    stored.set_result(None)
        now_s = time.monotonic()
        if now_s - self._written_s >= self._context.config.progress_every_s:
            self._written_s = now_s
            self._set(completed=self.answers.completed, failed=self.answers.failed)

    def _count_answers(self) -> None:
        beyond = max(0, self.answers.bytes - self._kept_free)
        self._context.quotas.answers_hold(self.batch_id, self.asker.owner, beyond)

    def _request(self, source: BinaryIO, number: int) -> dict[str, Any]:
        line = self._lines[number]
        source.seek(line.offset)
        return input_lines.parse(source.read(line.size))

    async def _append(self, lines: list[dict[str, Any]]) -> None:
        """Retries while the disk is full: answers that engines have computed are not discarded. Raises OSError."""
        while True:
            try:
                await to_thread.run_sync(self.answers.append, lines)
                self._count_answers()
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.warning("batch %s waits for room on the disk: %s", self.batch_id, error.strerror)
            await asyncio.sleep(ROOM_EVERY_S)

    # --- finalizing

    async def _finish(self, end: str) -> None:
        row = self._row()
        if end == "expired":
            await self._expire()
        if end == "completed" and row.status == "cancelling":
            end = "cancelled"  # cancellation arrived together with the last answer
        if end == "completed" and row.status != "finalizing":
            self._set(status="finalizing", finalizing_s=time.time())
        self.answers.close()
        made = {}
        for kind, path in (("output", self.answers.output_path), ("error", self.answers.error_path)):
            if path.exists() and path.stat().st_size:
                made[kind] = await to_thread.run_sync(_linked, self._context, path, f"{row.id}_{kind}.jsonl", row)
        with self._db.transaction():
            for file in made.values():
                file_rows.insert(self._db, file)
            self._set(
                status=end,
                completed=self.answers.completed,
                failed=self.answers.failed,
                usage=self.answers.usage_object(),
                **{f"{end}_s": time.time()},
                **{f"{kind}_file_id": file.id for kind, file in made.items()},
            )
        self.answers.remove()

    async def _expire(self) -> None:
        """Store an error for each line that has no answer. Their custom_ids are read some at a time."""
        unanswered = deque(n for n in range(len(self._lines)) if not self.answers.has(self._lines.digest(n)))
        with open(self._input_path(self._row()), "rb") as source:
            while unanswered:
                some, size = [], 0
                while unanswered and size < _EXPIRED_AT_ONCE_BYTES:
                    some.append(unanswered.popleft())
                    size += self._lines[some[-1]].size
                ids = await to_thread.run_sync(lambda some=some: [self._request(source, n)["custom_id"] for n in some])
                made = [
                    {"id": new_id("batch_req_"), "custom_id": one, "response": None, "error": _EXPIRED} for one in ids
                ]
                await self._append(made)

    # --- the row

    def _row(self) -> BatchRow:
        row = batches.find(self._db, self.batch_id, viewer=None)
        if row is None:
            raise _Gone("the batch was deleted")
        return row

    def _set(self, **changes: Any) -> None:
        batches.update(self._db, self.batch_id, **changes)

    async def _fail(self, code: str, message: str) -> None:
        """Fail the batch, with files of the lines that were answered where they can be made."""
        log.error("the batch fails: %s", message, extra={"batch_id": self.batch_id})
        if batches.find(self._db, self.batch_id, viewer=None) is None:
            return
        self._set(errors=[{"code": code, "line": None, "message": message, "param": None}])
        try:
            if not self.opened:
                await to_thread.run_sync(self.answers.open)
            await self._finish("failed")
        except OSError as error:
            log.error("the batch's answers stay in %s: %s", self.answers.output_path, error)
            self._set(status="failed", failed_s=time.time())

    def _input_path(self, row: BatchRow) -> Path:
        # Ignores the expiry: a file that was valid when the batch was created stays valid while its bytes are here.
        if file_rows.find(self._db, row.input_file_id, viewer=None, now_s=0) is None:
            raise _Gone(f"the file {row.input_file_id} was deleted")
        return self._context.files_dir / row.input_file_id


def _linked(context: ControllerContext, path: Path, filename: str, row: BatchRow) -> FileRow:
    """A hard link in `files/` to the bytes: until the rows are written, a crash loses nothing and leaves nothing."""
    file_id, now_s = new_id("file-"), time.time()
    os.link(path, context.files_dir / file_id)
    return FileRow(
        id=file_id,
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
    """No answer may be written now."""


class _Gone(Exception):
    """Something that the batch needs no longer exists."""
