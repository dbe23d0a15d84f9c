"""Lists in OpenAI's paging format: `limit`, `after`, and an object that says whether more follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Query, Request

from appliance.controller.interfaces.errors import BadRequest, shown
from appliance.store.database import Page, Part

Row = TypeVar("Row")
After = Annotated[str | None, Query(max_length=256)]
Order = Annotated[Literal["asc", "desc"], Query()]
MOST = 10_000


def part(limit: int, *, most: int = MOST, order: Literal["asc", "desc"] = "desc") -> Any:
    """A dependency: which part of a list a request wants, for `Table.page`.

    Args:
        limit: number of rows if the request names none.
        most: the largest limit. 0 asks only whether there is a row: the SDK's own tests ask every list for 0.
        order: if the request names none; desc: newest first.
    """

    def wanted(after: After = None, limit: int = Query(limit, ge=0, le=most), order: Order = order) -> Part:
        return {"after": after, "limit": limit, "descending": order == "desc"}

    return Depends(wanted)


def metadata_of(request: Request) -> dict[str, str]:
    """The pairs of `metadata[key]=value` that a list is asked for."""
    given = request.query_params.multi_items()
    return {name[9:-1]: value for name, value in given if name.startswith("metadata[") and name.endswith("]")}


RECENT = part(100, most=1000)
"""Of the admin API."""


def list_object(page: Page[Row], view: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    return listed([view(row) for row in page.data], page.has_more)


def sliced(data: list[dict[str, Any]], what: str, after: str | None, limit: int, *, descending: bool) -> dict[str, Any]:
    """A page of objects that are all at hand, oldest first. what: they are called. Raises BadRequest."""
    found = data[::-1] if descending else data
    if after is not None:
        place = next((place for place, one in enumerate(found) if one["id"] == after), None)
        if place is None:
            raise BadRequest(f"No {what} with id {shown(after)}.", param="after", code="invalid_cursor")
        found = found[place + 1 :]
    return listed(found[:limit], len(found) > limit)


def listed(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
