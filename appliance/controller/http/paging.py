"""Lists in OpenAI's paging format: `limit`, `after`, and an object that says whether more follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query

from appliance.store.database import Page

Row = TypeVar("Row")
After = Annotated[str | None, Query(max_length=256)]
Order = Annotated[Literal["asc", "desc"], Query()]
# OpenAI's bounds where it names one: up to 100, of files up to 10,000. 0 asks only whether there is something; its own
# tests of the SDK ask every list for 0, that of files too, for which it names 1 as the least. Scripts ask its other
# lists (fine-tuning, evals) for 1,000, and so may ours be: a page ends by its size. Arguments that a list does not know
# are ignored, as OpenAI ignores them (Azure's clients send `api-version` with all).
Limit = Annotated[int, Query(ge=0, le=100)]
WholeLimit = Annotated[int, Query(ge=0, le=10_000)]
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
