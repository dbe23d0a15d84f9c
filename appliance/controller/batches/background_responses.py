"""Asks for background responses, one task each.

State that must outlive the controller is in the response's row: the request, while it is unfinished. After a restart
all unfinished ones are asked for again. A response waits while its key's limits are used up, a day at most.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from appliance.controller.access.model_access import viewer_of
from appliance.controller.bus.asking import Asker
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.records import EngineAnswer
from appliance.controller.responses import objects
from appliance.controller.responses.items import items_of
from appliance.controller.responses.stored import DAY_S, StoredResponses
from appliance.store.ids import new_id
from appliance.store.objects import responses
from appliance.store.records import keys
from appliance.store.rows import UNFINISHED_RESPONSE, ResponseRow
from runtime.background_tasks import RunningTasks

log = logging.getLogger("appliance.controller")

URL = "/v1/responses"
COMMENT_EVERY_S = 15.0
ROOM_EVERY_S = 2.0  # on a full disk
_REVOKED_WITHIN_S = 10.0
KEY_ENDED = "The API key of this response {}."
_TOO_LATE = "The response had no answer within 24 hours: no engine had room, or its key had used up its limits."


class BackgroundResponses:
    """`start` begins with the stored responses; `begin` adds a new one."""

    def __init__(self, context: ControllerContext, stored: StoredResponses):
        self._context, self._db, self._stored = context, context.db, stored
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = RunningTasks()

    def start(self) -> None:
        for row in responses.unfinished(self._db):
            self.begin(row)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ending.stop()

    def begin(self, row: ResponseRow) -> None:
        model = orjson.loads(row.request or "{}").get("model", "")
        asked = partial(self._ask, row.id, model, Asker(row.key_id or None, row.owner), row.created_s + DAY_S)
        task = self._tasks[row.id] = self._context.background.keep("background responses", asked)
        task.add_done_callback(lambda _: self._tasks.pop(row.id, None))

    def forget(self, response_id: str) -> None:
        """The response was cancelled or deleted: stop the engine that works on it."""
        if (task := self._tasks.pop(response_id, None)) is not None:
            task.cancel()

    def cancel(self, row: ResponseRow) -> ResponseRow:
        """Cancel it; returns the row afterwards. A response that has ended, even since the row was read, stays
        unchanged."""
        standing = responses.standing(self._db, row.id)
        if standing is not None and standing[0] in UNFINISHED_RESPONSE:
            self._end(row, {**orjson.loads(row.response), "status": "cancelled"})
            self.forget(row.id)
        return responses.find(self._db, row.id) or row

    def revoke(self, key_id: str) -> list[str]:
        """Stop what engines do for a revoked key; returns the ids of its responses. Call it in the transaction that
        revokes the key. Their rows fail afterwards, one by one: 200 rows of 1 MB held the loop for 4.5 s, and the
        gateways learnt only then that the key was revoked."""
        ids = responses.unfinished_ids(self._db, key_id=key_id)
        for response_id in ids:
            self.forget(response_id)
        if ids:
            self._ending.add(self._context.background.keep("responses of revoked keys", self._end_revoked))
        return ids

    async def revoked_ended(self) -> None:
        """Returns when the responses of revoked keys have failed, or if this takes long: on a full disk the writes are
        repeated until they succeed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REVOKED_WITHIN_S):
                await self._ending.idle()

    async def _end_revoked(self) -> None:
        for response_id in responses.unfinished_of_revoked(self._db):
            row = await asyncio.to_thread(responses.find, self._db, response_id)
            if row is not None and not row.finished:
                self.forget(response_id)
                self._fail(row, "invalid_prompt", KEY_ENDED.format(keys.how_ended(self._db, row.key_id)))

    async def follow(self, response_id: str, after: int, owner: str) -> AsyncGenerator[bytes, None]:
        """Events of its stream with numbers above `after`, until it has ended."""
        db = self._db
        while (row := await asyncio.to_thread(responses.find, db, response_id)) is not None:
            sent_after = after
            events = objects.events(await asyncio.to_thread(orjson.loads, row.response), sent_after)
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                after = event[0]
                yield event[1]
            if after > sent_after:
                continue  # it may have changed in the meantime
            if row.finished:
                return
            standing = responses.standing(db, response_id)
            if standing is None or standing[0] != row.status:
                continue  # it changed while a thread read it, before this task waited for changes
            if not await self._stored.news(response_id, COMMENT_EVERY_S):
                yield b": waiting\n\n"

    # --- asking

    async def _ask(self, response_id: str, model: str, asker: Asker, until_s: float) -> None:
        standing = responses.standing(self._db, response_id)
        if standing is None or standing[0] not in UNFINISHED_RESPONSE:
            return
        try:
            async with asyncio.timeout(until_s - time.time()):
                body = partial(self._body, response_id)
                answer = await self._context.asking.ask(asker, model, URL, body, new_id("req_"))
        except TimeoutError:
            end = partial(self._fail, code="server_error", message=_TOO_LATE)
        except ApiError as error:
            end = partial(self._fail, code="invalid_prompt", message=error.message)
        except Exception as error:
            if not isinstance(error, sqlite3.Error):
                # A bug; without this the response would be in progress forever, with the reason only in a log.
                message = f"The response failed: {type(error).__name__}: {error}."
                await self._written(response_id, partial(self._fail, code="server_error", message=message))
            raise
        else:
            end = partial(self._take, answer=answer)
        await self._written(response_id, end)

    async def _written(self, response_id: str, end: Callable[[ResponseRow], None]) -> None:
        """A write that fails on a full disk is repeated: what an engine has computed is not discarded."""
        while True:
            try:
                row = responses.find(self._db, response_id)
                if row is not None and not row.finished:
                    end(row)
                return
            except sqlite3.Error as error:
                log.warning("the end of a background response cannot be written yet: %s", error)
            await asyncio.sleep(ROOM_EVERY_S)

    async def _body(self, response_id: str) -> dict[str, Any]:
        """Raises ApiError where it or the earlier turns are gone."""
        row = responses.find(self._db, response_id)
        if row is None:
            raise ApiError(404, "The response was deleted.")
        if how := keys.how_ended(self._db, row.key_id):
            raise ApiError(401, KEY_ENDED.format(how))
        before = None
        if row.previous_id is not None:
            viewer = viewer_of(self._db, row.key_id or None)
            earlier = await self._stored.before(row.previous_id, viewer)
            before = [item async for turn in self._stored.items(earlier, viewer) for item in turn.items]
        # An older box has kept the input in the request, too.
        request = {"input": orjson.loads(row.input), **orjson.loads(row.request or "{}")}
        if row.status == "queued":
            self._set(row, {**orjson.loads(row.response), "status": "in_progress"}, status="in_progress")
        return objects.engine_body(request, None if before is None else before + items_of(request["input"]))

    def _take(self, row: ResponseRow, answer: EngineAnswer) -> None:
        if answer.status == 200:
            self._end(row, objects.answered(orjson.loads(row.response), answer.body))
            return
        error = answer.body.get("error") or {}
        code = "server_error" if answer.status >= 500 else "invalid_prompt"
        self._fail(row, code, str(error.get("message") or f"The request failed with status {answer.status}."))

    # --- the row

    def _fail(self, row: ResponseRow, code: str, message: str) -> None:
        self._end(row, objects.failed(orjson.loads(row.response), code, message))

    def _end(self, row: ResponseRow, response: dict[str, Any]) -> None:
        # A newer engine may report a status that rows do not have.
        known = ("completed", "incomplete", "failed", "cancelled")
        status = response["status"] if response.get("status") in known else "completed"
        self._set(row, {**response, "status": status}, status=status, request=None)

    def _set(self, row: ResponseRow, response: dict[str, Any], **changes: Any) -> None:
        text = orjson.dumps(response).decode()
        size = responses.bytes_of(row.input, text, row.request if "request" not in changes else None)
        responses.update(self._db, row.id, response=text, bytes=size, **changes)
        self._stored.tell(row.id)
