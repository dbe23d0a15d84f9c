"""Who a request comes from: what the listener that took it found out (peers.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from appliance.controller.interfaces.errors import Forbidden, Unauthorized
from appliance.controller.interfaces.identity import ADMIN, GATEWAY, Identity
from appliance.store.records import keys

FINE_TUNING, INFERENCE, READ, METRICS = "fine_tuning", "inference", "read", "metrics"
_SCRAPE = "/admin/v1/metrics"


@dataclass(frozen=True, slots=True)
class Principal:
    """key_id None: a process of the box itself (its socket is 0600), which may do everything.

    owner: whose is what this request makes; empty for the box itself.
    """

    key_id: str | None
    scopes: frozenset[str]
    request_id: str
    owner: str

    def may(self, *scopes: str) -> bool:
        return ADMIN in self.scopes or not self.scopes.isdisjoint(scopes)

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    @property
    def viewer(self) -> str | None:
        """For the store's `viewer`: the owner whose things alone exist for this request; None for an admin, for whom
        everybody's do."""
        return None if self.is_admin else self.owner

    @property
    def is_gateway(self) -> bool:
        """A gateway on its own behalf, for no key: it sends copies of answers, and may do nothing else."""
        return self.key_id == GATEWAY and self.scopes == {GATEWAY}


async def read_principal(request: Request) -> Principal:
    state = request.scope["state"]
    identity = state.get("identity")
    if not isinstance(identity, Identity):
        raise Unauthorized  # no listener has vouched for it
    # Read anew for each request, and not said by the gateway: there is one place where a key's owner stands.
    key_id = identity.key_id
    owner = keys.owner_of(request.app.state.context.db, key_id) if key_id is not None else ""
    return Principal(key_id, identity.scopes, state["request_id"], owner)


Caller = Annotated[Principal, Depends(read_principal)]


def needs(*scopes: str) -> Callable[[Principal], Awaitable[None]]:
    """A dependency that lets a caller with any of `scopes`, or with admin, pass."""

    async def check(caller: Caller) -> None:
        if not caller.may(*scopes):
            raise Forbidden(" or ".join(scopes))

    return check


async def of_admin_routes(request: Request, caller: Caller) -> None:
    """A dependency of /admin/v1: `read` sees what a GET shows, `metrics` the scrape alone; both change nothing.

    What even `read` is not to see asks for `needs(ADMIN)` besides.
    """
    scopes = [READ] if request.method == "GET" else []
    if request.url.path == _SCRAPE:
        scopes.append(METRICS)
    if not caller.may(*scopes):
        raise Forbidden(" or ".join([ADMIN, *scopes]))
