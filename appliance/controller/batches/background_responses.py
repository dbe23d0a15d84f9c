"""Asks for background responses, a task each.

State that must outlive the controller is in the response's row: the request, while it is unfinished. After a restart
all unfinished ones are asked for again. A response waits while its key's limits are used up, a day at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import orjson

from appliance.controller.access.model_access import viewer_of
from appliance.controller.bus.asking import Asker
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import INTERNAL_ERROR, KEY_ENDED, Kind, TaskFailed, until_room
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.records import EngineAnswer
from appliance.controller.responses import objects
from appliance.controller.responses.items import items_of
from appliance.controller.responses.stored import DAY_S, StoredResponses
from appliance.store.ids import new_id
from appliance.store.objects import responses
from appliance.store.rows import UNFINISHED_RESPONSE, ResponseRow, TaskRow

RESPONSES = "responses"
URL = "/v1/responses"
COMMENT_EVERY_S, LOOK_EVERY_S = 15.0, 0.2
_CODES = {INTERNAL_ERROR: "server_error", KEY_ENDED: "invalid_prompt"}
"""OpenAI's responses have these codes only."""
_TOO_LATE = "The response had no answer within 24 hours: no engine had room, or its key had used up its limits."


class BackgroundResponses:
    def __init__(self, context: ControllerContext, stored: StoredResponses):
        self._context, self._db, self._stored = context, context.db, stored
        context.tasks.add(Kind(RESPONSES, self.run, self.fail, "response"))

    def cancel(self, row: ResponseRow) -> ResponseRow:
        """Cancel it; returns the row afterwards. A response that has ended, even since the row was read, stays
        unchanged."""
        standing = responses.standing(self._db, row.id)
        if standing is not None and standing[0] in UNFINISHED_RESPONSE:
            self._end(row, {**orjson.loads(row.response), "status": "cancelled"})
            self._context.tasks.restart(RESPONSES, row.id)
        return responses.find(self._db, row.id) or row

    async def follow(self, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Events of its stream with numbers above `after`, until it has ended."""
        while (row := responses.find(self._db, response_id)) is not None:
            sent = after
            for place, event in objects.events(orjson.loads(row.response), sent):
                after = place
                yield event
            if after > sent:
                continue  # it may have changed in the meantime
            if row.finished:
                return
            until_s = time.monotonic() + COMMENT_EVERY_S
            while (standing := responses.standing(self._db, response_id)) is not None and standing[0] == row.status:
                if time.monotonic() >= until_s:
                    yield b": waiting\n\n"
                    break
                await asyncio.sleep(LOOK_EVERY_S)

    # --- asking

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = responses.find(self._db, task.id)
        if row is None or row.finished:
            return
        model, body = orjson.loads(row.request or "{}").get("model", ""), partial(self._body, task.id)
        try:
            async with asyncio.timeout(row.created_s + DAY_S - time.time()):
                asker = Asker(row.key_id or None, row.owner)
                answer = await self._context.asking.ask(asker, model, URL, body, new_id("req_"))
        except TimeoutError:
            raise TaskFailed("server_error", _TOO_LATE) from None
        except ApiError as error:
            raise TaskFailed("invalid_prompt", error.message) from error
        await until_room(partial(self._take, task.id, answer))

    async def _body(self, response_id: str) -> dict[str, Any]:
        """Raises ApiError where the earlier turns are gone."""
        row = responses.find(self._db, response_id)
        if row is None:
            raise ApiError(404, "The response was deleted.")
        before = None
        if row.previous_id is not None:
            viewer = viewer_of(self._db, row.key_id or None)
            earlier = await self._stored.before(row.previous_id, viewer)
            before = await asyncio.to_thread(self._stored.items, earlier)
        request = {"input": orjson.loads(row.input), **orjson.loads(row.request or "{}")}
        with self._db.transaction():
            now = responses.find(self._db, response_id)  # it may have been cancelled meanwhile
            if now is not None and now.status == "queued":
                self._set(now, {**orjson.loads(now.response), "status": "in_progress"}, status="in_progress")
        return objects.engine_body(request, None if before is None else before + items_of(request["input"]))

    async def _take(self, response_id: str, answer: EngineAnswer) -> None:
        """Raises TaskFailed for an answer that is an error."""
        row = responses.find(self._db, response_id)
        if row is None or row.finished:
            return
        if answer.status != 200:
            error = answer.body.get("error") or {}
            code = "server_error" if answer.status >= 500 else "invalid_prompt"
            raise TaskFailed(code, str(error.get("message") or f"The request failed with status {answer.status}."))
        self._end(row, objects.answered(orjson.loads(row.response), answer.body))

    # --- the row

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        row = responses.find(self._db, task.id)
        if row is not None and not row.finished:
            code = _CODES.get(error.code, error.code)
            self._end(row, objects.failed(orjson.loads(row.response), code, str(error)))

    def _end(self, row: ResponseRow, response: dict[str, Any]) -> None:
        status = responses.ended_status(response.get("status"))
        self._set(row, {**response, "status": status}, status=status, request=None)

    def _set(self, row: ResponseRow, response: dict[str, Any], **changes: Any) -> None:
        text = orjson.dumps(response).decode()
        size = responses.bytes_of(row.input, text, row.request if "request" not in changes else None)
        responses.update(self._db, row.id, response=text, bytes=size, **changes)
