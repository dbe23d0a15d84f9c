"""Stored answers of /v1/responses and chat completions, and responses in background
(https://platform.openai.com/docs/api-reference/responses, …/chat/list).

Gateways answer requests, send copies here, and fetch the conversation that an answer continues. A copy leaves after the
client has its answer, so a request for an unknown id waits briefly. After a restart all unfinished responses in
background are requested again; each waits for limits of its key for a day at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from appliance.controller.access.model_access import caller_of, check_may_ask
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import INTERNAL_ERROR, KEY_ENDED, Kind, TaskFailed
from appliance.controller.http.resource import Resource, list_object, metadata_of, part, sliced
from appliance.controller.http.routers import Metadata, StrictBody, as_json, make_router, needs, takes, unaudited
from appliance.controller.interfaces.errors import ApiError, BadRequest, NotFound, shown
from appliance.controller.interfaces.principal import GATEWAY, INFERENCE, Caller
from appliance.controller.responses import objects
from appliance.controller.responses.objects import COMPLETION, Object, completion_object
from appliance.store import keys
from appliance.store.database import Part
from appliance.store.rows import RESPONSES as ROWS
from appliance.store.rows import UNFINISHED, AnswerKind, ResponseRow, TaskRow

log = logging.getLogger("appliance.controller")

TASKS = "responses"
URL = "/v1/responses"
MAX_COPIES_BYTES = 64 << 20
"""Of a gateway's copies of answers."""
COMMENT_EVERY_S, STATUS_EVERY_S = 15.0, 0.2
_KEPT = ("id", "created_at", "background", "store", "previous_response_id", "error")
"""Fields of a response in background that the engine's answer doesn't change."""
_NOT_ASKED = ("background", "stream", "stream_options", "previous_response_id")
"""Fields of its request that no engine gets."""
_CODES = {INTERNAL_ERROR: "server_error", KEY_ENDED: "invalid_prompt"}
"""OpenAI's responses have these codes only."""
DAY_S = 86400.0
ARRIVES_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.02
RESPONSES = Resource("response", URL, (INFERENCE,), ROWS.find_visible, fields=("status",))
_NOT_FOUND = "chat_completion_not_found"
COMPLETIONS = Resource("completion", "/v1/chat/completions", (INFERENCE,), ROWS.find_visible, code=_NOT_FOUND)


class CompletionUpdate(StrictBody):
    metadata: Metadata | None


class StoredResponses:
    """Stored answers of all owners. `viewer`: the requesting owner, who sees only their own answers; None: an admin or
    the box."""

    def __init__(self, context: ControllerContext):
        self._context, self._db, self._config, self._quotas = context, context.db, context.config, context.quotas
        context.tasks.add(Kind(TASKS, self.run, self.fail, "response"))

    async def take(self, copies: list[Any]) -> int:
        """Store copies from a gateway: each {"key", "previous", "input", "response"}; for a chat completion, `input` is
        the request's object. Returns the number of new copies. Raises ApiError 507."""
        if not self._config.responses_kept_days:
            return 0
        self._quotas.disk.check()  # gateways count refused copies as not stored
        return await asyncio.to_thread(lambda: sum(map(self._add, copies)))

    def _add(self, copy: Any) -> bool:
        """Insert a copy in its own transaction, because it may have megabytes; return whether it was new."""
        row = objects.copy_row(copy, keys.owner_of(self._db, copy["key"]))
        with self._db.transaction():
            # A gateway may send old copies, even for a person who was forgotten meanwhile.
            has_left = keys.how_ended(self._db, row.key_id) and keys.without_key(self._db, [row.owner])
            if has_left or ROWS.find(self._db, row.id) is not None:  # a copy may arrive twice
                return False
            ROWS.insert(self._db, row)
        return True

    async def find(self, response_id: str, viewer: str | None, kind: AnswerKind = "response") -> ResponseRow:
        """Return the row; wait up to ARRIVES_WITHIN_S for its arrival. Raises NotFound."""
        until_s = time.monotonic() + ARRIVES_WITHIN_S
        find = partial(ROWS.find_visible, self._db, response_id, viewer=viewer)
        while (row := await asyncio.to_thread(find)) is None and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        if row is None or row.kind != kind:
            raise (RESPONSES if kind == "response" else COMPLETIONS).absent(response_id)
        return row

    async def conversation(self, response_id: str, viewer: str | None) -> list[Object]:
        """Return the items that a new response with this previous id continues. Raises BadRequest, also if there are
        too many items for one request."""
        try:
            await self.find(response_id, viewer)
        except NotFound as error:
            raise _cannot_continue(response_id, "not found") from error
        return await asyncio.to_thread(self._items, response_id, viewer)

    def _items(self, response_id: str, viewer: str | None) -> list[Object]:
        turns, size, missing = list[list[Object]](), 0, response_id
        for row in self.turns(response_id, viewer):
            if not row.finished:
                why = f"is {row.status}: wait for its end"
                raise _cannot_continue(response_id, why, "previous_response_not_ready")
            turns.append([*row.input, *objects.outputs(row)])
            size += len(orjson.dumps(turns[-1]))
            if size > self._config.json_body_bytes:
                why = f"ends a conversation of more than {self._config.json_body_bytes} bytes: begin a new one"
                raise _cannot_continue(response_id, why, "context_length_exceeded")
            missing = row.previous_id or ""
        if missing:
            raise _cannot_continue(missing, "not found")
        return [item for turn in reversed(turns) for item in turn]

    def turns(self, response_id: str | None, viewer: str | None) -> Iterator[ResponseRow]:
        """Yield this response and its predecessors, newest first, as far back as they are stored."""
        while response_id and (row := ROWS.find_visible(self._db, response_id, viewer=viewer)) is not None:
            yield row
            response_id = row.previous_id

    def keep_house(self, now_s: float) -> None:
        """Delete old answers, answers beyond an owner's bounds, and answers of owners without a live key. Runs on a
        thread."""
        db, ended = self._db, f"NOT {UNFINISHED['responses']}"
        lives = "SELECT owner FROM keys WHERE revoked_s IS NULL"
        left = f"SELECT id FROM keys WHERE revoked_s IS NOT NULL AND owner NOT IN ({lives})"
        db.delete("responses", f"key_id IN ({left})")
        db.delete("responses", f"created_s < ? AND {ended}", [now_s - self._config.responses_kept_days * DAY_S])
        newer = "sum(1) OVER newer > ?2 OR sum(bytes) OVER newer > ?3 AS is_over"
        held = f"SELECT seq, status, {newer} FROM responses WHERE owner = ?1 WINDOW newer AS (ORDER BY seq DESC)"
        for key_id in db.column("SELECT key_id, max(seq) FROM responses GROUP BY owner"):
            bounds, owner = self._quotas.bounds(key_id), keys.owner_of(db, key_id)
            over = f"seq IN (SELECT seq FROM ({held}) WHERE is_over AND {ended})"
            db.delete("responses", over, [owner, bounds.responses, bounds.responses_bytes])

    # --- background responses: a task each; the row stores the request until the response has ended

    def cancel(self, response_id: str) -> None:
        """Cancel a response, unless it has ended."""
        self._change(response_id, status="cancelled")
        self._context.tasks.restart(TASKS, response_id)

    async def follow(self, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of a response's stream with numbers above `after`, until the response has ended."""
        while (row := ROWS.find(self._db, response_id)) is not None:
            for place, event in objects.events(row.response, after):
                after = place
                yield event
            if row.finished:
                return
            comment_s = time.monotonic() + COMMENT_EVERY_S
            while self._db.value("SELECT status FROM responses WHERE id = ?", [response_id]) == row.status:
                if time.monotonic() >= comment_s:
                    yield b": waiting\n\n"
                    comment_s += COMMENT_EVERY_S
                await asyncio.sleep(STATUS_EVERY_S)

    async def run(self, task: TaskRow) -> None:
        """Run a background response. Raises TaskFailed."""
        row = ROWS.find(self._db, task.id)
        if row is None or row.finished:
            return
        model, body = (row.request or {}).get("model", ""), partial(self._body, task.id)
        try:
            answer = await self._context.asking.ask(row.key_id or None, model, URL, body, within_s=DAY_S)
        except ApiError as error:
            raise TaskFailed("invalid_prompt", error.message) from error
        if answer.error:
            raise TaskFailed("server_error" if answer.status >= 500 else "invalid_prompt", answer.error)
        fields = {name: value for name, value in answer.body.items() if name not in _KEPT}
        self._change(task.id, **fields | {"status": objects.ended_status(answer.body.get("status"))})

    async def _body(self, response_id: str) -> Object:
        """Return the request to the engine. Raises ApiError if earlier turns were deleted."""
        row = ROWS.find(self._db, response_id)
        if row is None:
            raise ApiError(404, "The response was deleted.")
        items = row.input
        if row.previous_id is not None:
            viewer = caller_of(self._db, row.key_id or None).viewer
            items = [*await self.conversation(row.previous_id, viewer), *items]
        self._change(response_id, status="in_progress")
        request = {name: value for name, value in (row.request or {}).items() if name not in _NOT_ASKED}
        return {**request, "input": items, "store": False}

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        code = _CODES.get(error.code, error.code)
        self._change(task.id, status="failed", error={"code": code, "message": str(error)})

    def _change(self, response_id: str, **fields: Any) -> None:
        """Change fields of a response's object, unless the response has ended."""
        with self._db.transaction():
            row = ROWS.find(self._db, response_id)
            if row is None or row.finished:
                return
            response = row.response | fields
            request = row.request if response["status"] == "in_progress" else None
            changes: dict[str, Any] = {"status": response["status"], "response": response, "request": request}
            ROWS.update(self._db, row.id, **changes, bytes=objects.bytes_of(row.input, response, request))


def _cannot_continue(response_id: str, why: str, code: str = "previous_response_not_found") -> BadRequest:
    return BadRequest(f"Previous response with id {shown(response_id)} {why}.", "previous_response_id", code)


# --- routes


async def _stored(response_id: str, request: Request, caller: Caller) -> ResponseRow:
    return await request.app.state.responses.find(response_id, caller.viewer)


async def _completion(completion_id: str, request: Request, caller: Caller) -> ResponseRow:
    return await request.app.state.responses.find(completion_id, caller.viewer, COMPLETION)


# The object in the URL, which a gateway may still be sending.
Stored = Annotated[ResponseRow, Depends(_stored)]
Completion = Annotated[ResponseRow, Depends(_completion)]


def routes(context: ControllerContext, stored: StoredResponses) -> list[APIRouter]:
    db = context.db
    router = RESPONSES.router()

    @router.post("", include_in_schema=False)
    @unaudited  # inference, which the access log and usage record
    async def create(request: Request, caller: Caller) -> Response:
        """Background responses only: a gateway forwards the body after its own checks."""
        body = await request.json()
        if not isinstance(body, dict) or body.get("background") is not True:
            raise BadRequest("This endpoint takes only responses in background.", "background")
        if not context.config.responses_kept_days:
            why = "This box stores no responses (responses_kept_days is 0), and one in background must be stored."
            raise BadRequest(why, "background", "unsupported_parameter")
        previous = body.get("previous_response_id")
        if previous is not None:
            await stored.conversation(previous, caller.viewer)
        check_may_ask(db, caller, str(body.get("model")))

        def make() -> ResponseRow:
            row = objects.queued_row(body, caller.key_id or "", caller.owner)
            context.quotas.check(caller, row.bytes, begins=True)
            context.tasks.start(TASKS, row.id, row.key_id or None)
            return ROWS.insert(db, row)

        row = RESPONSES.once(request, caller, await request.body(), make)
        return _stream(stored.follow(row.id, -1)) if body.get("stream") else as_json(row.response)

    @router.get("/{response_id}")
    def retrieve(
        row: Stored, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None
    ) -> Response:
        if not stream:
            return as_json(row.response)
        if not row.background:
            raise BadRequest("Only a response created in background can be streamed later.", "stream")
        return _stream(stored.follow(row.id, -1 if starting_after is None else starting_after))

    @router.delete("/{response_id}")
    async def delete(row: Stored) -> dict[str, Any]:
        ROWS.delete(db, row.id)
        context.tasks.restart(TASKS, row.id)
        return {"id": row.id, "object": "response", "deleted": True}

    @router.post("/{response_id}/cancel")
    async def cancel(row: Stored) -> Response:
        if not row.background:
            raise BadRequest("Cannot cancel a synchronous response.", "response_id")
        stored.cancel(row.id)
        return as_json((ROWS.find(db, row.id) or row).response)

    @router.get("/{response_id}/input_items")
    def input_items(row: Stored, caller: Caller, part: Annotated[Part, part(20, most=100)]) -> dict[str, Any]:
        turns = [objects.listed(turn, answered=turn.id != row.id) for turn in stored.turns(row.id, caller.viewer)]
        return sliced([item for turn in reversed(turns) for item in turn], **part)

    # For gateways; none of them forwards a client's request here.
    internal = make_router("/internal/responses", GATEWAY)

    @internal.post("", include_in_schema=False)
    @takes(lambda _: MAX_COPIES_BYTES)
    @unaudited  # copies of recorded inference
    async def take(request: Request) -> dict[str, int]:
        return {"stored": await stored.take(await request.json())}

    @internal.get("/context", include_in_schema=False)
    @needs(INFERENCE)
    async def conversation(id: Annotated[str, Query(max_length=256)], caller: Caller) -> Response:
        """Return the items of the conversation up to this response, as a JSON array."""
        return as_json(await stored.conversation(id, caller.viewer))

    completions = COMPLETIONS.router()

    @completions.get("")
    def list_completions(
        request: Request,
        caller: Caller,
        part: Annotated[Part, part(20, most=100, order="asc")],
        model: Annotated[str | None, Query(max_length=512)] = None,
        messages: bool = False,
    ) -> dict[str, Any]:
        """List stored completions. messages: the box's own parameter: include each completion's request messages."""
        where = f"kind = '{COMPLETION}' AND (? IS NULL OR model = ?)"  # the kind as a literal, for the partial index
        chosen = {"where": where, "parameters": [model, model], "unread": () if messages else ("input",)}
        page = ROWS.page_visible(db, viewer=caller.viewer, metadata=metadata_of(request), **chosen, **part)
        return list_object(page, lambda row: completion_object(row) | ({"messages": row.input} if messages else {}))

    @completions.get("/{completion_id}")
    def retrieve_completion(row: Completion) -> dict[str, Any]:
        return completion_object(row)

    @completions.post("/{completion_id}")
    async def update(row: Completion, body: CompletionUpdate) -> Response:
        ROWS.update(db, row.id, metadata=body.metadata)
        return as_json(completion_object(replace(row, metadata=body.metadata)))

    @completions.delete("/{completion_id}")
    async def delete_completion(row: Completion) -> dict[str, Any]:
        ROWS.delete(db, row.id)
        return {"id": row.id, "object": "chat.completion.deleted", "deleted": True}

    @completions.get("/{completion_id}/messages")
    def list_messages(row: Completion, part: Annotated[Part, part(20, most=100, order="asc")]) -> dict[str, Any]:
        return sliced([*objects.stored_messages(row)], **part)

    return [router, internal, completions]


def _stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
