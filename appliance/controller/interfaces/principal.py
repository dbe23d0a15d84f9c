"""The sender and the caller of a request, as identified by the listener that accepted it (peers.py)."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request

from appliance.controller.interfaces.errors import KeyRevoked, SessionEnded, Unauthorized
from appliance.store.records import keys, page_sessions

ADMIN, GATEWAY = "admin", "gateway"
FINE_TUNING, INFERENCE, READ, METRICS = "fine_tuning", "inference", "read", "metrics"
ANY = (READ, INFERENCE, FINE_TUNING, METRICS)
"""For what every key may do, however little else it may."""


@dataclass(frozen=True, slots=True)
class Identity:
    """key_id None: the box itself. A gateway acting for itself has GATEWAY as its key's id and as its only scope.
    session: the login of the page by which the key's owner came, None: by the key."""

    key_id: str | None
    scopes: frozenset[str]
    session: str | None = None


BOX = Identity(None, frozenset({ADMIN}))


def allow(scopes: Collection[str], *needed: str) -> bool:
    """Whether whoever has these scopes may do what any of the needed ones is for. An admin may do everything."""
    return ADMIN in scopes or any(one in scopes for one in needed)


@dataclass(frozen=True, slots=True)
class Principal:
    """key_id None: a process of the box itself (its socket is 0600), which may do everything.

    owner: owns what this request creates; empty for the box itself. session: as of `Identity`. recorded: actions of
    this caller's that the audit log has, of this request.
    """

    key_id: str | None
    scopes: frozenset[str]
    request_id: str
    owner: str
    session: str | None = None
    recorded: list[str] = field(default_factory=list, compare=False)

    def may(self, *scopes: str) -> bool:
        return allow(self.scopes, *scopes)

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


def identity_of(request: Request) -> Identity:
    """As the listener has it. Raises Unauthorized."""
    identity = request.scope["state"].get("identity")
    if not isinstance(identity, Identity):
        raise Unauthorized
    return identity


async def read_principal(request: Request) -> Principal:
    """Who asks; read for each request, for a key's owner and its end are stored in one place only. Raises KeyRevoked
    for a key that has ended before the whole request was here, SessionEnded for a login that did: gateways learn that a
    moment later than the store, or not at all while they cannot read a table."""
    identity, state, db = identity_of(request), request.scope["state"], request.app.state.context.db
    key_id, session = identity.key_id, identity.session
    owner, ended = ("", "") if key_id is None else keys.standing(db, key_id)
    if ended:
        raise KeyRevoked(ended)
    if session is not None and (key_id is None or not page_sessions.is_live(db, session, key_id, time.time())):
        raise SessionEnded
    state["principal"] = caller = Principal(key_id, identity.scopes, state["request_id"], owner, session)
    return caller


Caller = Annotated[Principal, Depends(read_principal)]
