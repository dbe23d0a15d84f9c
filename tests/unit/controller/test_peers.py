"""A request on the box's own socket comes from the box by default; on the gateways' socket it must name an identity."""

from __future__ import annotations

import re

import httpx
import pytest
from starlette.types import ASGIApp

from appliance.controller.interfaces.principal import Listener

from .conftest import Control

TOKEN = "t" * 64
KEY, SCOPES, PROOF = ("x-appliance-key-id", "key_1"), ("x-appliance-scopes", "admin"), ("x-appliance-gateway", TOKEN)
WHOLE = [KEY, SCOPES, PROOF]
NOBODY: dict[str, list[tuple[str, str]]] = {
    "nothing": [],
    "no key": [SCOPES, PROOF],
    "no scopes": [KEY, PROOF],
    "two keys": [KEY, KEY, SCOPES, PROOF],
    "two scopes": [KEY, ("x-appliance-scopes", "inference"), SCOPES, PROOF],
    "no token": [KEY, SCOPES],
    "another token": [KEY, SCOPES, ("x-appliance-gateway", "u" * 64)],
    "two tokens": [KEY, SCOPES, PROOF, PROOF],
    "underscores": [("x_appliance_key_id", "key_1"), ("x_appliance_scopes", "admin"), PROOF],
}


async def _send(app: ASGIApp, method: str, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://box") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize("headers", NOBODY.values(), ids=list(NOBODY))
async def test_gateway_request_without_one_identity_is_refused(control: Control, headers: list[tuple[str, str]]):
    app = Listener(control.app, TOKEN)
    for path in ("/admin/v1/keys", "/internal/responses/context?id=resp_1", "/openapi.json", "/nothing"):
        answer = await _send(app, "GET", path, headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "missing_identity"
        assert answer.headers["connection"] == "close"
    assert (await _send(app, "GET", "/admin/v1/keys", WHOLE)).status_code == 200


def _routes(control: Control) -> list[tuple[str, str]]:
    """Return (method, path) of every route, including routes that the OpenAPI document omits."""
    return [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))  # type: ignore[attr-defined]
        for route in control.app.routes
        for method in sorted(getattr(route, "methods", ()))
    ]


async def test_gateway_itself_may_only_send_copies(control: Control):
    app = Listener(control.app, TOKEN)
    own = [("x-appliance-key-id", "gateway"), ("x-appliance-scopes", "gateway"), PROOF]
    open_to_all = {"/openapi.json", "/internal/responses", "/internal/responses/context"}
    open_to_all |= {f"/admin/v1/oidc{end}" for end in ("", "/begin", "/finish")}  # logins of users who have no key yet
    for method, path in _routes(control):
        if path not in open_to_all:
            assert (await _send(app, method, path, own)).status_code == 403, (method, path)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://box", headers=own) as gateway:
        assert (await gateway.post("/internal/responses", json=[])).json() == {"stored": 0}


async def test_local_socket_without_identity_is_the_box(control: Control):
    app = Listener(control.app)
    assert (await _send(app, "GET", "/admin/v1/keys", [])).status_code == 200
    assert (await _send(app, "GET", "/admin/v1/keys", [KEY, ("x-appliance-scopes", "inference")])).status_code == 403
    for half in ([KEY], [SCOPES], [KEY, KEY, SCOPES]):
        assert (await _send(app, "GET", "/admin/v1/keys", half)).status_code == 401
