"""Lists in OpenAI's paging format: `limit`, `after`, and an object that says whether more follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Query

from appliance.store.database import Page, Part

Row = TypeVar("Row")
After = Annotated[str | None, Query(max_length=256)]
Order = Annotated[Literal["asc", "desc"], Query()]
MOST = 10_000


def part(limit: int, *, most: int = MOST, order: Literal["asc", "desc"] | None = "desc") -> Any:
    """A dependency: which part of a list a request wants, for `Database.page`.

    Args:
        limit: number of rows if the request names none.
        most: the largest limit. 0 asks only whether there is a row: the SDK's own tests ask every list for 0.
        order: if the request names none; None: newest first, and the request cannot say.
    """
    if order is None:

        def newest_first(after: After = None, limit: int = Query(limit, ge=0, le=most)) -> Part:
            return {"after": after, "limit": limit}

        return Depends(newest_first)

    def ordered(after: After = None, limit: int = Query(limit, ge=0, le=most), order: Order = order) -> Part:
        return {"after": after, "limit": limit, "descending": order == "desc"}

    return Depends(ordered)


RECENT = part(100, most=1000, order=None)
"""Of the admin API."""


def list_object(page: Page[Row], view: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    return listed([view(row) for row in page.data], page.has_more)


def listed(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
