"""Lists in OpenAI's paging format: `limit`, `after`, and an object that says whether more follow; and long ones
without pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Query, Response

from appliance.store.database import Page

Row = TypeVar("Row")
After = Annotated[str | None, Query(max_length=256)]
Limit = Annotated[int, Query(ge=0, le=10_000)]


def list_object(page: Page[Row], view: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    data = [view(row) for row in page.data]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.has_more,
    }


_AT_ONCE_S = 0.01


class LongLists:
    """Lists without pages, made and written some rows at a time, with the loop free for as long in between: the newest
    thousand hand-overs held it for 0.5 s. One after the other, or several would leave it little."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def answer(self, rows: Iterable[Row], view: Callable[[Row], dict[str, Any]]) -> Response:
        """A list object. A row may have gone by the time that it is shown."""
        parts: list[bytes] = []
        async with self._turn:
            began_s = time.perf_counter()
            for row in rows:
                parts.append(orjson.dumps(view(row)))
                if (took_s := time.perf_counter() - began_s) > _AT_ONCE_S:
                    await asyncio.sleep(took_s)
                    began_s = time.perf_counter()
        return Response(b'{"object":"list","data":[%b]}' % b",".join(parts), media_type="application/json")
