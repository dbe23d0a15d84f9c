"""Every route that is not for reading alone leaves a row in the audit log, or is on a list that says why not."""

from __future__ import annotations

from typing import Any

import httpx
from fastapi.routing import APIRoute

from appliance.controller.admin.owners import session_keys
from appliance.controller.http.audited import READS, is_unaudited
from appliance.controller.http.peers import FromBox
from appliance.controller.http.routers import StrictRoute
from appliance.controller.responses.completions import completion_row
from appliance.store.objects import responses
from appliance.store.records import audit, keys, usage
from appliance.store.rows import AuditRow, KeyRow
from tests.unit.controller.conftest import ADMIN, SCOPES, Control, chat_lines, insert_model
from tests.unit.controller.test_completions import completion

LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "starter"}}\n'
CKPT = "ft:starter:local::abcdefgh"


def changing(control: Control) -> dict[tuple[str, str], APIRoute]:
    return {
        (method, route.path): route
        for route in control.app.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods - READS
    }


def rows(control: Control) -> list[AuditRow]:
    return audit.page(control.db, after=None, limit=1000).data[::-1]


async def test_changing_route_is_a_strict_route(control: Control):
    """Their class records each change."""
    assert all(isinstance(route, StrictRoute) for route in changing(control).values())


async def test_every_route_leaves_its_row(control: Control, checked_here: None):
    insert_model(control.db, CKPT, kind="fine-tuned", base="starter", versions=("v1", "v2"))
    insert_model(control.db, "gone")
    seen: dict[tuple[str, str], list[str]] = {}

    async def ask(route: str, path: str = "", headers: dict[str, str] = ADMIN, **more: Any) -> Any:
        """`route` as the app has it; `path` where it takes parameters. Says which row came of it."""
        method, _, template = route.partition(" ")
        before = len(rows(control))
        answer = await control.http.request(method, path or template, headers=headers, **more)
        assert answer.status_code < 400, (route, answer.text)
        new = rows(control)[before:]
        seen[(method, template)] = [row.action for row in new]
        for row in new:
            assert (row.key_id, row.outcome, row.request_id) == (
                headers["x-appliance-key-id"],
                "done",
                answer.headers["x-request-id"],
            )
        return answer.json() if answer.content else None

    def form(name: str, data: bytes, **fields: str) -> dict[str, Any]:
        return {"files": {name: ("a.jsonl", data)}, "data": fields}

    files = [
        (await ask("POST /v1/files", headers=SCOPES, **form("file", data, purpose=purpose)))["id"]
        for data, purpose in ((chat_lines(), "fine-tune"), (LINE, "batch"), (b"x", "user_data"))
    ]
    for verb in ("check", "prepare"):
        await ask(f"POST /v1/files/{{file_id}}/{verb}", f"/v1/files/{files[0]}/{verb}", SCOPES, json={})
    await ask("DELETE /v1/files/{file_id}", f"/v1/files/{files[2]}", SCOPES)
    begun = {"bytes": 3, "filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
    ids = [(await ask("POST /v1/uploads", headers=SCOPES, json=begun))["id"] for _ in range(2)]
    part = await ask(
        "POST /v1/uploads/{upload_id}/parts", f"/v1/uploads/{ids[0]}/parts", SCOPES, **form("data", b"abc")
    )
    await ask(
        "POST /v1/uploads/{upload_id}/complete",
        f"/v1/uploads/{ids[0]}/complete",
        SCOPES,
        json={"part_ids": [part["id"]]},
    )
    await ask("POST /v1/uploads/{upload_id}/cancel", f"/v1/uploads/{ids[1]}/cancel", SCOPES)
    batch = await ask(
        "POST /v1/batches",
        headers=SCOPES,
        json={"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": files[1]},
    )
    await ask("POST /v1/batches/{batch_id}/cancel", f"/v1/batches/{batch['id']}/cancel", SCOPES)

    jobs = "POST /v1/fine_tuning/jobs"
    job = (await ask(jobs, headers=SCOPES, json={"model": "starter", "training_file": files[0]}))["id"]
    await control.settle()
    for verb in ("hold", "release"):
        await ask(f"POST /admin/v1/jobs/{{job_id}}/{verb}", f"/admin/v1/jobs/{job}/{verb}")
    await ask("PATCH /admin/v1/jobs/{job_id}", f"/admin/v1/jobs/{job}", json={"priority": 3})
    for verb in ("pause", "resume", "cancel"):
        await ask(f"{jobs}/{{job_id}}/{verb}", f"/v1/fine_tuning/jobs/{job}/{verb}", SCOPES)
    permissions = "/v1/fine_tuning/checkpoints/{name:path}/permissions"
    made = await ask(
        f"POST {permissions}", f"/v1/fine_tuning/checkpoints/{CKPT}/permissions", json={"project_ids": ["p"]}
    )
    await ask(
        f"DELETE {permissions}/{{permission_id}}",
        f"/v1/fine_tuning/checkpoints/{CKPT}/permissions/{made['data'][0]['id']}",
    )

    asked = await ask("POST /v1/responses", headers=SCOPES, json={"model": "starter", "input": "", "background": True})
    await ask("POST /v1/responses/{response_id}/cancel", f"/v1/responses/{asked['id']}/cancel", SCOPES)
    await ask("DELETE /v1/responses/{response_id}", f"/v1/responses/{asked['id']}", SCOPES)

    kept = completion("chatcmpl-1")
    responses.insert(control.db, completion_row("key_test", "key_test", kept["input"], kept["response"]))
    named = "/v1/chat/completions/{completion_id}"
    await ask(f"POST {named}", "/v1/chat/completions/chatcmpl-1", SCOPES, json={"metadata": {}})
    await ask(f"DELETE {named}", "/v1/chat/completions/chatcmpl-1", SCOPES)

    keys.insert(control.db, KeyRow("key_admin", "boss", "a" * 64, "sk-appl-", 0.0, scopes=["admin"]))
    login = (await ask("POST /admin/v1/sessions", json={}))["id"]
    touch = f"/admin/v1/sessions/{login}/touch"
    await ask("POST /admin/v1/sessions/{session_id}/touch", touch, ADMIN | {"x-appliance-session": login})
    await ask("DELETE /admin/v1/sessions/{session_id}", f"/admin/v1/sessions/{login}")
    await ask("POST /admin/v1/keys", json={"name": "ann"})
    await ask("PATCH /admin/v1/keys/{id_or_name}", "/admin/v1/keys/ann", json={"requests_per_minute": 5})
    await ask("POST /admin/v1/keys/{id_or_name}/rotate", "/admin/v1/keys/ann/rotate")
    await ask("DELETE /admin/v1/keys/{id_or_name}", "/admin/v1/keys/ann")
    await ask("PUT /admin/v1/mode", json={"policy": "serve"})
    await ask("POST /admin/v1/mode/plan", json={"policy": "serve"})
    window = await ask(
        "POST /admin/v1/mode/schedule", json={"cron": "0 22 * * *", "tz": "UTC", "for_s": 60.0, "policy": "train"}
    )
    await ask("DELETE /admin/v1/mode/schedule/{window_id}", f"/admin/v1/mode/schedule/{window['id']}")
    await ask("POST /admin/v1/devices/{device_id:path}/drain", "/admin/v1/devices/n0/1/drain")
    await ask("POST /admin/v1/devices/{device_id:path}/undrain", "/admin/v1/devices/n0/1/undrain")
    await ask("POST /admin/v1/models/import", json={"source": "/somewhere", "name": "imported"})
    await ask("POST /admin/v1/tiers/verify")
    await ask("POST /admin/v1/forget", json={"owner": "nobody"})
    model = "/admin/v1/models/{name:path}"
    await ask(f"POST {model}/verify", f"/admin/v1/models/{CKPT}/verify")
    await ask(f"POST {model}/pin", f"/admin/v1/models/{CKPT}/pin", json={"version": "v1", "pinned": True})
    await ask(f"PATCH {model}/deployment", "/admin/v1/models/starter/deployment", json={"max_replicas": 2})
    await ask(f"POST {model}/rollback", f"/admin/v1/models/{CKPT}/rollback", json={"version": "v1"})
    await ask(f"DELETE {model}", "/admin/v1/models/gone")
    await ask("DELETE /v1/models/{name:path}", f"/v1/models/{CKPT}", SCOPES)

    routes = changing(control)
    for route, actions in seen.items():
        if is_unaudited(routes[route].endpoint):
            assert actions == [], route
        else:
            assert len(actions) == 1 and " " not in actions[0], route
    told = {row.action: row for row in rows(control)}
    assert told["file.delete"].target == files[2] and told["job.cancel"].target == job
    assert told["file.create"].detail == {"filename": "a.jsonl", "purpose": "user_data", "bytes": 1}
    assert told["job.create"].target == job and told["job.create"].detail["training_file"] == files[0]
    assert told["job.update"].detail == {"priority": 3}


async def test_what_was_refused_leaves_none_and_what_broke_off_says_so(control: Control, monkeypatch):
    assert (await control.http.post("/v1/fine_tuning/jobs", json={"model": "starter"})).status_code == 400
    assert (await control.http.delete("/v1/files/file-none")).status_code == 404
    assert rows(control) == []

    def broken(*_: Any) -> None:
        raise OSError("disk")

    file_id = await control.upload()
    monkeypatch.setattr("appliance.controller.files.storage.remove", broken)
    assert (await control.http.delete(f"/v1/files/{file_id}")).status_code == 500
    (row,) = rows(control)[1:]
    assert (row.action, row.target, row.outcome, row.detail) == (
        "file.delete",
        file_id,
        "failed",
        {"error": "OSError: disk"},
    )


async def test_a_command_on_the_box_has_a_key_that_the_log_does_not_tell_of(control: Control):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(FromBox(control.app)), base_url="http://box") as people:
        made = (await people.post("/admin/v1/session-keys")).json()
        assert control.gateway_keys[keys.fingerprint(made["key"])]["scopes"] == ["inference"]
        assert (await people.get("/admin/v1/keys")).json()["data"] == []
        left = (await people.post("/admin/v1/session-keys")).json()
        usage.add(
            control.db,
            [
                {
                    "key": made["id"],
                    "model": "starter",
                    "version": "v1",
                    "requests": 1,
                    "errors": 0,
                    "prompt_tokens": 2,
                    "completion_tokens": 3,
                }
            ],
            7200.0,
        )
        assert (await people.delete(f"/admin/v1/session-keys/{made['id']}")).status_code == 200
        other = (await people.post("/admin/v1/keys", json={"name": "ann"})).json()["id"]
        for key in (other, "ann", "key_none"):
            assert (await people.delete(f"/admin/v1/session-keys/{key}")).status_code == 404
    refused = await control.http.post("/admin/v1/session-keys", headers=ADMIN)
    assert refused.status_code == 403  # over the network there is a key already
    assert [row.action for row in rows(control)] == ["key.create"]
    assert made["key"] not in control.gateway_keys and len(control.gateway_keys) == 2

    now_s = keys.find(control.db, left["id"]).created_s
    session_keys.keep_house(control.context, now_s + session_keys.KEPT_S + 60)
    assert keys.fingerprint(left["key"]) not in control.gateway_keys
    session_keys.keep_house(control.context, now_s + 3 * session_keys.KEPT_S)
    assert [row.name for row in keys.list_all(control.db)] == ["ann"]
    (spent,) = usage.report(control.db, "owner", 0.0, 9000.0)
    assert (spent.name, spent.requests, spent.completion_tokens) == ("the box itself", 1, 3)
