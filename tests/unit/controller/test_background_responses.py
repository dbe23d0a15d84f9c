"""Responses in background: asked of engines that a test scripts, followed, cancelled, taken up after a restart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.store.rows import RESPONSES
from tests.simulator.control_plane import LineReturned
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_responses import answer, copy, name, send


def scripted(control: Control, *answers: EngineAnswer | LineReturned) -> None:
    left = list(answers)

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        given = left.pop(0) if left else EngineAnswer(200, answer(99, "later"))
        if isinstance(given, LineReturned):
            raise given
        return given

    control.engines.rule = rule


async def ended(control: Control, response_id: str) -> Any:
    async with asyncio.timeout(60):
        while (found := await control.sdk.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.002)
    return found


def unfinished(control: Control) -> list[str]:
    return control.db.column("SELECT id FROM responses WHERE status IN ('queued', 'in_progress')")


async def asked(control: Control, given: Any = "1+1?", model: str = "starter", **fields: Any) -> Any:
    return await control.sdk.responses.create(model=model, input=given, background=True, **fields)


async def test_background_response_is_queued_then_completed(control: Control):
    control.engines.lines = 0
    scripted(control, EngineAnswer(200, answer(1, "2", usage=None, model="starter")))
    made = await asked(control, temperature=0.5, metadata={"a": "b"})
    assert made.status == "queued" and made.background and made.temperature == 0.5 and made.output == []
    while not control.engines.models:
        await asyncio.sleep(0)
    assert list(control.engines.models) == ["starter"]
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.responses.create(model="starter", input="x", background=True, previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_ready"
    control.engines.lines = 4
    found = await ended(control, made.id)
    assert (found.status, found.output_text, found.id) == ("completed", "2", made.id)
    assert found.background and found.created_at == made.created_at
    body = control.engines.sent[0]
    assert body["store"] is False and not {"background", "stream", "previous_response_id"} & set(body)
    row = RESPONSES.find(control.db, made.id)
    assert row is not None and row.request is None and list(control.engines.models) == []


async def test_background_response_continues_a_conversation(control: Control):
    await send(control, copy(1, "1+1?"))
    scripted(control, EngineAnswer(200, answer(2, "3")))
    made = await asked(control, "and 1?", previous_response_id=name(1))
    found = await ended(control, made.id)
    assert found.previous_response_id == name(1)
    assert control.engines.sent[0]["input"] == [
        {"type": "message", "role": "user", "content": "1+1?"},
        *answer(1)["output"],
        {"type": "message", "role": "user", "content": "and 1?"},
    ]
    assert len(await control.app.state.responses.conversation(made.id, "key_test")) == 4
    for unknown in ("resp_none", name(8)):
        with pytest.raises(openai.BadRequestError) as caught:
            await asked(control, previous_response_id=unknown)
        assert caught.value.code == "previous_response_not_found"


async def test_background_response_with_a_long_conversation_is_refused(control: Control):
    scripted(control, *[EngineAnswer(400, {"error": {"message": "too long"}})] * 10)
    first = await ended(control, (await asked(control, "x" * 12_000)).id)
    made = await ended(control, (await asked(control, "x" * 12_000, previous_response_id=first.id)).id)
    with pytest.raises(openai.BadRequestError) as caught:
        await asked(control, "x" * 12_000, previous_response_id=made.id)
    assert caught.value.code == "context_length_exceeded"
    most = 2 * control.context.config.json_body_bytes
    assert max(len(json.dumps(body)) for body in control.engines.sent) < most
    asked_by_gateway = await control.http.get("/internal/responses/context", params={"id": made.id})
    assert asked_by_gateway.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ([EngineAnswer(400, {"error": {"message": "too long"}})], "invalid_prompt", "too long"),
        ([EngineAnswer(500, {})], "server_error", "500"),
        ([LineReturned("lost", yielded=False)], "server_error", "lost"),
    ],
)
async def test_background_response_with_an_engine_error_fails(control: Control, script, code: str, words: str):
    scripted(control, *script)
    found = await ended(control, (await asked(control)).id)
    assert found.status == "failed" and found.error.code == code and words in found.error.message


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_cancel_or_delete_stops_the_engine(control: Control, verb: str):
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        raise AssertionError

    control.engines.rule = rule
    made = await asked(control)
    await asyncio.wait_for(begun.wait(), 60)
    assert (await control.sdk.responses.retrieve(made.id)).status == "in_progress"
    if verb == "cancel":
        for _ in range(2):
            assert (await control.sdk.responses.cancel(made.id)).status == "cancelled"
    else:
        await control.sdk.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await control.sdk.responses.retrieve(made.id)
    await asyncio.wait_for(stopped.wait(), 60)
    assert not unfinished(control)


async def test_background_stream_resumes_after_any_event(control: Control):
    scripted(control, EngineAnswer(200, answer(1, "two")))
    stream = await control.sdk.responses.create(model="starter", input="1+1?", background=True, stream=True)
    seen = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in seen]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    assert kinds[3:6] == ["output_item.added", "content_part.added", "output_text.delta"]
    assert kinds[6:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in seen] == list(range(10))
    assert seen[-1].response.output_text == "two" and seen[0].response.status == "queued"
    again = await control.sdk.responses.retrieve(seen[0].response.id, stream=True, starting_after=5)
    assert [event.model_dump() async for event in again] == [event.model_dump() for event in seen[6:]]


async def test_restart_resumes_background_responses(control: Control):
    control.engines.lines = 0
    made = await asked(control)
    await control.context.tasks.stop()
    RESPONSES.update(control.db, made.id, status="in_progress")  # killed while an engine was at it
    control.engines.lines = 4
    scripted(control, EngineAnswer(200, answer(1, "after all")))
    control.context.tasks.resume()
    assert (await ended(control, made.id)).output_text == "after all"
