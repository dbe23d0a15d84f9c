"""GET /admin/v1/events?stream=true: what changes at the box, as it changes, as Server-Sent Events."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Header
from starlette.responses import StreamingResponse

from appliance.controller.context.context import ControllerContext
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.interfaces.principal import Caller
from appliance.controller.live.hub import Hub
from appliance.controller.live.topics import TABLES
from appliance.store.row_changes import unwatch, watch

LOOK_EVERY_S = 1.0


def routes(router: APIRouter, hub: Hub) -> None:
    """Add the route to the admin router."""

    # Hidden, for whoever tries each route of the document would wait for its end, which there is not.
    @router.get("/events", include_in_schema=False)
    async def events(
        stream: Literal["true"],
        caller: Caller,
        last_event_id: Annotated[str | None, Header(max_length=64)] = None,
    ) -> StreamingResponse:
        """`changed`: what may be asked again, ids by topic, none for anything of the topic. `reload`: everything."""
        return StreamingResponse(
            hub.follow(caller, last_event_id), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )


class Sources:
    """What tells the hub: rows of the store as they are written, and the box's state, which is in memory, by a look."""

    def __init__(self, context: ControllerContext, hub: Hub) -> None:
        self._context, self._hub = context, hub
        self._seen = b""

    def begin(self) -> None:
        self._hub.begin()
        watch(self._context.db, {table: watched for table, (_, watched) in TABLES.items()}, self._told)

    def end(self) -> None:
        unwatch(self._context.db, {table: watched for table, (_, watched) in TABLES.items()})

    def _told(self, table: str, row_id: str | None, owner: str | None) -> None:
        self._hub.tell(TABLES[table][0], row_id, owner)

    async def look(self) -> None:
        """Tell of the box if it is not as it was; nobody is asked while nobody follows."""
        if not self._hub.is_followed("box"):
            return
        seen = orjson.dumps(self._state(), default=str)
        if self._seen and seen != self._seen:
            self._hub.tell("box")
        self._seen = seen

    def _state(self) -> list[Any]:
        context = self._context
        now, load = context.scheduler.status(), context.load()
        shown = [now["devices"], now["replicas"], now["handover"], now["queue"], now["troubles"], now["notes"]]
        mode = mode_in_force(context.db, now["serving_floor"], time.time()).policy
        requests = {name: (one.inflight, one.held) for name, one in load.models.items() if one.inflight or one.held}
        return [shown, str(mode), requests, load.notes, [one["name"] for one in context.main_troubles()]]
