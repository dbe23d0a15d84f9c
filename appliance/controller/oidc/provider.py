"""One OpenID provider: a code for a token, and who the token says came. Authlib speaks the protocol.

Endpoints and keys are fetched when they are first needed, keys again when a token names one that is not known.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from authlib.integrations.base_client.errors import OAuthError
from authlib.integrations.starlette_client import StarletteOAuth2App
from joserfc.errors import JoseError

from appliance.controller.interfaces.config import OidcSettings
from appliance.controller.interfaces.errors import ApiError

# Public keys alone: with the secret's own family, whoever knows the secret could sign.
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
ANSWER_S: Final = 10.0
_LEEWAY_S: Final = 60


def refused(why: str) -> ApiError:
    """What a provider, or somebody in its place, said is not what it has to be."""
    return ApiError(403, f"The login was not accepted: {why}.", code="login_refused")


def away(why: str) -> ApiError:
    return ApiError(
        502, f"The login provider cannot be asked now: {why}. Please retry.", kind="server_error", code="provider_away"
    )


class _Client(StarletteOAuth2App):  # type: ignore[misc]
    """Authlib's, with checks that the provider's own document cannot loosen."""

    async def load_server_metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = await super().load_server_metadata()
        issuer = self.name
        if found.get("issuer") != issuer:
            self.server_metadata = {}
            raise away(f"it calls itself {found.get('issuer')!r}, the settings {issuer!r}")
        found["id_token_signing_alg_values_supported"] = ALGORITHMS
        if "client_secret_post" in found.get("token_endpoint_auth_methods_supported", ()) and self.client_secret:
            found["token_endpoint_auth_method"] = "client_secret_post"
        return found


class Provider:
    """transport: in place of the network, in tests."""

    def __init__(self, settings: OidcSettings, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._settings, self._transport = settings, transport
        self._made: _Client | None = None

    @property
    def redirect_uri(self) -> str:
        """Where the provider sends a browser back to: the page itself."""
        return f"{self._settings.box_url}/ui"

    def _client(self) -> _Client:
        if self._made is None:
            settings, path = self._settings, self._settings.client_secret_path
            self._made = _Client(
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
                    "transport": self._transport,
                },
            )
        return self._made

    async def begin(self) -> dict[str, str]:
        """{"url": where the browser goes, "state", "nonce", "code_verifier"}. Raises ApiError."""
        with _refusals():
            found: dict[str, str] = await self._client().create_authorization_url(self.redirect_uri)
        return found

    async def claims(self, code: str, nonce: str, verifier: str) -> dict[str, Any]:
        """What the provider says of who came with this code: its identity token's claims, and those of userinfo where
        the token has no groups. Raises ApiError."""
        client, settings = self._client(), self._settings
        with _refusals():
            token = await client.fetch_access_token(self.redirect_uri, code=code, code_verifier=verifier)
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
                    raise refused("the provider answered about somebody else")
                claims = {**userinfo, **claims}
        return claims


@contextmanager
def _refusals() -> Iterator[None]:
    """What Authlib raises, as an ApiError."""
    try:
        yield
    except OAuthError as error:
        raise refused(f"the provider does not take this code ({error.error})") from error
    except httpx2.HTTPStatusError as error:
        raise away(f"{error.request.url.path} answered {error.response.status_code}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise away(type(error).__name__) from error
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise refused(f"its token is not good ({type(error).__name__})") from error
