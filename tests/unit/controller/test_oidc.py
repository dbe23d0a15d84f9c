"""Logins through an OpenID provider: redirects, checks of the token, and scopes by group."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from appliance.controller.admin import logins
from appliance.controller.app import create_app
from appliance.controller.bus.bus import Bus
from appliance.controller.interfaces.principal import Listener
from appliance.store import keys
from appliance.store.database import Database
from appliance.store.rows import AUDIT
from tests.simulator.control_plane import simulated_context

ISSUER, BOX = "https://login.example.org", "https://box.example.org"
GATEWAY = {"x-appliance-key-id": "gateway", "x-appliance-scopes": "gateway"}
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OIDC = "/admin/v1/oidc"
SETTINGS: dict[str, Any] = {
    "issuer": ISSUER,
    "client_id": "box",
    "groups": {"ml": ["inference", "fine_tuning"], "ops": ["read"], "root": ["admin"]},
}


class FakeProvider:
    """A fake provider that checks code, redirect and verifier, and answers with `claims`, `sign` and `userinfo`."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {"sub": "7", "preferred_username": "ann", "groups": ["ml"]}
        self.sign: Callable[[dict[str, Any]], str | None] = lambda claims: jwt.encode(
            claims, KEY, "RS256", headers={"kid": "k1"}
        )
        self.userinfo: dict[str, Any] = {}
        self.asked: list[str] = []
        self.gone: dict[str, str] = {}
        self.down = False
        self.code = ""

    def visited(self, url: str) -> dict[str, str]:
        """Simulate a login at this URL; return the parameters with which the provider redirects to the box."""
        parts = urlsplit(url)
        assert f"{parts.scheme}://{parts.netloc}{parts.path}" == f"{ISSUER}/authorize"
        self.gone = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert self.gone["redirect_uri"] == f"{BOX}/ui" and self.gone["code_challenge_method"] == "S256"
        assert self.gone["response_type"] == "code" and "openid" in self.gone["scope"].split()
        self.code = "c0de"
        return {"code": self.code, "state": self.gone["state"]}

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        self.asked.append(path)
        if self.down:
            return httpx2.Response(503)
        if path == "/.well-known/openid-configuration":
            names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
            more = {"userinfo_endpoint": "me"} if self.userinfo else {}
            return httpx2.Response(
                200, json={"issuer": ISSUER} | {name: f"{ISSUER}/{end}" for name, end in (names | more).items()}
            )
        if path == "/keys":
            row = jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
            return httpx2.Response(200, json={"keys": [row | {"kid": "k1", "use": "sig"}]})
        if path == "/me":
            assert request.headers["authorization"] == "Bearer t0ken"
            return httpx2.Response(200, json=self.userinfo)
        form = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        good = challenge.decode() == self.gone["code_challenge"] and form["redirect_uri"] == self.gone["redirect_uri"]
        if path != "/token" or form["code"] != self.code or not good:
            return httpx2.Response(400, json={"error": "invalid_grant"})
        self.code = ""  # once
        now_s = int(time.time())
        claims = {"iss": ISSUER, "aud": "box", "iat": now_s, "exp": now_s + 60, "nonce": self.gone["nonce"]}
        token = self.sign({**claims, **self.claims})
        return httpx2.Response(200, json={"access_token": "t0ken", **({} if token is None else {"id_token": token})})


class Way:
    """A box with this provider; `back` acts as a browser that follows the redirects."""

    def __init__(self, http: httpx.AsyncClient, db: Database, provider: FakeProvider, bus: Bus) -> None:
        self.http, self.db, self.provider, self.bus = http, db, provider, bus

    async def back(self, **changes: str) -> httpx.Response:
        begun = (await self.http.post(f"{OIDC}/begin")).raise_for_status().json()
        body = {**self.provider.visited(begun["url"]), "binder": begun["binder"], **changes}
        return await self.http.post(f"{OIDC}/finish", json=body)


@pytest.fixture
async def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Way]:
    provider = FakeProvider()
    with Database(tmp_path / "appliance.db") as db:
        context = simulated_context(tmp_path, db, oidc=SETTINGS)
        context.box["public_url"] = BOX
        monkeypatch.setattr(logins, "TRANSPORT", httpx2.MockTransport(provider.answer))
        app = create_app(context)
        transport = httpx.ASGITransport(Listener(app), raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://box", headers=GATEWAY) as http,
        ):
            yield Way(http, db, provider, context.bus)


async def test_finish_creates_login_with_scopes_of_groups(way: Way) -> None:
    assert (await way.http.get(OIDC)).json()["name"] == "single sign-on"
    answer = await way.back()
    assert answer.status_code == 201
    made = answer.json()
    assert answer.headers["x-appliance-cookie"].startswith(f"{made['id']}=") and made["page"]
    (row,) = keys.list_all(way.db)
    assert row.scopes == ["inference", "fine_tuning"] and row.owner == row.name and row.name.startswith("ann-")
    (known,) = way.bus.table["keys"].values()
    assert [one["id"] for one in known["sessions"].values()] == [made["id"]]
    (told,) = AUDIT.page(way.db, after=None, limit=5).data
    assert (told.action, told.key_id, told.outcome) == ("session.create", row.id, "done")


async def test_second_finish_keeps_key_and_updates_scopes(way: Way) -> None:
    await way.back()
    way.provider.claims |= {"preferred_username": "ann-marie", "groups": ["ops", "root", "other"]}
    await way.back()
    (row,) = keys.list_all(way.db)
    assert row.scopes == ["read", "admin"] and row.name.startswith("ann-")
    # Another person with the same user name gets a separate key.
    way.provider.claims |= {"sub": "8", "preferred_username": "ann"}
    await way.back()
    assert len({row.owner for row in keys.list_all(way.db)}) == 2


@pytest.mark.parametrize("groups", [[], ["other"], None, {"ml": 1}])
async def test_finish_without_known_group_is_rejected(way: Way, groups: Any) -> None:
    way.provider.claims["groups"] = groups
    answer = await way.back()
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "login_refused"
    assert keys.list_all(way.db) == [] and keys.list_sessions(way.db, time.time()) == []
    (told,) = AUDIT.page(way.db, after=None, limit=5).data
    assert (told.outcome, told.key_id) == ("refused", "gateway")


async def test_finish_with_revoked_key_is_rejected(way: Way) -> None:
    await way.back()
    keys.revoke(way.db, keys.list_all(way.db)[0].id)
    answer = await way.back()
    assert answer.status_code == 403 and "revoked" in answer.json()["error"]["message"]
    assert len(keys.list_all(way.db)) == 1


def signed(changes: dict[str, Any], key: Any = KEY, kind: str | None = "RS256", kid: str = "k1") -> Any:
    def sign(claims: dict[str, Any]) -> str:
        told = {name: value for name, value in {**claims, **changes}.items() if value is not None}
        return jwt.encode(told, key, kind, headers={"kid": kid})

    return sign


OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
SECRET = hashlib.sha256(KEY.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
BAD_TOKENS: dict[str, Any] = {
    "no token": lambda claims: "x",
    "another login's": signed({"nonce": "n"}),
    "another program's": signed({"aud": "other"}),
    "another provider's": signed({"iss": "https://evil.example.org"}),
    "an old one": signed({"exp": int(time.time()) - 3600, "iat": int(time.time()) - 7200}),
    "nobody's": signed({"sub": None}),
    "unsigned": signed({}, None, None),
    "signed by another key": signed({}, OTHER),
    "signed with what everybody knows": signed({}, SECRET, "HS256"),
}


@pytest.mark.parametrize("sign", BAD_TOKENS.values(), ids=list(BAD_TOKENS))
async def test_finish_with_bad_token_is_rejected(way: Way, sign: Any) -> None:
    way.provider.sign = sign
    answer = await way.back()
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "login_refused", answer.text
    assert "x-appliance-cookie" not in answer.headers and keys.list_all(way.db) == []


@pytest.mark.parametrize("changes", [{"binder": "x"}, {"binder": "x.y.z"}, {"state": "x"}, {"code": "x"}])
async def test_finish_from_another_browser_is_rejected(way: Way, changes: dict[str, str]) -> None:
    answer = await way.back(**changes)
    assert answer.status_code == 403 and keys.list_all(way.db) == []


async def test_finish_rejects_userinfo_of_other_subject(way: Way) -> None:
    del way.provider.claims["groups"]
    way.provider.userinfo = {"sub": "7", "groups": ["ops"]}
    assert (await way.back()).status_code == 201
    assert keys.list_all(way.db)[0].scopes == ["read"]
    way.provider.userinfo["sub"] = "8"
    assert (await way.back()).status_code == 403


async def test_begin_without_reachable_provider_returns_502(way: Way) -> None:
    way.provider.down = True
    answer = await way.http.post(f"{OIDC}/begin")
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "provider_away"
    way.provider.down = False
    assert (await way.back()).status_code == 201


async def test_finish_after_loss_of_group_ends_earlier_logins(way: Way) -> None:
    assert (await way.back()).status_code == 201
    way.provider.claims["groups"] = ["other"]
    assert (await way.back()).status_code == 403
    assert keys.list_sessions(way.db, time.time()) == []
    assert [row.get("sessions") for row in way.bus.table["keys"].values()] == [None]
    assert [row.scopes for row in keys.list_all(way.db)] == [[]]
