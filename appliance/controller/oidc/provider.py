"""One OpenID provider: where its endpoints are, a code for a token, and who the token says came.

After https://openid.net/specs/openid-connect-core-1_0.html, sections 3.1.3.3 to 3.1.3.7, and RFC 7636 (PKCE). Endpoints
and keys are asked for when they are first needed, and again when a token names a key that is not known.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import httpx
import jwt
import orjson

from appliance.controller.interfaces.config import OidcSettings
from appliance.controller.interfaces.errors import ApiError

# Public keys alone: with the secret's own family, whoever knows the secret could sign.
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEY_KINDS: Final = ("RSA", "EC", "OKP")
ANSWER_S: Final = 10.0
ANSWER_BYTES: Final = 1 << 20
KEPT_S: Final = 3600.0
AGAIN_S: Final = 30.0
"""Keys are not asked for more often, however many tokens name unknown ones."""
AWAY_S: Final = 5.0
"""After a provider was asked in vain, nobody waits for it: a person who logs in has no key yet, and may ask without
end."""
_LEEWAY_S: Final = 60.0


def refused(why: str) -> ApiError:
    """What a provider, or somebody in its place, said is not what it has to be."""
    return ApiError(403, f"The login was not accepted: {why}.", code="login_refused")


def away(why: str) -> ApiError:
    return ApiError(
        502, f"The login provider cannot be asked now: {why}. Please retry.", kind="server_error", code="provider_away"
    )


def _key_of(row: dict[str, Any]) -> jwt.PyJWK | None:
    """Returns None for a key that nobody here can read: tokens that the other keys have signed are still taken."""
    try:
        return jwt.PyJWK(row)
    except (jwt.PyJWTError, TypeError, ValueError):
        return None


class Provider:
    """transport: in place of the network, in tests."""

    def __init__(self, settings: OidcSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings, self._transport = settings, transport
        self._endpoints: dict[str, Any] = {}
        self._keys: dict[str, jwt.PyJWK] = {}
        self._known_s = self._keys_s = self._away_s = float("-inf")
        self._asking = asyncio.Lock()

    @property
    def redirect_uri(self) -> str:
        """Where the provider sends a browser back to: the page itself."""
        return f"{self._settings.box_url}/ui"

    async def begin_url(self, state: str, nonce: str, verifier: str) -> str:
        """Where the browser goes to. Raises ApiError."""
        endpoints = await self._known()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": " ".join(self._settings.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        url = endpoints["authorization_endpoint"]
        return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(query)}"

    async def claims(self, code: str, nonce: str, verifier: str) -> dict[str, Any]:
        """What the provider says of who came with this code: its identity token's claims, and those of userinfo where
        the token has no groups. Raises ApiError."""
        endpoints, settings = await self._known(), self._settings
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "code_verifier": verifier,
            "client_id": settings.client_id,
        }
        secret = None
        if settings.client_secret_path is not None:
            secret = (await asyncio.to_thread(Path(settings.client_secret_path).read_text)).strip()
        by_form = "client_secret_post" in endpoints.get("token_endpoint_auth_methods_supported", ())
        if secret is not None and by_form:
            form["client_secret"] = secret
        basic = httpx.BasicAuth(settings.client_id, secret) if secret is not None and not by_form else None
        answer = await self._ask("POST", endpoints["token_endpoint"], data=form, auth=basic)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise refused("the provider gave no identity token for this code")
        claims = await self._verified(token, nonce)
        if settings.groups_claim not in claims and "userinfo_endpoint" in endpoints:
            bearer = {"authorization": f"Bearer {answer.get('access_token')}"}
            userinfo = await self._ask("GET", endpoints["userinfo_endpoint"], headers=bearer)
            if userinfo.get("sub") != claims["sub"]:
                raise refused("the provider answered about somebody else")
            claims = {**userinfo, **claims}
        return claims

    async def _verified(self, token: str, nonce: str) -> dict[str, Any]:
        try:
            head = jwt.get_unverified_header(token)
            if head.get("alg") not in ALGORITHMS:
                raise refused("its signature is of a kind that is not taken")
            key = await self._key(head.get("kid"))
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[head["alg"]],
                audience=self._settings.client_id,
                issuer=self._settings.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iat", "aud", "iss", "sub"]},
            )
        except (jwt.PyJWTError, TypeError, ValueError) as error:
            raise refused(f"its token is not good ({type(error).__name__})") from error
        if claims.get("nonce") != nonce:
            raise refused("its token is of another login")
        if claims.get("azp", self._settings.client_id) != self._settings.client_id:
            raise refused("its token is for another program")
        return claims

    async def _key(self, kid: str | None) -> jwt.PyJWK:
        """kid: None of a token that names none, which is good where the provider has one key (section 10.1)."""
        async with self._asking:
            age_s = time.monotonic() - self._keys_s
            if age_s > KEPT_S or (age_s > AGAIN_S and kid is not None and kid not in self._keys):
                endpoints = await self._known_here()
                found = await self._ask("GET", endpoints["jwks_uri"])
                self._keys_s = time.monotonic()
                rows = [row for row in found.get("keys", []) if isinstance(row, dict)]
                usable = [row for row in rows if row.get("kty") in KEY_KINDS and row.get("use", "sig") == "sig"]
                self._keys = {str(row.get("kid", "")): key for row in usable if (key := _key_of(row)) is not None}
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if kid is None or kid not in self._keys:
            raise refused("its token is signed by a key that the provider does not publish")
        return self._keys[kid]

    async def _known(self) -> dict[str, Any]:
        async with self._asking:
            return await self._known_here()

    async def _known_here(self) -> dict[str, Any]:
        if time.monotonic() - self._known_s > KEPT_S:
            if time.monotonic() - self._away_s < AWAY_S:
                raise away("it did not answer a moment ago")
            try:
                self._endpoints = await self._found()
            except ApiError:
                self._away_s = time.monotonic()
                raise
            self._known_s = time.monotonic()
        return self._endpoints

    async def _found(self) -> dict[str, Any]:
        issuer = self._settings.issuer
        found = await self._ask("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != issuer:
            raise away(f"it calls itself {found.get('issuer')!r}, the settings {issuer!r}")
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            url = urlsplit(str(found.get(name, "")))
            if url.scheme != "https" and url.scheme != urlsplit(issuer).scheme:
                raise away(f"its {name} is no https URL")
        return found

    async def _ask(self, method: str, url: str, **more: Any) -> dict[str, Any]:
        verify: Any = True
        if self._settings.ca_path is not None:
            verify = ssl.create_default_context(cafile=self._settings.ca_path)
        try:
            async with (
                httpx.AsyncClient(timeout=ANSWER_S, verify=verify, transport=self._transport) as client,
                asyncio.timeout(2 * ANSWER_S),
                client.stream(method, url, **more) as answer,
            ):
                body = b""
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > ANSWER_BYTES:
                        raise away("its answer is too long")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
            raise away(type(error).__name__) from error
        if answer.status_code == 400 and method == "POST":
            raise refused("the provider does not take this code, or took it before")
        if answer.status_code != 200:
            raise away(f"{urlsplit(url).path} answered {answer.status_code}")
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise away("its answer is no JSON") from error
        if not isinstance(found, dict):
            raise away("its answer is no JSON object")
        return found
