"""/admin/v1/sessions: logins of the web page; /admin/v1/oidc: logins by an OpenID provider, by the code flow with PKCE.

A key is exchanged for a login, so that a browser need not store the key; a login has the rights of its key. The key's
owner lists and ends logins; they also end with their key. A person who logs in by the provider (Authlib speaks the
protocol) gets a key at the first login; each login sets its scopes from the person's groups. The key's secret is never
shown; limits, usage, jobs, the audit log and revocation use the key for the person. Its owner's name contains a part of
the subject's hash: if the provider reuses a name for another person, that person is another owner.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import httpx2
from authlib.integrations.base_client.errors import OAuthError
from authlib.integrations.starlette_client import StarletteOAuth2App
from fastapi import APIRouter, Request, Response
from joserfc.errors import JoseError
from pydantic import Field

from appliance.controller.context.context import ControllerContext, record
from appliance.controller.http.routers import StrictBody, audited, make_router, needs, unaudited
from appliance.controller.interfaces.config import OidcSettings
from appliance.controller.interfaces.errors import ApiError, NotFound, shown
from appliance.controller.interfaces.principal import ANY, GATEWAY, Caller
from appliance.store import keys
from appliance.store.rows import PAGE_SESSIONS, KeyRow, PageSessionRow, columns

LASTS_S = 24 * 3600.0
COOKIE = "x-appliance-cookie"
"""For the gateway, which makes a cookie of it (`gateway.server.controller`); no client sees it."""

# Only public-key algorithms are accepted: with HMAC, any holder of the client secret could sign tokens.
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
ANSWER_S: Final = 10.0
_LEEWAY_S: Final = 60
TRANSPORT: httpx2.AsyncBaseTransport | None = None
"""In place of the network, in tests."""
_SHOWN_CHARACTERS = 12
"""Of a subject's hash."""
Word = Annotated[str, Field(min_length=1, max_length=4096)]


class SessionBegin(StrictBody):
    """secure: the page came by https, perhaps from a proxy; the browser then sends the cookie only by https."""

    secure: bool = False


def routes(context: ControllerContext, router: APIRouter) -> APIRouter:
    db = context.db

    @router.post("/sessions", status_code=201)
    @needs(*ANY)
    async def exchange(body: SessionBegin, request: Request, response: Response, caller: Caller) -> dict[str, Any]:
        """Exchange a key for a login. `page`: the token's half that the page sends as `x-appliance-page: ID.HALF`; the
        other half is in a cookie. Neither half is shown later."""
        if caller.key_id is None or caller.session is not None or keys.find(db, caller.key_id) is None:
            message = "A login of the page begins with an API key of its own."
            raise ApiError(403, message, code="insufficient_permissions")
        login = _begin(context, caller.key_id, request, response, secure=body.secure)
        record(context, caller, "session.create", login["id"], key=login["key"], agent=login["agent"])
        return login

    @router.get("/sessions")
    @needs(*ANY)
    def list_sessions(caller: Caller) -> dict[str, Any]:
        rows = keys.list_sessions(db, time.time(), caller.viewer)
        return {"object": "list", "data": [view(context, row) for row in rows]}

    @router.delete("/sessions/{session_id}")
    @needs(*ANY)
    @audited("session.end")
    async def end(session_id: str, response: Response, caller: Caller) -> dict[str, Any]:
        row = PAGE_SESSIONS.find(db, session_id)
        if row is None or caller.viewer not in (None, keys.owner_of(db, row.key_id)):
            raise NotFound(f"No login of the page with the id {shown(session_id)}.", "id", "session_not_found")
        PAGE_SESSIONS.delete(db, row.id)
        context.spending.publish_keys()
        if row.id == caller.session:
            response.headers[COOKIE] = f"{row.id}=; Max-Age=0"
        return {"id": row.id, "object": "session", "deleted": True}

    return _oidc_routes(context)


def _begin(
    context: ControllerContext, key_id: str, request: Request, response: Response, *, secure: bool
) -> dict[str, Any]:
    """Begin a login of this key; return it as the API shows it, with the page's half of the token. The other half is in
    the response's cookie. secure: the browser sends the cookie only by TLS."""
    now_s, agent = time.time(), request.headers.get("user-agent", "")[:200]
    row, cookie, page = keys.create_session(context.db, key_id, agent=agent, now_s=now_s, until_s=now_s + LASTS_S)
    context.spending.publish_keys()
    response.headers[COOKIE] = f"{row.id}={cookie}; Max-Age={LASTS_S:.0f}{'; Secure' if secure else ''}"
    return view(context, row) | {"page": page}


def view(context: ControllerContext, row: PageSessionRow) -> dict[str, Any]:
    key = keys.find(context.db, row.key_id)
    return {
        "id": row.id,
        "object": "session",
        "key_id": row.key_id,
        "key": key.name if key else None,
        "owner": keys.owner_of(context.db, row.key_id),
        **columns(row, "agent created_s until_s"),
    }


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Delete expired logins from the store and the gateways' table; gateways then end the requests of these logins."""
    if context.db.execute("DELETE FROM page_sessions WHERE until_s <= ?", [now_s]).rowcount:
        context.spending.publish_keys()


# --- logins by a provider


class OidcFinish(SessionBegin):
    """code, state: values from the provider. binder: value that `begin` returned to this browser."""

    code: Word
    state: Word
    binder: Word


def _oidc_routes(context: ControllerContext) -> APIRouter:
    """Routes for browsers without a key. The browser stores the login's state (`binder`); the box stores nothing."""
    router, settings = make_router("/admin/v1/oidc", GATEWAY), context.config.oidc
    redirect_uri = f"{context.box['public_url']}/ui"  # the web page's own path

    @cache
    def provider() -> _Client:
        if not settings.issuer:
            raise NotFound("This box has no login provider.", code="no_login_provider")
        return _Client.of(settings)

    @router.get("")
    async def about() -> dict[str, Any]:
        """`name`: the provider's name, null if the box has no provider."""
        return {"object": "oidc", "name": settings.name if settings.issuer else None}

    @router.post("/begin")
    @unaudited  # no audit row: `finish` records the person
    async def begin() -> dict[str, Any]:
        """`url`: the provider's page; `binder`: ties the login to this browser, which passes it to `finish`."""
        with _refusals():
            begun: dict[str, str] = await provider().create_authorization_url(redirect_uri)
        return {"url": begun["url"], "binder": f"{begun['state']}.{begun['nonce']}.{begun['code_verifier']}"}

    @router.post("/finish", status_code=201)
    async def finish(body: OidcFinish, request: Request, response: Response, caller: Caller) -> dict[str, Any]:
        """Begin a login of the web page, as `/admin/v1/sessions` does."""
        state, _, rest = body.binder.partition(".")
        nonce, _, verifier = rest.partition(".")
        if state != body.state or not nonce or not verifier:
            raise refused("it was begun in another browser")
        with _refusals():
            claims = await _claims(provider(), settings, redirect_uri, body.code, nonce, verifier)

        subject = hashlib.sha256(f"{settings.issuer}\n{claims['sub']}".encode("utf-8", "surrogatepass")).hexdigest()
        try:
            key = _key_of(context, settings, claims, subject)
        except ApiError as error:
            detail = {"provider": settings.issuer, "subject": subject[:_SHOWN_CHARACTERS], "why": error.message}
            record(context, caller, "session.create", "", outcome="refused", **detail)
            raise
        login, person = _begin(context, key.id, request, response, secure=body.secure), replace(caller, key_id=key.id)
        record(context, person, "session.create", key.id, provider=settings.issuer, key=key.name, scopes=key.scopes)
        return login

    return router


# --- the provider: exchange a code for a token, and read the person from the token


def refused(why: str) -> ApiError:
    """Return the error for an unacceptable answer of the provider."""
    return ApiError(403, f"The login was not accepted: {why}.", code="login_refused")


def unavailable(why: str) -> ApiError:
    message = f"The login provider cannot be asked now: {why}. Please retry."
    return ApiError(502, message, code="provider_away", kind="server_error")


class _Client(StarletteOAuth2App):  # type: ignore[misc]
    """Authlib's client, with checks that the provider's document cannot loosen. Endpoints and keys are fetched at their
    first use, and keys are refetched when a token names an unknown key."""

    @classmethod
    def of(cls, settings: OidcSettings) -> _Client:
        path = settings.client_secret_path
        return cls(
            None,
            settings.issuer,
            client_id=settings.client_id,
            client_secret=Path(path).read_text().strip() if path is not None else None,
            server_metadata_url=f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration",
            client_kwargs={
                "scope": " ".join(settings.scopes),
                "code_challenge_method": "S256",
                "timeout": ANSWER_S,
                "verify": ssl.create_default_context(cafile=settings.ca_path) if settings.ca_path else True,
                "transport": TRANSPORT,
            },
        )

    async def load_server_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = await super().load_server_metadata()
        if metadata.get("issuer") != self.name:
            self.server_metadata = {}
            raise unavailable(f"it calls itself {metadata.get('issuer')!r}, the settings {self.name!r}")
        metadata["id_token_signing_alg_values_supported"] = ALGORITHMS
        if "client_secret_post" in metadata.get("token_endpoint_auth_methods_supported", ()) and self.client_secret:
            metadata["token_endpoint_auth_method"] = "client_secret_post"
        return metadata


async def _claims(
    client: _Client, settings: OidcSettings, redirect_uri: str, code: str, nonce: str, verifier: str
) -> dict[str, Any]:
    """Return the identity token's claims, plus the userinfo's claims if the token has no groups. Raises ApiError."""
    token = await client.fetch_access_token(redirect_uri, code=code, code_verifier=verifier)
    options = {
        "iss": {"essential": True, "value": settings.issuer},
        "aud": {"essential": True, "value": settings.client_id},
        "nonce": {"essential": True},
    }
    parsed = await client.parse_id_token(token, nonce, claims_options=options, leeway=_LEEWAY_S)
    if parsed is None:
        raise refused("the provider gave no identity token for this code")
    claims = dict(parsed)
    if settings.groups_claim not in claims and "userinfo_endpoint" in client.server_metadata:
        userinfo = await client.userinfo(token=token)
        if userinfo.get("sub") != claims["sub"]:
            raise refused("the provider's user information is about another person")
        claims = {**userinfo, **claims}
    return claims


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn Authlib's exceptions in the block into ApiErrors."""
    try:
        yield
    except OAuthError as error:
        raise refused(f"the provider does not take this code ({error.error})") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise unavailable(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise refused(f"the provider's token is invalid ({type(error).__name__})") from error


# --- the person's key


def _key_of(context: ControllerContext, settings: OidcSettings, claims: Mapping[str, Any], subject: str) -> KeyRow:
    """Return the person's live key, made at the first login, and set its scopes from the groups in these claims.
    subject: SHA-256 of the provider and the person's id there, in hex. Raises ApiError 403 for a person whose key was
    revoked, or whose groups give no scope: earlier logins then end, and earlier work continues without a scope."""
    db, claim = context.db, claims.get(settings.groups_claim)
    groups = [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else []
    granted = {scope for group in groups if isinstance(group, str) for scope in settings.groups.get(group, ())}
    scopes = [scope for scope in keys.SCOPES if scope in granted]
    with db.transaction():
        row = keys.first(db, "subject = ? AND subject != ''", subject, last=True)
        if row is None and scopes:
            claim = next((claims[field] for field in (settings.name_claim, "email", "sub") if claims.get(field)), "")
            name = re.sub(r"[^A-Za-z0-9._@-]+", "-", str(claim))[:48].strip("-._@") or "person"
            name = f"{name}-{subject[:_SHOWN_CHARACTERS]}"
            return keys.create(db, name, scopes, name, subject=subject)[0]
        if row is not None and scopes and row.revoked_s is not None:
            raise refused("your access to this box was revoked")
        if row is not None and row.scopes != scopes:
            keys.update(db, row.id, scopes=scopes)
        if row is not None and not scopes:
            keys.end_sessions(db, row.id)
    if not scopes or row is None:
        context.spending.publish_keys()
        raise refused("none of your groups has a scope on this box")
    return replace(row, scopes=scopes)
