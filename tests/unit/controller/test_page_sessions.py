"""Logins of the web page: a key creates a login; its owner lists and ends logins; a login ends with its key."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import httpx
import pytest

from appliance.controller.admin import logins
from appliance.store.rows import AUDIT, PAGE_SESSIONS

from .conftest import ADMIN, Control

SESSIONS = "/admin/v1/sessions"


async def begin(control: Control, **body: Any) -> dict[str, Any]:
    answer = await control.http.post(SESSIONS, json=body, headers={"user-agent": "a browser"})
    assert answer.status_code == 201
    return answer.json() | {"cookie": answer.headers["x-appliance-cookie"]}


def by(session: dict[str, Any]) -> dict[str, str]:
    return {"x-appliance-session": session["id"]}


def sent(control: Control, key_id: str) -> dict[str, Any]:
    """Return the logins of a key that gateways have in their table."""
    (row,) = [row for row in control.gateway_keys.values() if row["id"] == key_id]
    return row.get("sessions", {})


def at(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    monkeypatch.setattr(time, "time", lambda: now_s)


async def test_login_stores_only_hash_of_its_token(control: Control) -> None:
    key_id = control.as_key("ann", scopes=["read"])
    made = await begin(control)
    name, _, rest = made["cookie"].partition("=")
    half, _, more = rest.partition("; ")
    assert name == made["id"] and more == f"Max-Age={logins.LASTS_S:.0f}"
    digest = hashlib.sha256(f"{half}.{made['page']}".encode()).hexdigest()
    assert sent(control, key_id) == {digest: {"id": made["id"], "until_s": made["until_s"]}}
    stored = [tuple(row) for row in control.db.execute("SELECT * FROM page_sessions")]
    told = AUDIT.page(control.db, after=None, limit=5).data
    assert [row.action for row in told] == ["session.create"]
    assert half not in repr([stored, told]) and made["page"] not in repr([stored, told])
    assert (await begin(control, secure=True))["cookie"].endswith("; Secure")


@pytest.mark.parametrize("scopes", [["metrics"], ["admin"]])
async def test_key_of_any_scope_begins_lists_and_ends_logins(control: Control, scopes: list[str]) -> None:
    control.as_key("ann", scopes=scopes)
    made = await begin(control)
    assert (await control.http.get("/admin/v1/me", headers=by(made))).status_code == 200
    (listed,) = (await control.http.get(SESSIONS, headers=by(made))).json()["data"]
    assert listed["id"] == made["id"] and listed["agent"] == "a browser" and "page" not in listed
    ended = await control.http.delete(f"{SESSIONS}/{made['id']}", headers=by(made))
    assert ended.status_code == 200 and ended.headers["x-appliance-cookie"] == f"{made['id']}=; Max-Age=0"
    assert (await control.http.get("/admin/v1/me", headers=by(made))).json()["error"]["code"] == "session_ended"


async def test_login_cannot_begin_another_login(control: Control) -> None:
    control.as_key("ann", scopes=["admin"])
    made = await begin(control)
    assert (await control.http.post(SESSIONS, json={}, headers=by(made))).status_code == 403
    bare = {name: value for name, value in control.http.headers.items() if not name.startswith("x-appliance")}
    async with httpx.AsyncClient(transport=control.http._transport, base_url="http://box", headers=bare) as box:
        assert (await box.post(SESSIONS, json={})).status_code == 403


async def test_logins_of_other_owner_are_not_found(control: Control) -> None:
    control.as_key("ann", owner="ann")
    hers = await begin(control)
    control.as_key("bob", owner="bob")
    assert (await control.http.get(SESSIONS)).json()["data"] == []
    assert (await control.http.get("/admin/v1/me", headers=by(hers))).status_code == 401
    assert (await control.http.delete(f"{SESSIONS}/{hers['id']}")).status_code == 404
    his = await begin(control)
    control.as_key("ann's other", owner="ann")
    assert [row["id"] for row in (await control.http.get(SESSIONS)).json()["data"]] == [hers["id"]]
    everybodys = (await control.http.get(SESSIONS, headers=ADMIN)).json()["data"]
    assert [row["id"] for row in everybodys] == [hers["id"], his["id"]]
    assert (await control.http.delete(f"{SESSIONS}/{his['id']}", headers=ADMIN)).status_code == 200
    assert (await control.http.delete(f"{SESSIONS}/{hers['id']}")).status_code == 200


async def test_login_ends_with_its_key(control: Control) -> None:
    key_id = control.as_key("ann")
    made = await begin(control)
    assert (await control.http.delete(f"/admin/v1/keys/{key_id}", headers=ADMIN)).status_code == 200
    assert PAGE_SESSIONS.find(control.db, made["id"]) is None
    assert key_id not in {row["id"] for row in control.gateway_keys.values()}


async def test_login_ends_after_a_day(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    key_id = control.as_key("ann")
    made = await begin(control)
    at(monkeypatch, made["created_s"] + logins.LASTS_S + 1)
    assert (await control.http.get("/admin/v1/me", headers=by(made))).status_code == 401
    logins.keep_house(control.context, made["created_s"] + logins.LASTS_S + 1)
    assert PAGE_SESSIONS.find(control.db, made["id"]) is None and sent(control, key_id) == {}
