"""Every changing route writes a row to the audit log, except the routes on a list with reasons."""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute

from appliance.controller.http.routers import StrictRoute
from appliance.store.rows import AUDIT, AuditRow
from tests.unit.controller.conftest import ADMIN, SCOPES, Control, chat_lines


def rows(control: Control) -> list[AuditRow]:
    return AUDIT.page(control.db, after=None, limit=1000).data[::-1]


async def test_routes_are_strict_routes(control: Control):
    """Every route must be a StrictRoute, because that class writes the audit row of a change."""
    assert all(isinstance(route, StrictRoute) for route in control.app.router.routes if isinstance(route, APIRoute))


async def test_change_writes_one_audit_row(control: Control, checked_here: None):
    async def ask(method: str, path: str, action: str, headers: dict[str, str] = SCOPES, **more: Any) -> Any:
        before = len(rows(control))
        answer = await control.http.request(method, path, headers=headers, **more)
        assert answer.status_code < 400, (path, answer.text)
        found = [(row.action, row.key_id, row.outcome, row.request_id) for row in rows(control)[before:]]
        who = headers["x-appliance-key-id"]
        assert found == ([(action, who, "done", answer.headers["x-request-id"])] if action else [])
        return answer.json()

    form: dict[str, Any] = {"files": {"file": ("a.jsonl", chat_lines())}, "data": {"purpose": "fine-tune"}}
    file_id = (await ask("POST", "/v1/files", "file.create", **form))["id"]
    await ask("POST", f"/v1/files/{file_id}/check", "", json={})
    job = (
        await ask("POST", "/v1/fine_tuning/jobs", "job.create", json={"model": "starter", "training_file": file_id})
    )["id"]
    await control.settle()
    await ask("PATCH", f"/admin/v1/jobs/{job}", "job.update", ADMIN, json={"priority": 3})
    await ask("POST", f"/v1/fine_tuning/jobs/{job}/cancel", "job.cancel")
    await ask("DELETE", f"/v1/files/{file_id}", "file.delete")
    await ask("POST", "/admin/v1/keys", "key.create", ADMIN, json={"name": "ann"})
    await ask("PATCH", "/admin/v1/keys/ann", "key.limit", ADMIN, json={"requests_per_minute": 5})
    await ask("DELETE", "/admin/v1/keys/ann", "key.revoke", ADMIN)
    await ask("PUT", "/admin/v1/mode", "mode.set", ADMIN, json={"policy": "serve"})
    await ask("POST", "/admin/v1/mode/plan", "", ADMIN, json={"policy": "serve"})
    told = {row.action: row for row in rows(control)}
    assert told["file.delete"].target == file_id and told["job.cancel"].target == job
    assert told["file.create"].detail == {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": len(chat_lines())}
    assert told["job.create"].target == job and told["job.create"].detail["training_file"] == file_id
    made = {"name": "ann", "scopes": ["inference", "fine_tuning"], "owner": "ann"}
    assert told["key.create"].detail == made, "what it may do, and not its secret"
    assert told["job.update"].detail == {"priority": 3}
