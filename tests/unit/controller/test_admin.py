"""Routes of /admin/v1 for the CLI and the dashboard; each action writes an audit row."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from appliance.store import keys, models
from appliance.store.rows import AUDIT, OPERATIONS
from tests.unit.controller.conftest import ADMIN, SCOPES, Control, insert_model


async def ask(control: Control, method: str, path: str, status: int = 200, **kwargs: Any) -> dict[str, Any]:
    url = path if path.startswith("/v1/") else f"/admin/v1{path}"
    answer = await control.http.request(method, url, headers=ADMIN, **kwargs)
    assert answer.status_code == status, answer.text
    return answer.json()


async def ended(control: Control, accepted: dict[str, Any]) -> dict[str, Any]:
    """Wait until the accepted operation has ended; return the operation."""
    operation_id = accepted["operation"]["id"]
    while True:
        operation = (await ask(control, "GET", f"/operations/{operation_id}"))["operation"]
        if operation["state"] != "running":
            return operation
        await asyncio.sleep(0)


def actions(control: Control) -> list[tuple[str, str, str]]:
    """Return audited actions, oldest first, without actions of the client that uploads files and creates jobs."""
    rows = AUDIT.page(control.db, after=None, limit=99).data[::-1]
    return [(row.action, row.target, row.outcome) for row in rows if row.key_id != SCOPES["x-appliance-key-id"]]


async def test_new_and_revoked_keys_reach_gateways_at_once(control: Control):
    made = await ask(control, "POST", "/keys", json={"name": "laptop", "scopes": ["inference"]})
    digest = keys.fingerprint(made["key"])
    assert control.gateway_keys[digest] == {"id": made["id"], "owner": "laptop", "scopes": ["inference"]}
    listed = (await ask(control, "GET", "/keys"))["data"]
    assert [row["name"] for row in listed] == ["laptop"] and "key" not in listed[0] and "sha256" not in listed[0]
    conflict = await control.http.post("/admin/v1/keys", headers=ADMIN, json={"name": "laptop"})
    assert conflict.status_code == 409 and conflict.headers["x-should-retry"] == "false"
    digest = await rotated(control, made)
    revoked = await ask(control, "DELETE", "/keys/laptop")
    assert revoked["revoked_s"] is not None and digest not in control.gateway_keys
    await ask(control, "DELETE", "/keys/nobody", 404)
    done = ["key.create", "key.rotate", "key.revoke"]
    assert actions(control) == [(action, made["id"], "done") for action in done]
    await ask(control, "POST", "/keys/laptop/rotate", 404)
    assert made["key"] not in str(AUDIT.page(control.db, after=None, limit=9))


async def rotated(control: Control, made: dict[str, Any]) -> str:
    """Rotate the key, check that gateways have only its new secret, and return the SHA-256 of the new secret."""
    keys.create_session(control.db, made["id"], agent="", now_s=1.0, until_s=1e12)
    again = await ask(control, "POST", "/keys/laptop/rotate")
    assert again["id"] == made["id"] and again["key"] != made["key"] and again["key"].startswith(again["prefix"])
    digest = keys.fingerprint(again["key"])
    assert control.gateway_keys[digest]["id"] == made["id"]
    assert keys.fingerprint(made["key"]) not in control.gateway_keys
    assert "sessions" not in control.gateway_keys[digest], "who had the old one is logged in no more"
    return digest


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "小王"}, "name"),
        ({"name": "all"}, "name"),
        ({"name": "a", "scopes": ["root"]}, "scopes.0"),
        ({"name": "a", "owner": "a\r\nx: y"}, "owner"),
        ({"name": "a", "team": "x"}, "team"),
    ],
)
async def test_create_invalid_key_is_rejected(control: Control, body: dict[str, Any], param: str):
    error = (await ask(control, "POST", "/keys", 400, json=body))["error"]
    assert error["param"] == param and keys.list_all(control.db) == []


@pytest.mark.parametrize(("source", "code"), [("broken", "invalid_checkpoint"), ("bug", "internal_error")])
async def test_failed_import_has_a_reason_and_leaves_no_model(control: Control, source: str, code: str):
    done = await ended(control, await ask(control, "POST", "/models/import", 202, json={"source": source}))
    assert (done["state"], done["error"]["code"]) == ("failed", code)
    assert [row.id for row in models.list_all(control.db)] == ["starter"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"source": "a\0b"}, 400, "source"),
        ({"source": "x", "name": "../up"}, 400, "name"),
        ({"source": "x", "name": "starter"}, 409, "name"),
        ({"source": "x", "revision": "a b"}, 400, "revision"),
    ],
)
async def test_invalid_import_is_rejected(control: Control, body: dict[str, Any], status: int, param: str):
    assert (await ask(control, "POST", "/models/import", status, json=body))["error"]["param"] == param
    assert OPERATIONS.page(control.db).data == []


async def test_import_equal_to_running_import_is_refused(control: Control, hanging: asyncio.Event):
    body = {"source": "/data/m", "name": "m"}
    first = await ask(control, "POST", "/models/import", 202, json=body)
    await hanging.wait()
    second = await control.http.post("/admin/v1/models/import", headers=ADMIN, json=body)
    assert second.status_code == 409 and first["operation"]["id"] in second.json()["error"]["message"]


@pytest.fixture
def hanging(control: Control, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Make imports hang; return an event that is set when an import has begun."""
    reached = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> Any:
        reached.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(control.ops, "import_model", hang)
    return reached


@pytest.mark.parametrize("source", ["/data/model", "/data/adapter-of-starter"])
async def test_import_resumes_after_restart(control: Control, hanging: asyncio.Event, monkeypatch, source: str):
    body = {"source": source, "name": "new", "origin": "org/new"}
    accepted = await ask(control, "POST", "/models/import", 202, json=body)
    await hanging.wait()
    await control.context.tasks.stop()
    row = OPERATIONS.find(control.db, accepted["operation"]["id"])
    assert row is not None and row.state == "running"
    monkeypatch.undo()
    control.context.tasks.resume()
    assert (await ended(control, accepted))["state"] == "succeeded"
    model = models.find(control.db, "new")
    expected = ("fine-tuned", source) if "adapter" in source else ("base", "org/new")
    assert model is not None and (model.kind, model.source) == expected


async def test_rollback_activates_previous_or_named_version(control: Control):
    insert_model(control.db, "m", versions=("v1", "v2", "v3"))
    told = await ask(control, "POST", "/models/m/rollback")
    assert (told["from"], told["to"]) == ("v3", "v2")
    assert (await ask(control, "POST", "/models/m/rollback", json={"version": "v3"}))["to"] == "v3"
    await ask(control, "POST", "/models/m/rollback", 404, json={"version": "v9"})
    await ask(control, "POST", "/models/m/rollback", json={"version": "v1"})
    error = (await ask(control, "POST", "/models/m/rollback", 409))["error"]
    assert error["code"] == "no_older_version"


async def test_refused_rollback_keeps_the_served_version(control: Control):
    insert_model(control.db, "m", versions=("v1", "v2"))
    control.scheduler.swap_error = "the fingerprint differs"
    error = (await ask(control, "POST", "/models/m/rollback", 409))["error"]
    assert error["code"] == "swap_failed"
    found = models.find(control.db, "m")
    assert found is not None and found.active_version == "v2"
    assert actions(control) == [("model.rollback", "m", "failed")]


async def test_key_for_an_unknown_model_is_refused(control: Control):
    for method, path, body in (("POST", "/keys", {"name": "bob"}), ("PATCH", "/keys/joe", {})):
        if method == "PATCH":
            assert (await ask(control, "POST", "/keys", json={"name": "joe"}))["scopes"] == ["inference", "fine_tuning"]
        error = (await ask(control, method, path, 400, json=body | {"models": ["starter", "nosuch"]}))["error"]
        assert error["param"] == "models"
    made = await ask(control, "POST", "/keys", json={"name": "bob", "models": ["starter"]})
    assert made["scopes"] == ["inference"], "for using one model: training was not asked for"


async def test_log_is_returned_only_to_administrators_and_by_listed_name(control: Control):
    folder = Path(control.context.box["data_dir"]) / "logs"
    (folder / "ray").mkdir(parents=True)
    (folder / "main.log").write_text("one\ntwo\nthree\n")
    (folder / "ray" / "gcs.out").write_text("x" * 300_000 + "\nlast\n")
    (folder / "packed.log.gz").write_bytes(b"")
    (folder / "link.log").symlink_to("/etc/passwd")
    (folder.parent / "first-key").write_text("secret")
    listed = (await ask(control, "GET", "/logs"))["data"]
    assert {row["name"] for row in listed} == {"main.log", "ray/gcs.out"} and all(row["changed_at"] for row in listed)
    assert (await ask(control, "GET", "/logs/main.log?lines=2"))["lines"] == ["two", "three"]
    assert (await ask(control, "GET", "/logs/ray/gcs.out"))["lines"] == ["last"], "its first line is cut"
    for name in ("link.log", "packed.log.gz", "../first-key", "..%2Ffirst-key", "ray/../../first-key", "nosuch.log"):
        answer = await control.http.get(f"/admin/v1/logs/{name}", headers=ADMIN)
        assert answer.status_code == 404 and "secret" not in answer.text, name
    reader = {**ADMIN, "x-appliance-scopes": "read"}
    assert (await control.http.get("/admin/v1/logs", headers=reader)).status_code == 403
