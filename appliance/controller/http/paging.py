"""Lists in OpenAI's paging format: `limit`, `after`, and an object that says whether more follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Query

from appliance.store.database import Page

Row = TypeVar("Row")
After = Annotated[str | None, Query(max_length=256)]
Limit = Annotated[int, Query(ge=0, le=10_000)]
RecentLimit = Annotated[int, Query(ge=1, le=1000)]


def list_object(page: Page[Row], view: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    data = [view(row) for row in page.data]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.has_more,
    }
