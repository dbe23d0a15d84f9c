"""Asks for background responses, a task each.

State that must outlive the controller is in the response's row: the request, while it is unfinished. After a restart
all unfinished ones are asked for again. A response waits while its key's limits are used up, a day at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import orjson

from appliance.controller.access.model_access import viewer_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import INTERNAL_ERROR, KEY_ENDED, Kind, TaskFailed
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.responses import objects
from appliance.controller.responses.objects import Object, items_of
from appliance.controller.responses.stored import DAY_S, StoredResponses
from appliance.store.objects import responses
from appliance.store.rows import TaskRow

RESPONSES = "responses"
URL = "/v1/responses"
COMMENT_EVERY_S, LOOK_EVERY_S = 15.0, 0.2
_CODES = {INTERNAL_ERROR: "server_error", KEY_ENDED: "invalid_prompt"}
"""OpenAI's responses have these codes only."""


class BackgroundResponses:
    def __init__(self, context: ControllerContext, stored: StoredResponses):
        self._context, self._db, self._stored = context, context.db, stored
        context.tasks.add(Kind(RESPONSES, self.run, self.fail, "response"))

    def cancel(self, response_id: str) -> None:
        """One that has ended stays unchanged."""
        self._change(response_id, lambda before: {**before, "status": "cancelled"})
        self._context.tasks.restart(RESPONSES, response_id)

    async def follow(self, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Events of its stream with numbers above `after`, until it has ended."""
        while (row := responses.find(self._db, response_id)) is not None:
            for place, event in objects.events(orjson.loads(row.response), after):
                after = place
                yield event
            if row.finished:
                return
            comment_s = time.monotonic() + COMMENT_EVERY_S
            while responses.status(self._db, response_id) == row.status:
                if time.monotonic() >= comment_s:
                    yield b": waiting\n\n"
                    comment_s += COMMENT_EVERY_S
                await asyncio.sleep(LOOK_EVERY_S)

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = responses.find(self._db, task.id)
        if row is None or row.finished:
            return
        model, body = orjson.loads(row.request or "{}").get("model", ""), partial(self._body, task.id)
        try:
            answer = await self._context.asking.ask(row.key_id or None, model, URL, body, within_s=DAY_S)
        except ApiError as error:
            raise TaskFailed("invalid_prompt", error.message) from error
        if answer.error:
            raise TaskFailed("server_error" if answer.status >= 500 else "invalid_prompt", answer.error)
        self._change(task.id, lambda before: objects.answered(before, answer.body))

    async def _body(self, response_id: str) -> Object:
        """Raises ApiError where the earlier turns are gone."""
        row = responses.find(self._db, response_id)
        if row is None:
            raise ApiError(404, "The response was deleted.")
        request = {"input": orjson.loads(row.input), **orjson.loads(row.request or "{}")}
        items = None
        if row.previous_id is not None:
            viewer = viewer_of(self._db, row.key_id or None)
            items = [*await self._stored.conversation(row.previous_id, viewer), *items_of(request["input"])]
        self._change(response_id, lambda before: {**before, "status": "in_progress"})
        return objects.engine_body(request, items)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        code = _CODES.get(error.code, error.code)
        self._change(task.id, lambda before: objects.failed(before, code, str(error)))

    def _change(self, response_id: str, change: Callable[[Object], Object]) -> None:
        """Change the object of a response, unless it has ended."""
        with self._db.transaction():
            row = responses.find(self._db, response_id)
            if row is None or row.finished:
                return
            made = change(orjson.loads(row.response))
            request, text = row.request if made["status"] == "in_progress" else None, orjson.dumps(made).decode()
            changes: dict[str, Any] = {"status": made["status"], "response": text, "request": request}
            responses.update(self._db, row.id, **changes, bytes=responses.bytes_of(row.input, text, request))
