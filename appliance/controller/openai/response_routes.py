"""/v1/responses/ID and /v1/chat/completions/ID: retrieve, list, describe and delete stored answers
(https://platform.openai.com/docs/api-reference/responses, …/chat/list). The gateways have them answered: they send
copies here, and fetch the conversation that an answer continues. Responses in background are made here."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from appliance.controller.access.model_access import check_may_ask
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.idempotency import Attempt
from appliance.controller.http.paging import list_object, metadata_of, part, sliced
from appliance.controller.http.reading import as_json
from appliance.controller.http.routers import make_router, needs, takes, unaudited
from appliance.controller.http.strict_body import Metadata, StrictBody
from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.interfaces.principal import GATEWAY, INFERENCE, Caller, Principal
from appliance.controller.responses import objects
from appliance.controller.responses.objects import asked_messages, completion_object, items_of, listed, stored_messages
from appliance.controller.responses.stored import RESPONSES, StoredResponses
from appliance.store.database import Part
from appliance.store.objects import responses
from appliance.store.objects.responses import COMPLETION
from appliance.store.rows import ResponseRow

MAX_COPIES_BYTES = 64 << 20
"""Of a gateway's copies of answers."""


class CompletionUpdate(StrictBody):
    metadata: Metadata | None


async def _stored(response_id: str, request: Request, caller: Caller) -> ResponseRow:
    return await request.app.state.responses.find(response_id, caller.viewer)


async def _completion(completion_id: str, request: Request, caller: Caller) -> ResponseRow:
    return await request.app.state.responses.find(completion_id, caller.viewer, COMPLETION)


# What the URL names, which may be on its way from a gateway.
Stored = Annotated[ResponseRow, Depends(_stored)]
Completion = Annotated[ResponseRow, Depends(_completion)]


def routes(context: ControllerContext, stored: StoredResponses) -> list[APIRouter]:
    db = context.db
    router = make_router("/v1/responses", INFERENCE, noun="response", fields=("status",))

    @router.post("", include_in_schema=False)
    @unaudited  # a request of inference, as the access log and usage have it
    async def create(request: Request, caller: Caller) -> Response:
        """Background responses only: a gateway forwards the body after its own checks."""
        body = await request.json()

        if not isinstance(body, dict) or body.get("background") is not True:
            raise BadRequest("This endpoint takes only responses in background.", param="background")
        if not context.config.responses_kept_days:
            raise BadRequest(
                "This box stores no responses (responses_kept_days is 0), and a response in background must be stored.",
                param="background",
                code="unsupported_parameter",
            )
        attempt = Attempt(request, caller, "/v1/responses", body, partial(responses.find, db))
        if (row := attempt.earlier()) is None:
            previous = body.get("previous_response_id")
            if previous is not None:
                await stored.conversation(previous, caller.viewer)
            check_may_ask(db, caller, str(body.get("model")))

            def make() -> ResponseRow:
                row = _queued(body, caller)
                context.quotas.check(caller, row.bytes, begins=True)
                responses.insert(db, row)
                context.tasks.start(RESPONSES, row.id, row.key_id or None)
                return row

            row = attempt.once(make)
        return _stream(stored.follow(row.id, -1)) if body.get("stream") else _json(row.response.encode())

    @router.get("/{response_id}")
    def retrieve(
        row: Stored, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None
    ) -> Response:
        if not stream:
            return _json(row.response.encode())
        if not row.background:
            raise BadRequest("Only a response created in background can be streamed later.", param="stream")
        return _stream(stored.follow(row.id, -1 if starting_after is None else starting_after))

    @router.delete("/{response_id}")
    async def delete(row: Stored) -> dict[str, Any]:
        responses.delete(db, row.id)
        context.tasks.restart(RESPONSES, row.id)
        return {"id": row.id, "object": "response", "deleted": True}

    @router.post("/{response_id}/cancel")
    async def cancel(row: Stored) -> Response:
        if not row.background:
            raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
        stored.cancel(row.id)
        return _json((responses.find(db, row.id) or row).response.encode())

    @router.get("/{response_id}/input_items")
    def input_items(row: Stored, caller: Caller, part: Annotated[Part, part(20, most=100)]) -> dict[str, Any]:
        turns = [listed(turn, answered=turn.id != row.id) for turn in stored.turns(row.id, caller.viewer)]
        return sliced([item for turn in reversed(turns) for item in turn], "input item", **part)

    # For gateways; none of them forwards a client's request here.
    internal = make_router("/internal/responses", GATEWAY)

    @internal.post("", include_in_schema=False)
    @takes(lambda _: MAX_COPIES_BYTES)
    @unaudited  # copies of answers to requests of inference
    async def take(request: Request) -> dict[str, int]:
        return {"stored": await stored.take(await request.json())}

    @internal.get("/context", include_in_schema=False)
    @needs(INFERENCE)
    async def conversation(id: Annotated[str, Query(max_length=256)], caller: Caller) -> Response:
        """The items of the conversation up to this response, a JSON array."""
        return as_json(await stored.conversation(id, caller.viewer))

    completions = make_router("/v1/chat/completions", INFERENCE, noun="completion")

    @completions.get("")
    def list_completions(
        request: Request,
        caller: Caller,
        part: Annotated[Part, part(20, most=100, order="asc")],
        model: Annotated[str | None, Query(max_length=512)] = None,
        messages: bool = False,
    ) -> dict[str, Any]:
        """messages: ours, each with what it was asked with."""
        metadata = metadata_of(request)
        page = responses.page_completions(
            db, viewer=caller.viewer, model=model, metadata=metadata, messages=messages, **part
        )
        return list_object(
            page, lambda row: completion_object(row) | ({"messages": asked_messages(row)} if messages else {})
        )

    @completions.get("/{completion_id}")
    def retrieve_completion(row: Completion) -> dict[str, Any]:
        return completion_object(row)

    @completions.post("/{completion_id}")
    async def update(row: Completion, body: CompletionUpdate) -> Response:
        responses.update(db, row.id, metadata=body.metadata)
        return as_json(completion_object(replace(row, metadata=body.metadata)))

    @completions.delete("/{completion_id}")
    async def delete_completion(row: Completion) -> dict[str, Any]:
        responses.delete(db, row.id)
        return {"id": row.id, "object": "chat.completion.deleted", "deleted": True}

    @completions.get("/{completion_id}/messages")
    def list_messages(row: Completion, part: Annotated[Part, part(20, most=100, order="asc")]) -> dict[str, Any]:
        return sliced(stored_messages(row), "message", **part)

    return [router, internal, completions]


def _queued(body: dict[str, Any], caller: Principal) -> ResponseRow:
    now_s, response_id = time.time(), f"resp_{secrets.token_hex(16)}"
    given = orjson.dumps(items_of(body["input"])).decode()
    request = orjson.dumps({name: value for name, value in body.items() if name != "input"}).decode()
    made = orjson.dumps(objects.queued(response_id, body, now_s)).decode()
    return ResponseRow(
        id=response_id,
        key_id=caller.key_id or "",
        owner=caller.owner,
        status="queued",
        created_s=now_s,
        background=1,
        request=request,
        bytes=responses.bytes_of(given, request, made),
        input=given,
        response=made,
        previous_id=body.get("previous_response_id"),
    )


def _stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
