"""The sender and the caller of a request, as identified by the listener that accepted it (peers.py)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request

from appliance.controller.interfaces.errors import Forbidden, KeyRevoked, SessionEnded, Unauthorized
from appliance.store.database import Database
from appliance.store.records import keys, page_sessions

ADMIN, GATEWAY = "admin", "gateway"
FINE_TUNING, INFERENCE, READ, METRICS = "fine_tuning", "inference", "read", "metrics"
_SCRAPE, _USAGE, _ME, _PLAN = "/admin/v1/metrics", "/admin/v1/usage", "/admin/v1/me", "/admin/v1/plan"
SESSIONS = "/admin/v1/sessions"


@dataclass(frozen=True, slots=True)
class Identity:
    """key_id None: the box itself. A gateway acting for itself has GATEWAY as its key's id and as its only scope.
    session: the login of the page by which the key's owner came, None: by the key. secret: SHA-256 of that, as the
    gateway knew it; None: it was not said."""

    key_id: str | None
    scopes: frozenset[str]
    session: str | None = None
    secret: str | None = None


BOX = Identity(None, frozenset({ADMIN}))


def allow(scopes: Collection[str], *needed: str) -> bool:
    """Whether whoever has these scopes may do what any of the needed ones is for. An admin may do everything."""
    return ADMIN in scopes or any(one in scopes for one in needed)


@dataclass(frozen=True, slots=True)
class Principal:
    """key_id None: a process of the box itself (its socket is 0600), which may do everything.

    owner: owns what this request creates; empty for the box itself. session, secret: as of `Identity`.
    """

    key_id: str | None
    scopes: frozenset[str]
    request_id: str
    owner: str
    session: str | None = None
    secret: str | None = None

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

    @property
    def is_gateway(self) -> bool:
        """A gateway acting for itself, without a key: it sends copies of answers, and may do nothing else."""
        return self.key_id == GATEWAY and self.scopes == {GATEWAY}


def named_principal(request: Request) -> Principal:
    """Who asks, whether or not that key was revoked meanwhile: for records of what was done. Raises Unauthorized."""
    return _standing(request)[0]


async def read_principal(request: Request) -> Principal:
    """Who asks. Raises KeyRevoked for a key that has ended, or got another secret, before the whole request was here,
    SessionEnded for a login that ended: gateways learn that a moment later than the store, or not at all while they
    cannot read a table, and pass on what has come until then."""
    principal, ended = _standing(request)
    if ended:
        raise KeyRevoked(ended)
    _check_login(request.app.state.context.db, principal)
    return principal


def check_stands(db: Database, principal: Principal) -> None:
    """For whoever has waited since `read_principal`; raises as that does."""
    if how := keys.how_ended(db, principal.key_id, principal.secret):
        raise KeyRevoked(how)
    _check_login(db, principal)


def _check_login(db: Database, principal: Principal) -> None:
    session, key_id = principal.session, principal.key_id
    if session is not None and (key_id is None or not page_sessions.is_live(db, session, key_id, time.time())):
        raise SessionEnded


def _standing(request: Request) -> tuple[Principal, str]:
    """Who asks, and how the key has ended; empty: it has not."""
    state = request.scope["state"]
    identity = state.get("identity")
    if not isinstance(identity, Identity):
        raise Unauthorized  # no listener has identified it
    # Read for each request instead of sent by the gateway: a key's owner, and its end, are stored in one place only.
    key_id, owner, ended = identity.key_id, "", ""
    if key_id is not None:
        owner, ended = keys.standing(request.app.state.context.db, key_id, identity.secret)
    return Principal(key_id, identity.scopes, state["request_id"], owner, identity.session, identity.secret), ended


Caller = Annotated[Principal, Depends(read_principal)]


def needs(*scopes: str) -> Callable[[Principal], Awaitable[None]]:
    """A dependency that admits callers with any of `scopes`, or with admin."""

    async def check(caller: Caller) -> None:
        if not caller.may(*scopes):
            raise Forbidden(" or ".join(scopes))

    return check


async def of_admin_routes(request: Request, caller: Caller) -> None:
    """A dependency of /admin/v1: `read` allows every GET, `metrics` only the scrape, and `inference` and `fine_tuning`
    the usage of their owner and the stream of events, of which each hears what it may see; any key may ask what it is
    itself, and begin, see and end its owner's logins of the page; who may submit a job may plan one. None of them
    changes anything else.

    Routes that even `read` must not see also use `needs(ADMIN)`.
    """
    scopes = [READ] if request.method == "GET" else []
    if request.url.path == _SCRAPE:
        scopes.append(METRICS)
    if request.url.path == _USAGE and scopes:
        scopes += [INFERENCE, FINE_TUNING]
    path = request.url.path
    if path == _PLAN:
        scopes = [FINE_TUNING]
    if (path == _ME and scopes) or path == SESSIONS or path.startswith(f"{SESSIONS}/"):
        scopes = [READ, INFERENCE, FINE_TUNING, METRICS]
    if not caller.may(*scopes):
        raise Forbidden(" or ".join([ADMIN, *scopes]))
