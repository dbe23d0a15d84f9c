"""One kind of object that owners make and see, declared once: how it is found, named, listed, shown and made.

A route file declares its `Resource`, gets a router from `serve` (list and retrieve) and adds the verbs that are its
own. Scopes, owner, 404, paging, retries and the audit row of each verb follow from the declaration.

The `openai` client retries POSTs without an Idempotency-Key but marks them in `x-stainless-retry-count` (0, 1, 2). So
an Idempotency-Key decides if present; otherwise a retry finds the newest object that the same key made from the same
body within a time window, and a first attempt always makes a new one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import Conflict, KeyRevoked, NotFound, shown
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.store import keys
from appliance.store.database import Database, Page, Part, UnknownCursor
from appliance.store.rows import IDEMPOTENCY, IdempotencyRow, columns, new_id

MOST = 10_000
"""The largest limit of a page, unless a list has a smaller one."""
RETRY_WINDOW_S = 3600.0
"""A POST that the SDK marks as a retry finds the object of its first attempt for this long."""
IDEMPOTENCY_KEEP_S = 24 * 3600.0


class HasId(Protocol):
    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=HasId)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Resource(Generic[Row]):
    """noun: "file" of the audit's "file.create". scopes: a caller needs one of them, or admin. find: (db, id,
    viewer=owner or None) -> row or None. missing: message of the 404, with {} for the id; param, code: of the 404, by
    default "NOUN_id", as in URLs, and "NOUN_not_found". fields: fields of an answer for the audit log."""

    noun: str
    prefix: str
    scopes: tuple[str, ...]
    find: Callable[..., Row | None]
    missing: str = ""
    param: str = ""
    code: str = ""
    fields: tuple[str, ...] = ()

    def known(self, db: Database, row_id: str, caller: Principal, param: str = "") -> Row:
        """Return the row with this id. param: the request's field with the id. Raises NotFound, also for another
        owner's row."""
        row = self.find(db, row_id, viewer=caller.viewer)
        if row is None:
            raise self.absent(row_id, param)
        return row

    def absent(self, row_id: str, param: str = "") -> NotFound:
        message = (self.missing or f"No {self.noun.replace('_', ' ')} found with id {{}}.").format(shown(row_id))
        return NotFound(message, param or self.param or f"{self.noun}_id", self.code or f"{self.noun}_not_found")

    def once(self, request: Request, caller: Principal, body: bytes, make: Callable[[], Row]) -> Row:
        """The row that the request makes, or that an earlier attempt made.

        One transaction: of two copies of a request one makes the row and the other gets it, and a crash leaves both
        rows or none. Raises Conflict if the idempotency key was used with another body, and KeyRevoked for an API key
        that has ended since.

        Args:
            body: the request's bytes; for an upload, its identity. make: checks bounds and inserts the row.
        """
        db: Database = request.app.state.context.db
        key, sha256 = request.headers.get("idempotency-key") or None, hashlib.sha256(body).hexdigest()
        source: tuple[str, str] = caller.key_id or "", request.scope["path"]  # the box itself has no key id
        same, select = "key_id = ? AND route = ? AND idempotency_key = ?", "SELECT * FROM idempotency WHERE"
        earlier: IdempotencyRow | None = None
        with db.transaction():
            if key is not None:
                earlier = db.one(IdempotencyRow, f"{select} {same}", [*source, key])
                if earlier is not None and earlier.body_sha256 != sha256:
                    message = f"The Idempotency-Key {shown(key, 60)} was used with another body; use a new key."
                    raise Conflict(message, code="idempotency_key_reused")
            elif request.headers.get("x-stainless-retry-count", "0") != "0":  # the SDK marks a retry
                newest = "key_id = ? AND route = ? AND body_sha256 = ? AND created_s >= ? ORDER BY seq DESC LIMIT 1"
                since_s = time.time() - RETRY_WINDOW_S
                earlier = db.one(IdempotencyRow, f"{select} {newest}", [*source, sha256, since_s])
            if earlier is not None and (row := self.find(db, earlier.resource_id, viewer=caller.viewer)) is not None:
                return row
            if how := keys.how_ended(db, caller.key_id):
                raise KeyRevoked(how)
            row = make()
            # A second use of an idempotency key replaces the first, whose object is gone by then.
            db.execute(f"DELETE FROM idempotency WHERE {same}", [*source, key])
            IDEMPOTENCY.insert(db, IdempotencyRow(*source, key, sha256, row.id, time.time()))
        return row

    def router(self) -> APIRouter:
        return make_router(self.prefix, *self.scopes, noun=self.noun, fields=self.fields)

    def serve(
        self,
        context: ControllerContext,
        view: Callable[[Row], dict[str, Any]],
        page: Callable[..., Page[Row]],
        part: Any,
        filters: Callable[..., dict[str, Any]] = lambda: {},
    ) -> APIRouter:
        """Return a router with the routes to list objects and to retrieve one.

        Args:
            view: converts a row to OpenAI's object, with the box's own fields.
            page: (db, viewer=, **filters, **part) -> rows.
            part: `part(...)`.
            filters: dependency that reads the list's other arguments.
        """
        router, db, filtered = self.router(), context.db, Depends(filters)

        @router.get("")
        def list_all(caller: Caller, part: Part = part, chosen: dict[str, Any] = filtered) -> dict[str, Any]:
            return list_object(page(db, viewer=caller.viewer, **chosen, **part), view)

        @router.get(f"/{{{self.noun}_id}}")
        def retrieve(caller: Caller, row_id: str = Path(alias=f"{self.noun}_id")) -> dict[str, Any]:
            return view(self.known(db, row_id, caller))

        return router


# --- rows; objects and lists in OpenAI's format


def new_row(kind: Callable[..., Row], prefix: str, caller: Principal, **fields: Any) -> Row:
    """Return a new row of the caller's: with a new id, the current time, the caller's key and owner."""
    made = {"id": new_id(prefix), "created_s": time.time(), **columns(caller, "key_id owner")}
    return kind(**made | fields)


def object_of(row: Any, kind: str, names: str, **more: Any) -> dict[str, Any]:
    """Return a row's object: these columns, times in whole seconds, and the owner (not in OpenAI's). more: further
    fields."""
    fields = {"id": row.id, "object": kind, "created_at": int(row.created_s), **columns(row, names), **more}
    if hasattr(row, "expires_s"):
        fields["expires_at"] = None if row.expires_s is None else int(row.expires_s)
    return fields | ({"owner": row.owner or None} if hasattr(row, "owner") else {})


def part(limit: int, *, most: int = MOST, order: Literal["asc", "desc"] = "desc") -> Any:
    """Return a dependency that reads the requested part of a list, for `Table.page`.

    Args:
        limit: default number of rows. most: the largest limit. A limit of 0 only tests for rows: the SDK's own tests
        send it to every list.
        order: default order; desc: newest first.
    """

    def part_of(
        after: Annotated[str | None, Query(max_length=256)] = None,
        limit: int = Query(limit, ge=0, le=most),
        order: Annotated[Literal["asc", "desc"], Query()] = order,
    ) -> Part:
        return {"after": after, "limit": limit, "descending": order == "desc"}

    return Depends(part_of)


RECENT = part(100, most=1000)
"""Of the admin API."""


def metadata_of(request: Request) -> dict[str, str]:
    """Return the pairs of `metadata[key]=value` that filter a list."""
    query = request.query_params.multi_items()
    return {name[9:-1]: value for name, value in query if name.startswith("metadata[") and name.endswith("]")}


def list_object(page: Page[Item], view: Callable[[Item], dict[str, Any]]) -> dict[str, Any]:
    return listed([view(row) for row in page.data], page.has_more)


def sliced(data: list[dict[str, Any]], after: str | None, limit: int, *, descending: bool) -> dict[str, Any]:
    """Return a page from a complete list of objects, oldest first. Raises UnknownCursor."""
    rest = data[::-1] if descending else data
    if after is not None:
        ids = [item["id"] for item in rest]
        if after not in ids:
            raise UnknownCursor(after)
        rest = rest[ids.index(after) + 1 :]
    return listed(rest[:limit], len(rest) > limit)


def listed(data: list[dict[str, Any]], has_more: bool = False) -> dict[str, Any]:
    ids = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ids, "has_more": has_more}
