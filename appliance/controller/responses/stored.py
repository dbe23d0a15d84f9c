"""Stores answers of /v1/responses, and chat completions that are to be kept: received from the gateways, looked up by
id, deleted when they expire; and asks for responses in background.

A gateway sends the copy after the client has its answer, so a fast client may ask for a response that has not arrived:
a request for an unknown id waits for it briefly. After a restart all unfinished responses in background are asked for
again; one waits while its key's limits are used up, a day at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

import orjson

from appliance.controller.access.model_access import viewer_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import INTERNAL_ERROR, KEY_ENDED, Kind, TaskFailed
from appliance.controller.interfaces.errors import ApiError, BadRequest, NotFound, shown
from appliance.controller.responses import objects
from appliance.controller.responses.objects import Object, completion_row, items_of, turn_items
from appliance.store.objects import responses
from appliance.store.objects.responses import COMPLETION
from appliance.store.records import keys
from appliance.store.rows import AnswerKind, ResponseRow, TaskRow

log = logging.getLogger("appliance.controller")

RESPONSES = "responses"
URL = "/v1/responses"
COMMENT_EVERY_S, STATUS_EVERY_S = 15.0, 0.2
_CODES = {INTERNAL_ERROR: "server_error", KEY_ENDED: "invalid_prompt"}
"""OpenAI's responses have these codes only."""
DAY_S = 86400.0
ARRIVES_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.02
_ENGINES_IDS = {"response": "resp_", COMPLETION: "chatcmpl-"}
"""How the ids of engines begin, the only ones that can be on their way."""


class StoredResponses:
    """Responses and chat completions of all owners. `viewer`: the calling owner, who sees only its own; None: an admin
    or the box."""

    def __init__(self, context: ControllerContext):
        self._context, self._db, self._config, self._quotas = context, context.db, context.config, context.quotas
        context.tasks.add(Kind(RESPONSES, self.run, self.fail, "response"))

    async def take(self, copies: list[Any]) -> int:
        """Store copies from a gateway: each {"key", "previous", "input", "response"}; of a chat completion `input` is
        what it was asked with, an object. Returns how many were new."""
        if not self._config.responses_kept_days:
            return 0
        if self._quotas.disk.room_bytes() <= 0:
            log.error("%d answered responses are not stored: the disk is short of space", len(copies))
            return 0
        return await asyncio.to_thread(lambda: sum(map(self._add, copies)))

    def _add(self, copy: Any) -> bool:
        """Whether it is new. One transaction each, for a copy may have megabytes."""
        try:
            row = _row(copy, keys.owner_of(self._db, copy["key"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            log.error("a gateway sent a response that cannot be stored: %s: %.200s", type(error).__name__, error)
            return False
        with self._db.transaction():
            # A gateway keeps copies while the controller is away; they would bring back a person who was forgotten.
            return not keys.owner_has_left(self._db, row.key_id) and responses.insert(self._db, row)

    async def find(self, response_id: str, viewer: str | None, kind: AnswerKind = "response") -> ResponseRow:
        """Raises NotFound."""
        waits_s = ARRIVES_WITHIN_S if response_id.startswith(_ENGINES_IDS[kind]) else 0.0
        until_s = time.monotonic() + waits_s
        while (row := await asyncio.to_thread(responses.find_visible, self._db, response_id, viewer=viewer)) is None:
            if time.monotonic() >= until_s:
                raise not_found(response_id, kind)
            await asyncio.sleep(_LOOK_EVERY_S)
        if row.kind != kind:
            raise not_found(response_id, kind)
        return row

    async def conversation(self, response_id: str, viewer: str | None) -> list[Object]:
        """The items that a new response with this previous id continues from. Raises BadRequest, also when they exceed
        what one request may hold."""
        try:
            await self.find(response_id, viewer)
        except NotFound as error:
            raise _previous_not_found(response_id) from error
        return await asyncio.to_thread(self._items, response_id, viewer)

    def _items(self, response_id: str, viewer: str | None) -> list[Object]:
        turns, size, missing = list[list[Object]](), 0, response_id
        for row in self.turns(response_id, viewer):
            if not row.finished:
                text = f"Previous response with id {shown(response_id)} is {row.status}: wait for its end."
                raise _cannot_continue(text, "previous_response_not_ready")
            turns.append(turn_items(row))
            size += len(orjson.dumps(turns[-1]))
            if size > self._config.json_body_bytes:
                most = self._config.json_body_bytes
                text = f"The conversation up to {shown(response_id)} has more than {most} bytes: begin a new one."
                raise _cannot_continue(text, "context_length_exceeded")
            missing = row.previous_id or ""
        if missing:
            raise _previous_not_found(missing)
        return [item for turn in reversed(turns) for item in turn]

    def turns(self, response_id: str | None, viewer: str | None) -> Iterator[ResponseRow]:
        """This response and those that lead to it, the newest first, as far back as they are there."""
        while response_id and (row := responses.find_visible(self._db, response_id, viewer=viewer)) is not None:
            yield row
            response_id = row.previous_id

    def keep_house(self, now_s: float) -> None:
        """Delete what is too old, what is past its owner's bounds, and what belongs to nobody any more. On a thread."""
        responses.delete_of_leavers(self._db)
        responses.delete_before(self._db, now_s - self._config.responses_kept_days * DAY_S)
        for key_id in responses.keys_of_owners(self._db):
            bounds, owner = self._quotas.bounds(key_id), keys.owner_of(self._db, key_id)
            responses.shrink(self._db, owner, number=bounds.responses, size=bounds.responses_bytes)

    # --- in background: a task each; the row has the request until the response has ended

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
                await asyncio.sleep(STATUS_EVERY_S)

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
            items = [*await self.conversation(row.previous_id, viewer), *items_of(request["input"])]
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


def not_found(response_id: str, kind: AnswerKind) -> ApiError:
    if kind == COMPLETION:
        text = f"Chat completion with id {shown(response_id)} not found."
        return NotFound(text, param="completion_id", code="chat_completion_not_found")
    return NotFound(f"Response with id {shown(response_id)} not found.", param="response_id", code="response_not_found")


def _previous_not_found(response_id: str) -> ApiError:
    return _cannot_continue(f"Previous response with id {shown(response_id)} not found.", "previous_response_not_found")


def _cannot_continue(message: str, code: str) -> ApiError:
    return BadRequest(message, param="previous_response_id", code=code)


def _row(copy: dict[str, Any], owner: str) -> ResponseRow:
    """Raises KeyError, TypeError, AttributeError, ValueError for what is no copy."""
    response = copy["response"]
    if response.get("object") == COMPLETION:
        return completion_row(copy["key"], owner, copy["input"], response)
    given, answered = orjson.dumps(items_of(copy["input"])).decode(), orjson.dumps(response).decode()
    return ResponseRow(
        id=response["id"],
        key_id=copy["key"],
        status=responses.ended_status(response["status"]),
        created_s=float(response["created_at"]),
        bytes=responses.bytes_of(given, answered),
        input=given,
        response=answered,
        previous_id=copy["previous"],
        owner=owner,
    )
