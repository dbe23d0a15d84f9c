"""If a key ends, its background responses and batches fail and its jobs pause, each with the reason."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from appliance.controller.admin.keys import end_expired
from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.jobs import events
from appliance.store import jobs, keys
from appliance.store.rows import RESPONSES, TASKS
from tests.unit.controller.conftest import ADMIN, Control


async def revoke(control: Control, key_id: str) -> Any:
    answer = await control.http.delete(f"/admin/v1/keys/{key_id}", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_revoke_pauses_jobs_of_the_key(control: Control):
    other = await control.job()
    key_id = control.as_key("laptop", owner="alice")
    queued, running, cancelled = [await control.job() for _ in range(3)]
    jobs.set_phase(control.db, running, "running", devices=["n0/0"])
    await control.sdk.fine_tuning.jobs.cancel(cancelled)
    assert sorted((await revoke(control, key_id))["stopped"]["jobs"]) == sorted([queued, running])
    for job_id in (queued, running):
        row = jobs.get(control.db, job_id)
        assert (row.wanted, row.reason) == ("pause", events.KEY_REVOKED)
    assert jobs.get(control.db, other).wanted == "run" and jobs.get(control.db, cancelled).wanted == "cancel"
    # After another key of the owner has resumed the job, a second revocation does not stop it.
    control.as_key("desktop", owner="alice")
    await control.sdk.fine_tuning.jobs.resume(queued)
    assert (await revoke(control, key_id))["stopped"] == {"jobs": [], "batches": [], "responses": []}
    assert jobs.get(control.db, queued).wanted == "run"


async def test_request_of_revoked_key_is_rejected(control: Control):
    """The controller checks the key too, because gateways learn of a revocation a moment later."""
    key_id = control.as_key("laptop", scopes=["admin"])
    training_file = await control.upload()
    made = [
        ("POST", "/admin/v1/keys", {"name": "again", "scopes": ["admin"]}),
        ("POST", "/v1/fine_tuning/jobs", {"model": "starter", "training_file": training_file}),
        ("GET", "/admin/v1/keys", None),
        ("GET", f"/v1/files/{training_file}/content", None),
        ("DELETE", f"/v1/files/{training_file}", None),
    ]
    await revoke(control, key_id)
    for method, path, body in made:
        answer = await control.http.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (method, path)
    assert keys.find(control.db, "again") is None and jobs.list_unfinished(control.db) == []
    control.as_key("another", scopes=["admin"])
    assert (await control.http.get(f"/v1/files/{training_file}")).status_code == 200


async def test_resume_with_weaker_key_lowers_priority(control: Control):
    strong = control.as_key("strong", owner="alice", max_priority=9)
    claimed = {"priority": 9, "preemptible": False, "deadline_s": time.time() + 100}
    body = {"model": "starter", "training_file": await control.upload(), **claimed}
    first, second = [(await control.http.post("/v1/fine_tuning/jobs", json=body)).json()["id"] for _ in range(2)]
    await control.settle()
    await revoke(control, strong)
    for job_id, name, most in ((first, "less", 4), (second, "weak", 0)):
        weak = control.as_key(name, owner="alice", max_priority=most)
        await control.sdk.fine_tuning.jobs.resume(job_id)
        row = jobs.get(control.db, job_id)
        assert (row.key_id, row.wanted, row.priority) == (weak, "run", most)
        assert (row.preemptible, row.deadline_s) == ((0, claimed["deadline_s"]) if most else (1, None))
        lost = "priority" if most else "deadline_s, preemptible, priority"
        assert any(f"may claim less; changed: {lost}." in text for text in await control.messages(job_id))
    assert (await revoke(control, weak))["stopped"]["jobs"] == [second]
    resumed = await control.http.post(f"/v1/fine_tuning/jobs/{first}/resume", headers=ADMIN)
    assert resumed.status_code == 200 and jobs.get(control.db, first).priority == 4


async def test_revoke_fails_background_responses(control: Control):
    key_id = control.as_key("laptop", owner="alice")
    at_engine, answers = asyncio.Event(), asyncio.Event()

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        at_engine.set()
        await answers.wait()
        return EngineAnswer(200, {"output": []})

    control.engines.rule, control.engines.lines = rule, 1
    flying, waiting = [
        await control.sdk.responses.create(model="starter", input="1", background=True) for _ in range(2)
    ]
    async with asyncio.timeout(60):
        await at_engine.wait()
    stopped = (await revoke(control, key_id))["stopped"]["responses"]
    assert sorted(stopped) == sorted([flying.id, waiting.id])
    await control.context.tasks.idle("responses")
    answers.set()
    control.as_key("desktop", owner="alice")
    found = [await control.sdk.responses.retrieve(response_id) for response_id in stopped]
    assert [(one.status, one.error.code) for one in found] == [("failed", "invalid_prompt")] * 2
    assert TASKS.list_all(control.db) == [] and len(control.engines.sent) == 1


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"priority": 6}, {"max_priority": 5}), ({"preemptible": False}, {}), ({"deadline_s": 1e10}, {})],
)
async def test_job_above_priority_of_key_is_rejected(control: Control, fields: dict[str, Any], limit: dict[str, int]):
    control.as_key("laptop", **limit)
    body = {"model": "starter", "training_file": await control.upload(), **fields}
    refused = await control.http.post("/v1/fine_tuning/jobs", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, next(iter(fields)))
    assert (await control.http.post("/v1/fine_tuning/jobs", json=body, headers=ADMIN)).status_code == 200


async def test_expired_key_ends_like_a_revoked_key(control: Control):
    until_s = time.time() + 3600
    body = {"name": "guest", "expires_s": until_s}
    made = (await control.http.post("/admin/v1/keys", headers=ADMIN, json=body)).json()
    digest = keys.fingerprint(made["key"])
    assert made["expires_s"] == until_s == control.gateway_keys[digest]["expires_s"]
    control.http.headers.update({"x-appliance-key-id": made["id"], "x-appliance-scopes": "inference,fine_tuning"})
    job_id = await control.job()
    control.engines.lines = 0
    response = await control.sdk.responses.create(model="starter", input="1", background=True)
    await end_expired(control.context)
    assert not keys.how_ended(control.db, made["id"])
    since_s = time.time() - 1
    keys.update(control.db, made["id"], expires_s=since_s)
    for _ in range(2):
        await end_expired(control.context)
    assert keys.how_ended(control.db, made["id"])
    assert control.gateway_keys[digest] == {"id": made["id"], "expires_s": since_s}
    row = jobs.get(control.db, job_id)
    assert (row.wanted, row.reason) == ("pause", events.KEY_REVOKED)
    assert (await control.http.get("/v1/files")).status_code == 401
    await control.context.tasks.idle("responses")
    ended = RESPONSES.find(control.db, response.id)
    assert ended is not None and ended.status == "failed"
    rows = (await control.http.get("/admin/v1/audit", headers=ADMIN)).json()["data"]
    told = [(row["key_id"], row["target"]) for row in rows if row["action"] == "key.expire"]
    assert told == [(None, made["id"])]
