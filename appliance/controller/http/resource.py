"""One kind of object that owners make and see, declared once: how it is found, named, listed, shown and made.

A route file declares its `Resource`, gets a router from `serve` (list and retrieve) and adds the verbs that are its
own. Scopes, owner, 404, paging, retries and the audit row of each verb follow from the declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from fastapi import APIRouter, Depends, Path, Request

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.idempotency import Attempt, Row
from appliance.controller.http.paging import RECENT, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.store.database import Database, Page, Part


@dataclass(frozen=True)
class Resource(Generic[Row]):
    """noun: "file" of the audit's "file.create". scopes: any one of them, or admin, may call its routes; `reads` too
    where they only read. find: (db, id, viewer=owner or None) -> row or None. id_name: the id's name in URLs, "NOUN_id"
    if it is empty. missing: message of the 404, with {} for the id; param and code of it, where they are not the id's
    name and "NOUN_not_found". fields: of an answer, kept in the audit log."""

    noun: str
    prefix: str
    scopes: tuple[str, ...]
    find: Callable[..., Row | None]
    id_name: str = ""
    missing: str = ""
    param: str = ""
    code: str = ""
    fields: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "id_name", self.id_name or f"{self.noun}_id")

    def known(self, db: Database, row_id: str, caller: Principal, param: str = "") -> Row:
        """param: where the request names it. Raises NotFound, also for another owner's."""
        row = self.find(db, row_id, viewer=caller.viewer)
        if row is None:
            raise self.absent(row_id, param)
        return row

    def absent(self, row_id: str, param: str = "") -> NotFound:
        message = (self.missing or f"No {self.noun} found with id {{}}.").format(shown(row_id))
        return NotFound(message, param=param or self.param or self.id_name, code=self.code or f"{self.noun}_not_found")

    def attempt(self, request: Request, caller: Principal, body: Any) -> Attempt[Row]:
        """A request that makes one. body: as of `Attempt`."""
        known = partial(self.find, request.app.state.context.db, viewer=caller.viewer)
        return Attempt(request, caller, self.prefix, body, known)

    def router(self) -> APIRouter:
        return make_router(self.prefix, *self.scopes, reads=self.reads, noun=self.noun, fields=self.fields)

    def serve(
        self,
        context: ControllerContext,
        view: Callable[[Row], dict[str, Any]],
        page: Callable[..., Page[Row]],
        part: Any = RECENT,
        filters: Callable[..., dict[str, Any]] = lambda: {},
    ) -> APIRouter:
        """A router with the routes of the list and of one.

        Args:
            view: the row as OpenAI's object, with fields of the box's own.
            page: (db, viewer=, **filters, **part) -> rows.
            part: `paging.part(...)`.
            filters: a dependency that reads the list's other arguments.
        """
        router, db, filtered = self.router(), context.db, Depends(filters)

        @router.get("")
        def list_all(caller: Caller, part: Part = part, chosen: dict[str, Any] = filtered) -> dict[str, Any]:
            return list_object(page(db, viewer=caller.viewer, **chosen, **part), view)

        @router.get(f"/{{{self.id_name}}}")
        def retrieve(caller: Caller, row_id: str = Path(alias=self.id_name)) -> dict[str, Any]:
            return view(self.known(db, row_id, caller))

        return router
