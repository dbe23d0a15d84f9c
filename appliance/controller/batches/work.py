"""Runs one batch: validating, in progress, finalizing, and one of five final states.

State that must outlive the controller is in the batch's row (its status) and in its answers on disk (`batch_answers`);
after a restart the batch continues from there and repeats at most the lines that were in flight. An engine that is
wanted for something else returns its lines; they wait for the next idle engine. retry.py says what becomes of a line
whose engine died.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson
from anyio import to_thread

from appliance.controller.access.model_access import viewer_of, why_no_chat
from appliance.controller.access.naming import resolve
from appliance.controller.batches import input_lines
from appliance.controller.batches.answers import Answers
from appliance.controller.batches.input_lines import Lines, digest_of
from appliance.controller.batches.metering import BYTES_PER_TOKEN, Charge, Metering, Sent, most_of
from appliance.controller.batches.output_files import linked, remove_bytes
from appliance.controller.batches.retry import Deaths, last_words
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import error_object, shown
from appliance.controller.interfaces.ports import EngineAnswer, LineReturned
from appliance.controller.responses.items import salted
from appliance.store.ids import new_id
from appliance.store.objects import batches, models
from appliance.store.objects import files as file_rows
from appliance.store.records import canaries, keys
from appliance.store.rows import BatchRow, ModelRow
from appliance.store.upkeep.holdings import ANSWERS_PER_INPUT

log = logging.getLogger("appliance.controller")

LOOK_EVERY_S = 0.5
ROOM_EVERY_S = 2.0  # on a full disk
_LOOK_AFTER_BYTES = 4 << 20  # of answers, for room
_REFUSED_AT_ONCE = 1000
_READ_AT_ONCE_BYTES = 256 << 10
_EXPIRED_AT_ONCE_BYTES = 4 << 20  # on a thread
_TASK_OF = {"/v1/embeddings": "embed"}
_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class Turns(Protocol):
    """What a batch needs from the runner of all batches: its turn at the engines, and its key's limits."""

    metering: Metering

    def room(self, asking: BatchWork) -> int: ...

    def sent(self, work: BatchWork) -> None: ...

    def returned(self, work: BatchWork) -> None: ...

    def gives_way(self, work: BatchWork) -> None: ...

    def is_behind(self, asking: BatchWork) -> bool: ...

    def tell_wants(self) -> None: ...


class BatchWork:
    """One batch. `left`: numbers of lines not yet sent (or returned), in order; `flying`: tasks of those at engines, by
    custom_id; `stopped_by`: the key limit that holds back the next line, empty if none does; `host`: the model whose
    engines had its lines when it looked last."""

    def __init__(self, context: ControllerContext, batch_id: str, runner: Turns):
        self._context, self._db, self.batch_id, self._runner = context, context.db, batch_id, runner
        self.model = self.owner = self.host = ""
        self.key_id: str | None = None
        self.answers = Answers(context.batches_dir, batch_id)
        self.opened = False
        self.left: deque[int] = deque()
        self.flying: dict[str, asyncio.Task[None]] = {}
        self.stopped_by = ""
        self.begun = False
        self.wake = asyncio.Event()
        self._lines = Lines()
        self._deaths = Deaths()
        self._ready: list[dict[str, Any]] = []
        self._charges: list[Charge] = []
        self._sent: dict[str, Sent] = {}  # at an engine now, by custom_id
        self._bug: Exception | None = None  # that ended a line
        self._written_s = 0.0
        self._kept_free = 0  # bytes that its input has kept free for its answers
        self._no_room, self._looked_for_room_s, self._looked_at = "", -LOOK_EVERY_S, 0

    async def run(self) -> None:
        self.begun = True
        try:
            await self._run()
        except (OSError, _Gone) as error:
            self._fail("file_unreadable", f"The files of the batch could not be read or written: {error}.")
            await self._pay_after_failure()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A bug; without this the batch would wait forever, with the reason only in a log.
            self._fail("internal_error", f"The batch failed: {type(error).__name__}: {error}.")
            await self._pay_after_failure()
            raise
        finally:
            # Not charged where the box itself ends: the next run of the controller sends these lines again.
            await self._recall()
            self.answers.close()
            self._context.quotas.answers_hold(self.batch_id, self.owner, 0)

    async def _pay_after_failure(self) -> None:
        """Charge for what engines have computed, including answers that could not be stored: the batch has failed, and
        its lines are not sent again."""
        self._pay_for(await self._recall())
        charges, self._charges = self._charges, []
        key = keys.find(self._db, self.key_id) if self.key_id is not None else None
        self._runner.metering.charge(key, self.model, charges)

    async def _run(self) -> None:
        row = self._row()
        self.owner, self.key_id = row.owner, row.key_id
        if row.status == "finalizing":
            await to_thread.run_sync(self.answers.open)
            self.opened = True
            await self._finish("completed")
            return
        path = self._input_path(row)
        lines = await self._context.file_work.run(row.owner, self._read, path, row.endpoint)
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
        self.host = self._context.batch_engines.host(self.model)
        self.left.extend(number for number in range(len(lines)) if not self.answers.has(lines.digest(number)))
        self._runner.tell_wants()
        await self._finish(await self._answer_lines())

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

    async def _answer_lines(self) -> str:
        """Send lines until all are answered or the batch ends early; returns its final status."""
        with open(self._input_path(self._row()), "rb") as source:
            while self.left or self.flying or self._ready:
                self.wake.clear()
                if self._bug is not None:
                    raise self._bug
                end = self._early_end()
                if end is not None:
                    await self._call_back()
                    return end
                if self._ready:
                    await self._store_answers()  # first, so that their cost counts for the next lines
                if self._send_what_may_go(source):
                    await asyncio.sleep(0)
                elif not self._ready:
                    await self._wait()
        if self._bug is not None:
            raise self._bug
        return "completed"

    def _early_end(self) -> str | None:
        row = self._row()
        if row.status == "cancelling":
            return "cancelled"
        if row.expires_s <= time.time():
            return "expired"
        if how := keys.how_ended(self._db, row.key_id):
            # As at the gateways, requests of a revoked key stop.
            self._set(
                errors=[
                    {
                        "code": "invalid_api_key",
                        "line": None,
                        "param": None,
                        "message": f"The API key of this batch {how}.",
                    }
                ]
            )
            return "failed"
        return None

    async def _call_back(self) -> None:
        """Cancel the lines at the engines, charge for what has been computed of them, and keep the answers so far."""
        self._pay_for(await self._recall())
        await self._store_answers()

    async def _recall(self) -> list[Sent]:
        taken_back = list(self._sent.values())
        for task in self.flying.values():
            task.cancel()
        await asyncio.gather(*self.flying.values(), return_exceptions=True)
        self.flying.clear()
        self._runner.metering.returned(self.key_id, self.batch_id)  # those whose task had not begun, too
        return taken_back

    def _pay_for(self, taken_back: list[Sent]) -> None:
        metering = self._runner.metering
        metering.pay(metering.left(self.key_id or "", self.model, taken_back))

    async def _wait(self) -> None:
        """Wait for an answer, a poke, or the next check whether the engines have room."""
        waits = [asyncio.ensure_future(self.wake.wait())]
        if not self.left or self.stopped_by:
            self._runner.gives_way(self)
        if self.left and not self._runner.is_behind(self):
            waits.append(asyncio.ensure_future(self._context.batch_engines.changed(LOOK_EVERY_S)))
        try:
            await asyncio.wait(waits, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _send_what_may_go(self, source: Any) -> bool:
        """Send as many lines as engines have room for and the key's limits allow; lines that the key may not send get
        an error here. Returns True if there may be room for more, but others come first: a long line takes long to
        read."""
        self.host = self._context.batch_engines.host(self.model)
        if self._runner.is_behind(self):
            self.stopped_by = ""
            return False
        row, metering = self._row(), self._runner.metering
        key = metering.key_of(row)
        refusal = metering.refusal(key, self.model, row.expires_s)
        size = 0
        if refusal is not None:
            for _ in range(min(len(self.left), _REFUSED_AT_ONCE)):
                line = self._lines[number := self.left.popleft()]
                self._answered(self._request(source, number)["custom_id"], new_id("req_"), refusal.status, refusal.body)
                if (size := size + line.size) > _READ_AT_ONCE_BYTES:
                    return True
            return False
        self.stopped_by = self._why_no_room()
        if self.stopped_by:
            return False
        for _ in range(min(len(self.left), self._runner.room(self))):
            number = self.left[0]
            line = self._lines[number]
            read = cache(partial(self._request, source, number))  # for what it may cost at most, and to be sent
            most = partial(_most, read, line.size)
            self.stopped_by = metering.waits_for(key, line.size // BYTES_PER_TOKEN, self.batch_id, str(number), most)
            if self.stopped_by:
                return False
            self.left.popleft()
            request = read()
            custom_id = request["custom_id"]
            request["body"] = salted(request["body"], key.owner if key is not None else "")
            self.flying[custom_id] = asyncio.create_task(
                self._send(number, custom_id, request), name=f"line of {self.batch_id}"
            )
            self._runner.sent(self)
            if (size := size + line.size) > _READ_AT_ONCE_BYTES:
                return True
        return False

    def _why_no_room(self) -> str:
        """Why no more answers may be written; empty if they may. Checked only now and then, because it sums up all that
        is stored."""
        now_s, grown = time.monotonic(), self.answers.bytes - self._looked_at
        if now_s - self._looked_for_room_s >= LOOK_EVERY_S or grown > min(self._kept_free, _LOOK_AFTER_BYTES):
            self._looked_for_room_s, self._looked_at = now_s, self.answers.bytes
            self._no_room = self._context.quotas.no_room_for_answers(self.key_id)
        return self._no_room

    def _count_answers(self) -> None:
        beyond = max(0, self.answers.bytes - self._kept_free)
        self._context.quotas.answers_hold(self.batch_id, self.owner, beyond)

    def _request(self, source: BinaryIO, number: int) -> dict[str, Any]:
        line = self._lines[number]
        source.seek(line.offset)
        return input_lines.parse(source.read(line.size))

    async def _send(self, number: int, custom_id: str, request: dict[str, Any]) -> None:
        """Invariant: however it ends, the line no longer counts as being at an engine, whose places everybody shares;
        it is answered or left to be sent again, or the batch fails."""
        request_id = new_id("req_")
        try:
            size = len(orjson.dumps(request["body"]))
            sent = self._sent[custom_id] = Sent(request["url"], request["body"], size)
            answer = await self._context.batch_engines.send(
                self.model,
                request["url"],
                request["body"],
                request_id,
                owner=self.owner,
                alone=self._deaths.goes_alone(custom_id),
            )
            silent = sent if answer.silent else None
        except LineReturned as error:
            if error.yielded or self._deaths.counted(custom_id):
                metering = self._runner.metering
                metering.give_back(metering.key_of(self._row()), self._lines[number].size // BYTES_PER_TOKEN)
                if self._deaths.goes_alone(custom_id):
                    self.left.append(number)
                else:
                    self.left.appendleft(number)
                return
            silent = None
            answer = EngineAnswer(502, error_object(last_words(str(error)), "server_error", None, "engines_died"))
        except Exception as error:  # noqa: BLE001 - the batch raises it
            self._bug = error
            return
        finally:
            self._sent.pop(custom_id, None)
            self.flying.pop(custom_id, None)
            self._runner.metering.returned(self.key_id, self.batch_id, str(number))
            self._runner.returned(self)
        estimated = self._lines[number].size // BYTES_PER_TOKEN
        self._charges.append(Charge(custom_id, answer, estimated, silent))
        self._answered(custom_id, request_id, answer.status, answer.body)

    def _answered(self, custom_id: str, request_id: str, status: int, body: Any) -> None:
        self._ready.append(
            {
                "id": new_id("batch_req_"),
                "custom_id": custom_id,
                "error": None,
                "response": {"status_code": status, "request_id": request_id, "body": body},
            }
        )

    async def _store_answers(self) -> None:
        ready, self._ready = self._ready, []
        if ready:
            await self._append(ready)
            # Only after they are stored: lines lost in a crash are sent again, and nothing is charged twice.
            stored, waiting = list[Charge](), list[Charge]()
            for charge in self._charges:
                (stored if self.answers.has(digest_of(charge.custom_id)) else waiting).append(charge)
            self._charges = waiting
            self._runner.metering.charge(self._runner.metering.key_of(self._row()), self.model, stored)
        now_s = time.monotonic()
        if now_s - self._written_s >= self._context.config.progress_every_s:
            self._written_s = now_s
            self._set(completed=self.answers.completed, failed=self.answers.failed)

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
                made[kind] = await to_thread.run_sync(linked, self._context, path, f"{row.id}_{kind}.jsonl", row)
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
        remove_bytes(self._context.batches_dir, row.id)

    async def _expire(self) -> None:
        """Store an error for each line that has no answer. Their custom_ids are read some at a time."""
        self.left.clear()
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

    def _fail(self, code: str, message: str) -> None:
        log.error("the batch fails: %s", message, extra={"batch_id": self.batch_id})
        if batches.find(self._db, self.batch_id, viewer=None) is not None:
            error = {"code": code, "line": None, "message": message, "param": None}
            self._set(status="failed", failed_s=time.time(), errors=[error])

    def _input_path(self, row: BatchRow) -> Path:
        # Ignores the expiry: a file that was valid when the batch was created stays valid while its bytes are here.
        if file_rows.find(self._db, row.input_file_id, viewer=None, now_s=0) is None:
            raise _Gone(f"the file {row.input_file_id} was deleted")
        return self._context.files_dir / row.input_file_id


def _most(read: Callable[[], dict[str, Any]], size: int) -> int:
    """What a line may cost at most; called only where its key has a quota."""
    request = read()
    return most_of(request["url"], request["body"], size)


class _Gone(Exception):
    """Something that the batch needs no longer exists."""
