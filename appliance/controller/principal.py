"""Who a request comes from, as the gateway says in headers that no client can set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from appliance.controller.errors import Forbidden

ADMIN, FINE_TUNING, INFERENCE = "admin", "fine_tuning", "inference"


@dataclass(frozen=True, slots=True)
class Principal:
    """key_id None: a process of the box itself (the socket is 0600), which may do everything."""

    key_id: str | None
    scopes: frozenset[str]
    request_id: str

    def may(self, *scopes: str) -> bool:
        return ADMIN in self.scopes or not self.scopes.isdisjoint(scopes)


async def read_principal(request: Request) -> Principal:
    key_id = request.headers.get("x-appliance-key-id")
    scopes = request.headers.get("x-appliance-scopes")
    if key_id is None and scopes is None:
        granted = frozenset({ADMIN})
    else:
        granted = frozenset(scope.strip() for scope in (scopes or "").split(",") if scope.strip())
    return Principal(key_id, granted, request.scope["state"]["request_id"])


Caller = Annotated[Principal, Depends(read_principal)]


def needs(*scopes: str) -> Callable[[Principal], Awaitable[None]]:
    """A dependency that lets a caller with any of `scopes`, or with admin, pass."""

    async def check(caller: Caller) -> None:
        if not caller.may(*scopes):
            raise Forbidden(" or ".join(scopes))

    return check
