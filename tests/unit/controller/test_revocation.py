"""What ends with a key: its responses in background and its batches fail and say so, its jobs are paused and say so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock

import openai
import pytest
from fastapi import Request

from appliance.controller.admin.owners.key_ends import end_expired
from appliance.controller.files import storage
from appliance.controller.http.idempotency import Attempt
from appliance.controller.interfaces.errors import KeyRevoked
from appliance.controller.interfaces.principal import Principal
from appliance.controller.interfaces.records import EngineAnswer
from appliance.controller.jobs import pauses
from appliance.store.objects import batches, jobs, responses, tasks
from appliance.store.records import keys
from tests.unit.controller.conftest import ADMIN, Control
from tests.unit.controller.test_batches import begun, engines, line, until


async def revoke(control: Control, key_id: str) -> Any:
    answer = await control.http.delete(f"/admin/v1/keys/{key_id}", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_jobs_of_a_revoked_key_are_paused_and_say_why(control: Control):
    other = await control.job()
    key_id = control.as_key("laptop", owner="alice")
    queued, running, cancelled = [await control.job() for _ in range(3)]
    jobs.set_phase(control.db, running, "running", devices=["n0/0"])
    await control.sdk.fine_tuning.jobs.cancel(cancelled)
    assert sorted((await revoke(control, key_id))["stopped"]["jobs"]) == sorted([queued, running])
    for job_id in (queued, running):
        row = jobs.get(control.db, job_id)
        assert (row.wanted, row.reason) == ("pause", pauses.KEY_REVOKED)
    assert jobs.get(control.db, other).wanted == "run" and jobs.get(control.db, cancelled).wanted == "cancel"
    control.as_key("desktop", owner="alice")
    assert any("was revoked" in text for text in await control.messages(queued))
    place = {"id": queued, "position": 1, "reason": "JobHeldUser", "message": "Paused by request;"}
    control.scheduler.queue = [place]
    shown = (await control.http.get("/admin/v1/queue", headers=ADMIN)).json()["data"][0]
    assert (shown["id"], shown["message"]) == (queued, pauses.KEY_REVOKED)
    # Whoever may go on with it does; to revoke the key once more stops nothing again.
    await control.sdk.fine_tuning.jobs.resume(queued)
    assert (await revoke(control, key_id))["stopped"] == {"jobs": [], "batches": [], "responses": []}
    assert jobs.get(control.db, queued).wanted == "run"


async def test_what_gateways_still_pass_on_for_a_revoked_key_is_refused(control: Control):
    """They learn of it a moment later. Until then an admin's revoked key made itself another one, and a tenant's a job
    that ran, because only what was there at the revocation had been paused."""
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


async def test_a_key_that_ends_itself_is_answered_and_its_row_written(control: Control):
    """Its record asks who it was, not whether it may go on."""
    key_id = control.as_key("laptop", scopes=["admin"])
    answer = await control.http.delete(f"/admin/v1/keys/{key_id}")
    assert answer.status_code == 200 and answer.json()["revoked_s"] is not None
    rows = (await control.http.get("/admin/v1/audit", headers=ADMIN)).json()["data"]
    assert (rows[0]["action"], rows[0]["key_id"]) == ("key.revoke", key_id)


async def test_of_a_key_that_ends_while_its_file_is_looked_through_no_file_is_kept(control: Control, monkeypatch):
    """What it had begun ends with it: the file would be there again of a person who was forgotten meanwhile."""
    key_id = control.as_key("uploader")
    checked = storage.checked

    async def slow(*given: Any, **more: Any) -> Any:
        await revoke(control, key_id)
        return await checked(*given, **more)

    monkeypatch.setattr(storage, "checked", slow)
    with pytest.raises(openai.AuthenticationError) as refused:
        await control.upload()
    assert refused.value.code == "invalid_api_key"
    control.as_key("another", scopes=["admin"])
    assert (await control.http.get("/v1/files")).json()["data"] == []
    assert not list(control.context.files_dir.iterdir())


async def test_what_a_revoked_key_claimed_is_not_passed_on_to_a_weaker_one(control: Control):
    strong = control.as_key("strong", owner="alice", max_priority=9)
    claimed = {"priority": 9, "preemptible": False, "deadline_s": time.time() + 100}
    file_id = await control.upload()
    body = {"model": "starter", "training_file": file_id, **claimed}
    first, second = [(await control.http.post("/v1/fine_tuning/jobs", json=body)).json()["id"] for _ in range(2)]
    await control.settle()
    await revoke(control, strong)
    for job_id, name, most in ((first, "less", 4), (second, "weak", 0)):
        weak = control.as_key(name, owner="alice", max_priority=most)
        await control.sdk.fine_tuning.jobs.resume(job_id)
        row = jobs.get(control.db, job_id)
        assert (row.key_id, row.wanted, row.priority) == (weak, "run", most)
        assert (row.preemptible, row.deadline_s) == ((0, claimed["deadline_s"]) if most else (1, None))
    assert any("changed: deadline_s, preemptible, priority" in text for text in await control.messages(second))
    assert (await revoke(control, weak))["stopped"]["jobs"] == [second]
    assert (await revoke(control, jobs.get(control.db, first).key_id))["stopped"]["jobs"] == [first]
    resumed = await control.http.post(f"/v1/fine_tuning/jobs/{first}/resume", headers=ADMIN)
    assert resumed.status_code == 200 and jobs.get(control.db, first).priority == 4


async def test_responses_in_background_of_a_revoked_key_fail_whether_they_wait_or_are_answered(control: Control):
    key_id = control.as_key("laptop", owner="alice")
    at_engine, answers = asyncio.Event(), asyncio.Event()

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        at_engine.set()
        await answers.wait()
        return EngineAnswer(200, {"output": []}, "v1")

    engines(control).rule, engines(control).lines = rule, 1
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
    for response_id in stopped:
        found = await control.sdk.responses.retrieve(response_id)
        assert found.status == "failed" and found.error is not None
        assert (
            found.error.message == "The API key of this response was revoked." and found.error.code == "invalid_prompt"
        )
    assert tasks.list_all(control.db) == [] and len(engines(control).sent) == 1


@pytest.mark.parametrize(
    ("fields", "limit", "param"),
    [
        ({"priority": 6}, {"max_priority": 5}, "priority"),
        ({"priority": 1}, {}, "priority"),
        ({"preemptible": False}, {}, "preemptible"),
        ({"deadline_s": 1e10}, {}, "deadline_s"),
    ],
)
async def test_a_job_claims_no_more_than_its_key_may(control: Control, fields, limit, param):
    key_id = control.as_key("laptop", **limit)
    file_id = await control.upload()
    body = {"model": "starter", "training_file": file_id, **fields}
    refused = await control.http.post("/v1/fine_tuning/jobs", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, param)
    assert "appliance key limit" in refused.json()["error"]["message"]
    assert (await control.http.post("/v1/fine_tuning/jobs", json=body, headers=ADMIN)).status_code == 200
    raised = {"max_priority": 6}
    changed = await control.http.patch(f"/admin/v1/keys/{key_id}", json=raised, headers=ADMIN)
    assert changed.json() | raised == changed.json()
    assert (await control.http.post("/v1/fine_tuning/jobs", json=body)).status_code == 200
    lifted = await control.http.patch(f"/admin/v1/keys/{key_id}", json=dict.fromkeys(raised), headers=ADMIN)
    assert lifted.json()["max_priority"] == 0


async def test_a_key_that_expires_ends_like_a_revoked_one_and_gateways_are_told_since_when(control: Control):
    until_s = time.time() + 3600
    made = (
        await control.http.post("/admin/v1/keys", headers=ADMIN, json={"name": "guest", "expires_s": until_s})
    ).json()
    assert made["expires_s"] == until_s
    digest = keys.fingerprint(made["key"])
    assert control.gateway_keys[digest]["expires_s"] == until_s
    status = (await control.http.get("/admin/v1/status", headers=ADMIN)).json()
    assert any("the key guest expires at" in note for note in status["notes"])
    told = [{"check": "keys", "state": "warn", "found": "guest expire within a week"}]
    control.context.doctor.look = AsyncMock(return_value={"exit_code": 1, "data": told, "at_s": 1.0})
    for headers, findings in ((ADMIN, told), ({"x-appliance-key-id": "key_read", "x-appliance-scopes": "read"}, [])):
        looked = (await control.http.get("/admin/v1/doctor", headers=headers)).json()
        assert looked["data"] == findings, "`read` sees no key but its own"
    control.http.headers.update({"x-appliance-key-id": made["id"], "x-appliance-scopes": "inference,fine_tuning"})
    job_id = await control.job()
    engines(control).lines = 0
    batch_id = await begun(control, [line(0)])
    await until(control, batch_id, lambda batch: batch.status == "in_progress")
    begun_response = await control.sdk.responses.create(model="starter", input="1", background=True)
    await end_expired(control.context)
    assert not keys.is_revoked(control.db, made["id"])
    since_s = time.time() - 1
    keys.update(control.db, made["id"], expires_s=since_s)
    await end_expired(control.context)
    assert keys.is_revoked(control.db, made["id"]) and control.gateway_keys[digest] == {
        "id": made["id"],
        "expires_s": since_s,
    }
    row = jobs.get(control.db, job_id)
    assert (row.wanted, row.reason) == ("pause", pauses.KEY_REVOKED)
    how = time.strftime("expired at %Y-%m-%d %H:%M UTC", time.gmtime(since_s))
    refused = await control.http.get("/v1/files")
    assert refused.status_code == 401 and f"The API key of this request {how} while it ran." in refused.text
    await control.context.tasks.idle("responses")
    ended = responses.find(control.db, begun_response.id)
    assert ended is not None and ended.status == "failed" and f"The API key of this response {how}." in ended.response
    while (batch := batches.find(control.db, batch_id, viewer=None)) is not None and batch.status != "failed":
        await asyncio.sleep(0)
    assert f"The API key of this batch {how}." in repr(batch)
    rows = (await control.http.get("/admin/v1/audit", headers=ADMIN)).json()["data"]
    assert (rows[0]["action"], rows[0]["key_id"], rows[0]["target"]) == ("key.expire", None, made["id"])
    await end_expired(control.context)
    assert len((await control.http.get("/admin/v1/audit", headers=ADMIN)).json()["data"]) == len(rows)


async def test_a_secret_that_was_replaced_does_nothing_more_though_a_gateway_knows_it_still(control: Control):
    key_id = control.as_key("laptop")
    old = {"x-appliance-secret": keys.list_live(control.db)[-1].sha256}
    assert (await control.http.get("/v1/files", headers=old)).status_code == 200
    made = (await control.http.post(f"/admin/v1/keys/{key_id}/rotate", headers=ADMIN)).json()
    answer = await control.http.get("/v1/files", headers=old)
    assert answer.status_code == 401 and "was revoked while it ran" in answer.text
    new = {"x-appliance-secret": keys.fingerprint(made["key"])}
    assert (await control.http.get("/v1/files", headers=new)).status_code == 200


async def test_no_secret_is_replaced_before_the_request_is_whole(control: Control):
    """The gateway cuts off what still arrives by the old one: whose body came later than its head had lost the key."""
    key_id = control.as_key("laptop")

    def secret() -> str:
        return keys.list_live(control.db)[-1].sha256

    before, path = secret(), f"/admin/v1/keys/{key_id}/rotate"

    async def body(meanwhile: Callable[[], Any]) -> AsyncIterator[bytes]:
        yield b"{"
        for _ in range(20):
            await asyncio.sleep(0)
        assert secret() == before
        meanwhile()
        yield b"}"

    by = {"x-appliance-key-id": key_id, "x-appliance-scopes": "admin", "x-appliance-secret": before}
    answer = await control.http.post(path, headers=by, content=body(lambda: None))
    assert answer.status_code == 200 and secret() == keys.fingerprint(answer.json()["key"])
    before = by["x-appliance-secret"] = secret()
    answer = await control.http.post(path, headers=by, content=body(lambda: keys.renew(control.db, key_id)))
    assert answer.status_code == 401, "another rotation was first"


async def test_nor_does_it_make_what_it_had_begun_to_ask_for(control: Control):
    key_id = control.as_key("laptop")
    row, _ = keys.renew(control.db, key_id)
    for secret, made in ((row.sha256, True), (None, True), (keys.fingerprint("old"), False)):
        request = Request({"type": "http", "app": control.app, "headers": []})
        caller = Principal(key_id, frozenset({"fine_tuning"}), "req_1", "laptop", secret=secret)
        attempt = Attempt(request, caller, "POST /v1/files", None, lambda _: None)
        with contextlib.nullcontext() if made else pytest.raises(KeyRevoked):
            attempt.once(lambda: row)


async def test_a_keys_end_is_moved_and_lifted_and_never_past(control: Control):
    past = {"name": "late", "expires_s": time.time() - 1}
    answer = await control.http.post("/admin/v1/keys", headers=ADMIN, json=past)
    assert answer.status_code == 400 and "is past" in answer.json()["error"]["message"]
    await control.http.post("/admin/v1/keys", headers=ADMIN, json={"name": "guest", "expires_s": time.time() + 60})
    for body, status in (({"expires_s": 1.0}, 400), ({"expires_s": time.time() + 99}, 200), ({"expires_s": None}, 200)):
        answer = await control.http.patch("/admin/v1/keys/guest", headers=ADMIN, json=body)
        assert answer.status_code == status
    assert answer.json()["expires_s"] is None


async def test_the_key_of_who_comes_by_a_login_provider_has_no_end(control: Control):
    """It came, and each login after it said that somebody had revoked their access; nothing let them in again."""
    keys.create(control.db, "ann", ["inference"], subject="ab" * 32)
    for until_s, status in ((time.time() + 60, 400), (None, 200)):
        answer = await control.http.patch("/admin/v1/keys/ann", headers=ADMIN, json={"expires_s": until_s})
        assert answer.status_code == status, answer.text
    keys_of = keys.find(control.db, "ann")
    assert keys_of is not None and keys_of.expires_s is None
