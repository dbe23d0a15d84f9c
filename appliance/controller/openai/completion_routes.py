"""/v1/chat/completions: list, retrieve, describe and delete completions that were asked with `store`
(https://platform.openai.com/docs/api-reference/chat/list). The gateways have them answered, and send copies
(response_routes)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.paging import list_object, metadata_of, part, sliced
from appliance.controller.http.reading import answer
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import Metadata, StrictBody
from appliance.controller.interfaces.principal import INFERENCE, Caller
from appliance.controller.responses.completions import asked_messages, completion_object, stored_messages
from appliance.controller.responses.stored import StoredResponses, not_found
from appliance.store.database import Part
from appliance.store.objects import responses
from appliance.store.objects.responses import COMPLETION


class CompletionUpdate(StrictBody):
    metadata: Metadata | None


def routes(context: ControllerContext, stored: StoredResponses) -> APIRouter:
    router = make_router("/v1/chat/completions", INFERENCE, noun="completion")
    db = context.db

    @router.get("")
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

    @router.get("/{completion_id}", response_model=dict[str, Any])
    async def retrieve(completion_id: str, caller: Caller) -> Response:
        row = await stored.find(completion_id, caller.viewer, COMPLETION)
        return await answer(db, lambda: completion_object(row))

    @router.post("/{completion_id}", response_model=dict[str, Any])
    async def update(completion_id: str, body: CompletionUpdate, caller: Caller) -> Response:
        await stored.find(completion_id, caller.viewer, COMPLETION)
        responses.set_metadata(db, completion_id, body.metadata)
        row = await stored.find(completion_id, caller.viewer, COMPLETION)
        return await answer(db, lambda: completion_object(row))

    @router.delete("/{completion_id}")
    async def delete(completion_id: str, caller: Caller) -> dict[str, Any]:
        row = await stored.find(completion_id, caller.viewer, COMPLETION)
        if not responses.delete(db, row.id):  # another request was faster
            raise not_found(completion_id, COMPLETION)
        return {"id": row.id, "object": "chat.completion.deleted", "deleted": True}

    @router.get("/{completion_id}/messages", response_model=dict[str, Any])
    async def list_messages(
        completion_id: str, caller: Caller, part: Annotated[Part, part(20, most=100, order="asc")]
    ) -> Response:
        row = await stored.find(completion_id, caller.viewer, COMPLETION)
        return await answer(db, lambda: sliced(stored_messages(row), "message", **part))

    return router
