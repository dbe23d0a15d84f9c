"""/admin/v1/oidc: the page's way to an OpenID provider and back. Asked without a key, so each costs little and leaves
nothing behind but what is bounded here."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from appliance.controller.admin.owners import logins
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.audited import unaudited
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import ApiError, NotFound
from appliance.controller.interfaces.principal import GATEWAY, Principal
from appliance.controller.oidc import people
from appliance.controller.oidc.provider import Provider, refused

WAITS_S = 600.0
"""How long a person who went to the provider has to come back."""
MOST_WAITING = 20_000
"""Logins that wait at most; past it the one that left first has to begin again. More than a gateway lets begin in
WAITS_S, so a few addresses push nobody else's out (appliance.gateway.core.spending)."""
Word = Annotated[str, Field(min_length=1, max_length=4096)]


class OidcFinish(StrictBody):
    """code, state: as the provider gave them. binder: as `begin` gave it to this browser. secure: as for a login with a
    key."""

    code: Word
    state: Word
    binder: Word
    secure: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    binder_sha256: str
    nonce: str
    verifier: str
    until_s: float


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def routes(context: ControllerContext, provider: Provider | None = None) -> APIRouter:
    """provider: in place of the one that the settings name, in tests."""
    router, settings = make_router("/admin/v1/oidc"), context.config.oidc
    provider = provider or Provider(settings)
    waiting: dict[str, _Waiting] = {}

    def check_there_is_one() -> None:
        if not settings.issuer:
            raise NotFound("This box has no login provider.", code="no_login_provider")

    @router.get("")
    async def about() -> dict[str, Any]:
        """`name`: of the provider, null where there is none."""
        return {"object": "oidc", "name": settings.name if settings.issuer else None}

    @router.post("/begin")
    @unaudited  # who comes back is known by `finish`
    async def begin() -> dict[str, Any]:
        """`url`: where the browser goes; `binder`: what it keeps for `finish`: nobody finishes another's login."""
        check_there_is_one()
        now_s = time.monotonic()
        while waiting:  # in the order in which they began
            first = next(iter(waiting))
            if waiting[first].until_s >= now_s and len(waiting) < MOST_WAITING:
                break
            del waiting[first]
        begun, binder = await provider.begin(), secrets.token_urlsafe(32)
        waiting[begun["state"]] = _Waiting(_sha256(binder), begun["nonce"], begun["code_verifier"], now_s + WAITS_S)
        return {"url": begun["url"], "binder": binder}

    @router.post("/finish", status_code=201)
    async def finish(body: OidcFinish, request: Request, response: Response) -> dict[str, Any]:
        """A login of the page, as `/admin/v1/sessions` begins one."""
        check_there_is_one()
        known = waiting.pop(body.state, None)  # once, whatever comes of it
        if known is None or known.until_s < time.monotonic():
            raise refused("it was not begun here, or too long ago; begin again")
        if not hmac.compare_digest(known.binder_sha256, _sha256(body.binder)):
            raise refused("it was begun in another browser")
        claims = await provider.claims(body.code, known.nonce, known.verifier)
        try:
            key = people.key_of(context, settings, claims)
        except ApiError as error:
            subject = people.subject_of(settings, claims)[: people.SHOWN_CHARACTERS]
            _told(context, request, "", "refused", subject=subject, why=error.message)
            raise
        agent = request.headers.get("user-agent", "")
        made = logins.begin(context, key.id, agent=agent, secure=body.secure)
        response.headers[logins.COOKIE] = made.cookie
        _told(context, request, key.id, "done", key=key.name, scopes=key.scopes)
        return made.shown

    return router


def _told(context: ControllerContext, request: Request, key_id: str, outcome: Any, **detail: Any) -> None:
    request_id = request.scope["state"]["request_id"]
    who = Principal(key_id or GATEWAY, frozenset(), request_id, "")
    record(context, who, "session.create", key_id, outcome=outcome, provider=context.config.oidc.issuer, **detail)
