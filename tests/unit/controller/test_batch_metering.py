"""What the rules of its key mean for a batch: models, quota, limits by the minute, revocation; and who pays."""

from __future__ import annotations

import asyncio
import errno
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from appliance.controller.batches import background_responses
from appliance.controller.batches.answers import Answers
from appliance.controller.batches.metering import asked_of
from appliance.controller.interfaces.ports import EngineAnswer
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import resolve
from appliance.gateway.payload.request_check import check_body
from appliance.store.objects import batches, responses
from appliance.store.records import keys, usage
from tests.unit.controller.conftest import ADMIN, Control, insert_model
from tests.unit.controller.test_batches import begun, content, ended, engines, line, until


def as_key(control: Control, **limits: Any) -> str:
    return control.as_key("batcher", **limits)


def spent(control: Control, by: usage.By = "key") -> dict[str, usage.Spent]:
    now_s = time.time()
    return {found.name: found for found in usage.report(control.db, by, now_s - 60, now_s)}


async def test_lines_are_counted_for_their_key_model_and_version(control: Control):
    as_key(control)

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        if body["messages"][0]["content"] == "1+1?":
            return EngineAnswer(500, {"error": {"message": "no"}}, "v7")
        return EngineAnswer(200, {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}, "v7")

    engines(control).rule = rule
    await ended(control, await begun(control, [line(n) for n in range(4)]))
    of_key = spent(control)["batcher"]
    assert (of_key.requests, of_key.errors, of_key.prompt_tokens, of_key.completion_tokens) == (4, 1, 9, 6)
    assert spent(control, "version")["starter@v7"].requests == 4


async def test_a_batch_of_the_box_itself_is_counted_and_bound_by_nothing(control: Control):
    await ended(control, await begun(control, [line(0)]))
    assert spent(control)["the box itself"].requests == 1
    assert spent(control, "owner")["the box itself"].prompt_tokens == 3


async def test_lines_for_a_model_that_the_key_may_not_use_become_error_lines(control: Control):
    insert_model(control.db, "other")
    as_key(control, models=["other"])
    batch = await ended(control, await begun(control, [line(n) for n in range(3)]))
    assert batch.status == "completed" and batch.request_counts.failed == 3 and engines(control).sent == []
    for row in await content(control, batch.error_file_id):
        assert row["response"]["status_code"] == 404
        assert row["response"]["body"]["error"]["code"] == "model_not_found"
        assert set(row["response"]["body"]["error"]) == {"message", "type", "param", "code"}
    assert spent(control) == {}, "what no engine answered costs nothing"


async def test_what_was_asked_ends_with_its_keys_scope(control: Control):
    """Lines went on for a day after a login had taken the scope from their key, and responses in background."""
    key_id = as_key(control)
    batch_id = await begun(control, [line(n) for n in range(3)])
    asked = await control.http.post("/v1/responses", json={"model": "starter", "input": "hi", "background": True})
    keys.update(control.db, key_id, scopes=["read"])
    batch = await ended(control, batch_id)
    assert batch.request_counts.failed == 3
    for row in await content(control, batch.error_file_id):
        assert row["response"]["status_code"] == 403
        assert "needs the scope: inference" in row["response"]["body"]["error"]["message"]
    async with asyncio.timeout(60):
        while (row := responses.find(control.db, asked.json()["id"])) is not None and not row.finished:
            await asyncio.sleep(0.001)
    assert row is not None and "needs the scope: inference" in row.response and engines(control).sent == []


async def test_a_list_that_is_cut_while_a_batch_runs_refuses_the_rest(control: Control):
    key_id = as_key(control)
    engines(control).lines = 0
    batch_id = await begun(control, [line(n) for n in range(3)])
    await until(control, batch_id, lambda b: b.status == "in_progress")
    answer = await control.http.patch(f"/admin/v1/keys/{key_id}", json={"models": []}, headers=ADMIN)
    assert answer.status_code == 200
    assert (await ended(control, batch_id)).request_counts.failed == 3


async def test_a_spent_quota_holds_the_batch_until_it_is_renewed(control: Control, monkeypatch):
    key_id = as_key(control, tokens_per_day=20)
    engines(control).lines = 1
    noon = time.time() // 86400 * 86400 + 43200
    clock = [noon]
    monkeypatch.setattr("time.time", lambda: clock[0])
    batch_id = await begun(control, [line(n) for n in range(6)])
    batch = await until(
        control, batch_id, lambda b: b.waiting_for is not None and "quota of 20 tokens a day" in b.waiting_for
    )
    assert batch.request_counts.completed == 4, "four lines of five tokens are the quota"
    assert control.gateway_keys[keys.find(control.db, key_id).sha256]["spent_until_s"] == noon + 43200
    # It does not keep back others of the same model.
    control.as_key("other", owner="batcher")
    assert (await ended_alone(control, await begun(control, [line(10)]))).status == "completed"
    clock[0] = noon + 43201
    assert (await ended(control, batch_id)).request_counts.completed == 6


async def ended_alone(control: Control, batch_id: str) -> Any:
    return await until(control, batch_id, lambda b: b.status in ("completed", "failed"))


async def test_a_quota_that_is_renewed_too_late_ends_the_rest_with_error_lines(control: Control, monkeypatch):
    as_key(control, tokens_per_month=10)
    first_of_month = 1_790_812_800.0  # 2026-10-01
    monkeypatch.setattr("time.time", lambda: first_of_month)
    engines(control).lines = 1
    batch = await ended(control, await begun(control, [line(n) for n in range(4)]))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    rows = await content(control, batch.error_file_id)
    assert {(row["response"]["status_code"], row["response"]["body"]["error"]["code"]) for row in rows} == {
        (429, "insufficient_quota")
    }


async def test_limits_by_the_minute_slow_a_batch_down(control: Control, monkeypatch):
    as_key(control, requests_per_minute=2)
    clock = [1000.0]
    # Its own clock: asyncio waits by the real one.
    monkeypatch.setattr(
        "appliance.controller.batches.metering.time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0])
    )
    batch_id = await begun(control, [line(n) for n in range(3)])
    batch = await until(control, batch_id, lambda b: b.waiting_for is not None)
    assert batch.waiting_for == "its key may spend 2 requests per minute" and batch.request_counts.completed <= 2
    async with asyncio.timeout(60):
        while len(engines(control).sent) < 2:
            await asyncio.sleep(0.005)
    clock[0] += 30
    assert (await ended(control, batch_id)).request_counts.completed == 3


@pytest.mark.parametrize("end", ["cancelled", "expired", "failed"])
async def test_however_a_batch_ends_it_pays_for_the_lines_that_engines_were_at(control: Control, end: str):
    key_id = as_key(control)
    begun_at = asyncio.Event()

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        begun_at.set()
        await asyncio.Event().wait()
        return None

    engines(control).rule = rule
    engines(control).lines = 2
    batch_id = await begun(control, [line(n) for n in range(5)])
    await asyncio.wait_for(begun_at.wait(), 60)
    if end == "cancelled":
        await control.sdk.batches.cancel(batch_id)
    elif end == "expired":
        batches.update(control.db, batch_id, expires_s=time.time() - 1)
    else:
        await control.http.delete(f"/admin/v1/keys/{key_id}", headers=ADMIN)
        control.as_key("another", owner="batcher")
    assert (await ended(control, batch_id)).status == end
    of_key = spent(control)["batcher"]
    assert of_key.requests == 2 and of_key.prompt_tokens > 20


async def test_line_of_a_silent_engine_is_charged_its_prompt(control: Control):
    as_key(control)

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        return EngineAnswer(504, {"error": {"message": "late", "code": "engine_timeout"}}, "v1", silent=True)

    engines(control).rule = rule
    batch = await ended(control, await begun(control, [line(n) for n in range(2)]))
    assert batch.status == "completed" and batch.request_counts.failed == 2 and len(engines(control).sent) == 2
    of_key = spent(control)["batcher"]
    assert (of_key.requests, of_key.errors) == (2, 2) and of_key.prompt_tokens > 20 and of_key.completion_tokens == 0


async def test_a_batch_whose_answers_cannot_be_written_pays_for_what_was_computed(control: Control, monkeypatch):
    """One line was answered, and an engine was at the other."""
    as_key(control)
    both = asyncio.Event()

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        if body["messages"][0]["content"] == "1+1?":
            both.set()
            await asyncio.Event().wait()
        await both.wait()
        return EngineAnswer(200, {"usage": {"prompt_tokens": 3000, "completion_tokens": 2, "total_tokens": 3002}}, "v1")

    def append(answers: Answers, lines: list[Any]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    engines(control).rule = rule
    monkeypatch.setattr(Answers, "append", append)
    batch_id = await begun(control, [line(n) for n in range(2)])
    batch = await until(control, batch_id, lambda batch: batch.status == "failed")
    assert batch.errors.data[0].code == "file_unreadable"
    await control.app.state.batches.tasks.idle()
    of_key = spent(control)["batcher"]
    assert of_key.requests == 2 and of_key.prompt_tokens > 3000


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'iVBORw0KGgo' * 800}"}}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 3, "max_tokens": 7}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "m", "prompt": ["x", "y"], "max_tokens": 5, "n": 2}),
        ("/v1/completions", {"model": "m", "prompt": [1, 2, 3], "best_of": 2}),
        ("/v1/completions", {"model": "m", "prompt": [[1], [2]]}),
        ("/v1/responses", {"model": "m", "input": "x", "max_output_tokens": 9}),
        ("/v1/embeddings", {"model": "m", "input": ["x", "y"]}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [IMAGE]}]}),
    ],
)
def test_what_a_checked_line_may_cost_is_told_without_another_check(url: str, body: dict[str, Any]) -> None:
    """To check the lines of eight engines once more, when their batch was cancelled, took the loop seven seconds."""
    written = orjson.dumps(body)
    asked = check_body(resolve(b"POST", url.encode()), written, Limits()).asked
    told = asked_of(url, body, len(written))
    for name in ("prompt_tokens", "completion_tokens", "sequences"):
        assert getattr(told, name) == getattr(asked, name)


async def test_what_waits_for_one_keys_limits_shares_them(control: Control, monkeypatch: pytest.MonkeyPatch):
    """Batches, responses in background and judges: each had the key's whole allowance once."""
    monkeypatch.setattr(background_responses, "LOOK_EVERY_S", 0.005)
    key_id = as_key(control, requests_per_minute=1)
    await ended(control, await begun(control, [line(0)]))
    made = await control.sdk.responses.create(model="starter", input="1+1?", background=True)
    judged = await control.app.state.graders.ask(key_id, {"model": "starter", "messages": []}, within_s=0.05)
    assert "no answer within" in judged.error
    assert (await control.sdk.responses.retrieve(made.id)).status == "queued" and len(engines(control).sent) == 1


async def test_what_engines_are_at_counts_against_the_quota_of_its_key(control: Control, monkeypatch):
    """Sixteen lines, as many responses in background and a judge's questions went past a quota, each as long as a model
    may write. One alone may."""
    monkeypatch.setattr(background_responses, "LOOK_EVERY_S", 0.005)
    key_id, at_once, most = as_key(control, tokens_per_day=100), 0, 0

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        if "max_tokens" not in body:
            return None
        return EngineAnswer(200, {"choices": [{"message": {"content": "1"}}], "usage": {"total_tokens": 1}})

    engines(control).lines, engines(control).rule = 16, rule
    batch_id = await begun(control, [line(n) for n in range(6)])  # 4,096 tokens each, as far as anybody says
    made = [
        await control.sdk.responses.create(model="starter", input="1+1?", background=True, max_output_tokens=80)
        for _ in range(3)
    ]
    question = {"model": "starter", "messages": [], "max_tokens": 70}
    judged = await asyncio.gather(*(control.app.state.graders.ask(key_id, question, within_s=60) for _ in range(2)))
    assert [one.error for one in judged] == ["", ""]
    await ended(control, batch_id)
    async with asyncio.timeout(60):
        while not all((row := responses.find(control.db, one.id)) is not None and row.finished for one in made):
            await asyncio.sleep(0.005)
    assert most == 1 and len(engines(control).sent) == 11

    several = asyncio.Event()

    async def waits_for_another(_: dict[str, Any]) -> None:
        if len(engines(control).sent) > 11 + 1:
            several.set()
        await several.wait()

    engines(control).rule = waits_for_another
    keys.update(control.db, key_id, tokens_per_day=1_000_000)
    await ended(control, await begun(control, [line(n) for n in range(6)]))
    assert engines(control).most_at_once > 1, "far from its end nothing waits for it"


async def test_what_ends_before_it_was_answered_counts_no_longer_against_a_quota(control: Control, monkeypatch):
    monkeypatch.setattr(background_responses, "LOOK_EVERY_S", 0.005)
    as_key(control, tokens_per_day=1000)
    begun_at = asyncio.Event()

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        begun_at.set()
        await asyncio.sleep(60)
        return None

    engines(control).lines, engines(control).rule = 16, rule
    batch_id = await begun(control, [line(0)])
    await begun_at.wait()
    await control.sdk.batches.cancel(batch_id)
    await ended(control, batch_id)
    begun_at.clear()
    made = await control.sdk.responses.create(model="starter", input="1+1?", background=True)
    await begun_at.wait()
    await control.sdk.responses.cancel(made.id)
    begun_at.clear()
    engines(control).rule = None
    assert (await ended(control, await begun(control, [line(1)]))).request_counts.completed == 1


@pytest.mark.parametrize("odd", [{}, [], "x", None, -1, 10**30, 1.5, True, [{}]])
def test_a_line_that_was_never_checked_is_told_too(odd: Any) -> None:
    """It was taken back while it waited for its check."""
    body = {"model": "m", "prompt": odd, "n": odd, "best_of": odd, "max_tokens": odd}
    assert asked_of("/v1/completions", body, 40).prompt_tokens == 10
