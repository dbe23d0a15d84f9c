"""The caller of a request, as identified by the listener that accepted it (peers.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request

from appliance.controller.interfaces.errors import KeyRevoked, SessionEnded, Unauthorized
from appliance.store.records import keys
from appliance.store.rows import PAGE_SESSIONS

ADMIN, GATEWAY = "admin", "gateway"
FINE_TUNING, INFERENCE, READ, METRICS = "fine_tuning", "inference", "read", "metrics"
ANY = (READ, INFERENCE, FINE_TUNING, METRICS)
"""For what every key may do, however little else it may."""


@dataclass(frozen=True, slots=True)
class Principal:
    """key_id None: a process of the box itself (its socket is 0600), which may do everything. A gateway acting for
    itself has GATEWAY as its key's id and as its only scope.

    owner: owns what this request creates; empty for the box itself. session: the login of the page by which the key's
    owner came, None: by the key. recorded: actions of this caller's that the audit log has, of this request.
    """

    key_id: str | None
    scopes: frozenset[str]
    request_id: str
    owner: str
    session: str | None = None
    recorded: list[str] = field(default_factory=list, compare=False)

    def may(self, *scopes: str) -> bool:
        """Whether it has any of these scopes. An admin may do everything."""
        return self.is_admin or not self.scopes.isdisjoint(scopes)

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    @property
    def viewer(self) -> str | None:
        """For the store's `viewer`: the request sees only this owner's objects; None for an admin, who sees all."""
        return None if self.is_admin else self.owner

    def seeing_all(self) -> Principal:
        """For objects of which every operator sees that they exist."""
        return replace(self, scopes=frozenset({ADMIN}))


def sender_of(request: Request) -> Principal:
    """The caller as the listener identified it, without an owner yet. Raises Unauthorized."""
    caller = request.scope.get("state", {}).get("principal")
    if not isinstance(caller, Principal):
        raise Unauthorized
    return caller


async def read_principal(request: Request) -> Principal:
    """The caller with its owner, which is stored with the key alone. Raises KeyRevoked for a key that ended before the
    whole request had arrived, SessionEnded for a login that did: gateways learn that a moment later than the store, or
    not at all while they cannot read a table."""
    caller, db = sender_of(request), request.app.state.context.db
    owner, ended = ("", "") if caller.key_id is None else keys.standing(db, caller.key_id)
    if ended:
        raise KeyRevoked(ended)
    if caller.session is not None:
        session = PAGE_SESSIONS.find(db, caller.session)
        if session is None or session.key_id != caller.key_id or session.until_s <= time.time():
            raise SessionEnded
    request.scope["state"]["principal"] = caller = replace(caller, owner=owner)
    return caller


Caller = Annotated[Principal, Depends(read_principal)]
