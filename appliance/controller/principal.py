"""Who a request comes from: what the listener that took it found out (peers.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from appliance.controller.errors import Forbidden, Unauthorized
from appliance.controller.peers import ADMIN, GATEWAY, Identity

FINE_TUNING, INFERENCE = "fine_tuning", "inference"


@dataclass(frozen=True, slots=True)
class Principal:
    """key_id None: a process of the box itself (its socket is 0600), which may do everything."""

    key_id: str | None
    scopes: frozenset[str]
    request_id: str

    def may(self, *scopes: str) -> bool:
        return ADMIN in self.scopes or not self.scopes.isdisjoint(scopes)

    @property
    def is_gateway(self) -> bool:
        """A gateway on its own behalf, for no key: it sends copies of answers, and may do nothing else."""
        return self.key_id == GATEWAY and self.scopes == {GATEWAY}


async def read_principal(request: Request) -> Principal:
    state = request.scope["state"]
    identity = state.get("identity")
    if not isinstance(identity, Identity):
        raise Unauthorized  # no listener has vouched for it
    return Principal(identity.key_id, identity.scopes, state["request_id"])


Caller = Annotated[Principal, Depends(read_principal)]


def needs(*scopes: str) -> Callable[[Principal], Awaitable[None]]:
    """A dependency that lets a caller with any of `scopes`, or with admin, pass."""

    async def check(caller: Caller) -> None:
        if not caller.may(*scopes):
            raise Forbidden(" or ".join(scopes))

    return check
