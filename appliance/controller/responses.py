"""/v1/responses/ID: what was answered, to be retrieved, listed, deleted
(https://platform.openai.com/docs/api-reference/responses). Answering is the gateways' business: they send copies here,
and ask for what an answer goes on from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response

from appliance.controller.errors import BadRequest, Forbidden, shown
from appliance.controller.paging import After
from appliance.controller.principal import ADMIN, INFERENCE, Caller
from appliance.controller.response_items import conversation, listed
from appliance.controller.routers import make_router
from appliance.controller.stored_responses import StoredResponses

Limit = Annotated[int, Query(ge=0, le=100)]


def routes(stored: StoredResponses) -> APIRouter:
    router = make_router("/v1/responses", INFERENCE)

    @router.get("/{response_id}")
    async def retrieve(response_id: str, caller: Caller, stream: bool = False) -> Response:
        row = await stored.find(response_id, caller.key_id)
        if stream:
            raise BadRequest("Only a response that was made in background can be streamed once it exists.",
                             param="stream", code="unsupported_parameter")  # fmt: skip
        return _json(row.response.encode())

    @router.delete("/{response_id}")
    async def delete(response_id: str, caller: Caller) -> dict[str, Any]:
        row = await stored.find(response_id, caller.key_id)
        stored.delete(row)
        return {"id": row.id, "object": "response", "deleted": True}

    @router.post("/{response_id}/cancel")
    async def cancel(response_id: str, caller: Caller) -> Response:
        row = await stored.find(response_id, caller.key_id)
        if not row.background:
            raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
        return _json(row.response.encode())

    @router.get("/{response_id}/input_items")
    async def input_items(
        response_id: str, caller: Caller, after: After = None, limit: Limit = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:  # fmt: skip
        items = listed(await stored.chain(response_id, caller.key_id))
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise BadRequest(f"No input item with id {shown(after)}.", param="after", code="invalid_cursor")
        begin = 0 if after is None else ids.index(after) + 1
        page = items[begin : begin + limit]
        return {
            "object": "list", "data": page, "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None, "has_more": len(items) > begin + limit,
        }  # fmt: skip

    return router


def internal_routes(stored: StoredResponses) -> APIRouter:
    """For gateways; none of them passes a client's request on to here."""
    router = make_router("/internal/responses")

    @router.post("", include_in_schema=False)
    async def take(request: Request, caller: Caller) -> dict[str, int]:
        if caller.key_id is not None:
            raise Forbidden(ADMIN)
        copies = orjson.loads(await request.body())
        return {"stored": stored.take(copies if isinstance(copies, list) else [])}

    @router.get("/context", include_in_schema=False)
    async def context(id: Annotated[str, Query(max_length=256)], caller: Caller) -> Response:
        """The items of the conversation up to this response, a JSON array."""
        return _json(orjson.dumps(conversation(await stored.before(id, caller.key_id))))

    return router


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
