"""Stored responses and chat completions, called by the OpenAI SDK; background responses on scripted engines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.interfaces.principal import Listener
from appliance.store import keys
from appliance.store.rows import RESPONSES
from tests.unit.controller.conftest import ADMIN, Control

TOKEN = "t" * 64
GATEWAY = {
    "x-request-id": "req_gateway",
    "x-appliance-key-id": "gateway",
    "x-appliance-scopes": "gateway",
    "x-appliance-gateway": TOKEN,
}


def answer(number: int, text: str = "2", **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}] if text else []
    message = {"id": f"msg_out{number}", "type": "message", "role": "assistant", "status": "completed"}
    nothing = dict.fromkeys(("error", "incomplete_details", "instructions", "metadata"))
    made = {"id": name(number), "object": "response", "created_at": 7, "model": "starter", "status": "completed"}
    settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0}
    return {**made, "output": [message | {"content": content}], **settings, **nothing, **more}


def name(number: int) -> str:
    return f"resp_{number:016x}"


def copy(
    number: int, given: Any = "1+1?", *, previous: int | None = None, key: str = "key_test", **more: Any
) -> dict[str, Any]:
    return {
        "key": key,
        "previous": previous if previous is None else name(previous),
        "input": given,
        "response": answer(number, **more),
    }


async def send(control: Control, *copies: Any) -> int:
    """Send copies of answers to the controller, as a gateway does with its own identity instead of a key."""
    transport = httpx.ASGITransport(Listener(control.app, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://box", headers=GATEWAY) as gateway:
        sent = await gateway.post("/internal/responses", json=list(copies))
    return sent.raise_for_status().json()["stored"]


async def context(control: Control, number: int) -> Any:
    return await control.http.get("/internal/responses/context", params={"id": name(number)})


async def texts(control: Control, number: int, **options: Any) -> list[str]:
    page = await control.sdk.responses.input_items.list(name(number), **options)
    return [item.content[0].text for item in page.data]  # type: ignore[union-attr]


async def test_response_is_retrieved_unchanged_and_deleted(control: Control):
    assert await send(control, copy(1)) == 1
    found = await control.sdk.responses.retrieve(name(1))
    assert found.output_text == "2" and found.created_at == 7
    assert (await control.http.get(f"/v1/responses/{name(1)}")).json() == answer(1)
    deleted = await control.http.delete(f"/v1/responses/{name(1)}")
    assert deleted.json() == {"id": name(1), "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError) as caught:
        await control.sdk.responses.cancel("resp_gone")
    assert caught.value.code == "response_not_found"
    assert await send(control, copy(2)) == 1
    assert await send(control, copy(2, text="other"), copy(3)) == 1, "a copy may arrive twice"
    assert (await control.sdk.responses.retrieve(name(2))).output_text == "2"


async def test_retrieve_waits_until_gateway_has_sent_the_copy(control: Control):
    asking = [asyncio.create_task(control.sdk.responses.retrieve(name(1))), asyncio.create_task(context(control, 1))]
    await asyncio.sleep(0)
    await send(control, copy(1))
    first, joined = await asyncio.gather(*asking)
    assert first.output_text == "2" and joined.status_code == 200


async def test_context_contains_inputs_and_outputs_of_all_turns(control: Control):
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    await send(
        control,
        copy(1, "1+1?"),
        copy(2, [{"role": "user", "content": "add"}], previous=1, output=[thought, call]),
        copy(3, [{"type": "function_call_output", "call_id": "c1", "output": "2"}], previous=2, text=""),
    )
    assert (await context(control, 3)).json() == [
        {"type": "message", "role": "user", "content": "1+1?"},
        *answer(1)["output"],
        {"role": "user", "content": "add"},
        thought,
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "2"},  # the empty output of turn 3 is dropped
    ]
    await control.http.delete(f"/v1/responses/{name(1)}")
    refused = await context(control, 3)
    assert refused.status_code == 400 and name(1) in refused.json()["error"]["message"]
    assert (await control.sdk.responses.retrieve(name(3))).status == "completed"


async def test_input_items_pages_have_stable_ids_across_requests(control: Control):
    part = [{"type": "input_text", "text": "b"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    await send(control, copy(1, "a", text="answered"), copy(2, [{"role": "user", "content": part}], previous=1))
    assert await texts(control, 2) == ["b", "answered", "a"]
    assert await texts(control, 2, order="asc") == ["a", "answered", "b"]
    assert await texts(control, 1) == ["a"]
    first = await control.sdk.responses.input_items.list(name(2), order="asc", limit=2)
    assert first.has_more and [item.id for item in first.data][1] == "msg_out1"
    rest = await first.get_next_page()
    assert [item.content[1].detail for item in rest.data] == ["auto"] and not rest.has_more  # type: ignore[union-attr, index]
    everything = await control.sdk.responses.input_items.list(name(2), order="asc")
    assert [item.id for item in everything.data] == [item.id for item in (*first.data, *rest.data)]
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await control.sdk.responses.cancel(name(1))
    with pytest.raises(openai.BadRequestError, match="background"):
        await control.sdk.responses.retrieve(name(1), stream=True)


async def test_housekeeping_deletes_old_and_keyless_responses(control: Control):
    row, _ = keys.create(control.db, "laptop", ["inference"])
    await send(control, copy(1), copy(2), copy(3, key=row.id))
    control.db.execute("UPDATE responses SET created_s = ? WHERE id != ?", [time.time(), name(1)])

    def left() -> list[int]:
        control.app.state.responses.keep_house(time.time())
        return [n for n in (1, 2, 3) if RESPONSES.find(control.db, name(n)) is not None]

    assert left() == [2, 3]
    keys.revoke(control.db, row.id)
    assert left() == [2]


async def test_copy_of_owner_without_keys_is_not_stored(control: Control):
    laptop, phone = (keys.create(control.db, one, ["inference"], "ann")[0] for one in ("laptop", "phone"))
    keys.revoke(control.db, laptop.id)
    await send(control, copy(1, key=laptop.id))
    assert RESPONSES.find(control.db, name(1)) is not None, "it is her other key's too"
    keys.revoke(control.db, phone.id)
    await send(control, copy(2, key=laptop.id), copy(3))
    assert RESPONSES.find(control.db, name(2)) is None and RESPONSES.find(control.db, name(3)) is not None


# --- background responses


def scripted(control: Control, *answers: EngineAnswer) -> None:
    left = list(answers)

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        return left.pop(0) if left else EngineAnswer(200, answer(99, "later"))

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
    with pytest.raises(openai.BadRequestError) as caught:
        await asked(control, previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"


async def test_background_response_with_too_long_conversation_is_rejected(control: Control):
    scripted(control, *[EngineAnswer(400, {"error": {"message": "too long"}})] * 10)
    first = await ended(control, (await asked(control, "x" * 12_000)).id)
    made = await ended(control, (await asked(control, "x" * 12_000, previous_response_id=first.id)).id)
    with pytest.raises(openai.BadRequestError) as caught:
        await asked(control, "x" * 12_000, previous_response_id=made.id)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ([EngineAnswer(400, {"error": {"message": "too long"}})], "invalid_prompt", "too long"),
        ([EngineAnswer(500, {})], "server_error", "500"),
        ([EngineAnswer(502, {"error": {"message": "lost", "code": "engines_died"}})], "server_error", "lost"),
    ],
)
async def test_background_response_with_engine_error_fails(control: Control, script, code: str, words: str):
    scripted(control, *script)
    found = await ended(control, (await asked(control)).id)
    assert found.status == "failed" and found.error.code == code and words in found.error.message


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_cancel_or_delete_aborts_engine_request(control: Control, verb: str):
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
    RESPONSES.update(control.db, made.id, status="in_progress")  # the state after a kill while an engine answers
    control.engines.lines = 4
    scripted(control, EngineAnswer(200, answer(1, "after all")))
    control.context.tasks.resume()
    assert (await ended(control, made.id)).output_text == "after all"


# --- stored chat completions


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1+1?"}, {"type": "text", "text": "Now."}]},
]


def completion(completion_id: str, *, key: str = "key_test", text: str = "2", **asked: Any) -> dict[str, Any]:
    """Return a copy of a chat completion, as a gateway sends it to the controller."""
    message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": [], "annotations": None}
    answer = {
        "id": completion_id,
        "object": "chat.completion",
        "created": 7,
        "model": asked.pop("model", "starter"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "token_ids": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        "prompt_token_ids": None,
    }
    return {"key": key, "previous": None, "input": {"messages": MESSAGES, **asked}, "response": answer}


async def test_completion_is_listed_retrieved_updated_and_deleted(control: Control):
    asked = {"temperature": 0.5, "user": "u", "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert await send(control, completion("chatcmpl-1", metadata={"use": "a"}, **asked)) == 1
    kept = control.sdk.chat.completions
    found = await kept.retrieve("chatcmpl-1")
    assert (found.choices[0].message.content, found.model, found.created) == ("2", "starter", 7)
    assert found.usage is not None and found.usage.total_tokens == 4
    told = (await control.http.get("/v1/chat/completions/chatcmpl-1")).json()
    assert told["metadata"] == {"use": "a"} and told["input_user"] == "u" and told["tools"] == asked["tools"]
    assert told["temperature"] == 0.5 and told["response_format"] is None and "prompt_token_ids" not in told
    assert [one.id for one in (await kept.list()).data] == ["chatcmpl-1"]
    described = await kept.update("chatcmpl-1", metadata={"use": "b"})
    assert described.to_dict()["metadata"] == {"use": "b"}
    assert (await kept.update("chatcmpl-1", metadata=None)).to_dict()["metadata"] == {}
    gone = await kept.delete("chatcmpl-1")
    assert (gone.id, gone.object, gone.deleted) == ("chatcmpl-1", "chat.completion.deleted", True)
    with pytest.raises(openai.NotFoundError) as caught:
        await kept.retrieve("chatcmpl-1")
    assert caught.value.code == "chat_completion_not_found"
    actions = [row["action"] for row in (await control.http.get("/admin/v1/audit", headers=ADMIN)).json()["data"]]
    assert actions.count("completion.update") == 2 and actions.count("completion.delete") == 1


async def test_completion_messages_are_paged_with_ids(control: Control):
    """Use an SDK client without strict validation, which would reject messages of roles other than assistant."""
    await send(control, completion("chatcmpl-1"))
    loose = openai.AsyncOpenAI(base_url=control.sdk.base_url, api_key="-", http_client=control.http)
    listed = loose.chat.completions.messages.list
    found = (await listed("chatcmpl-1")).data
    assert [(one.id, one.role, one.content) for one in found] == [
        ("chatcmpl-1-0", "system", "Be brief."),
        ("chatcmpl-1-1", "user", "1+1?\nNow."),
    ]
    assert found[0].content_parts is None and found[1].content_parts is not None and len(found[1].content_parts) == 2
    assert [one.id async for one in await listed("chatcmpl-1", limit=1, order="desc")] == [
        "chatcmpl-1-1",
        "chatcmpl-1-0",
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        await listed("chatcmpl-1", after="nobodys")
    assert caught.value.code == "invalid_cursor"


async def test_completion_list_filters_by_model_and_metadata(control: Control):
    both, german = {"use": "a", "v": "1"}, {"use": "a", "größe": "5'"}
    for number, (model, metadata) in enumerate([("m", both), ("starter", both), ("m", german), ("m", {}), ("m", None)]):
        await send(control, completion(f"chatcmpl-{number}", model=model, metadata=metadata))
    await send(control, copy(1))

    async def numbers(**asked: Any) -> str:
        page = await control.sdk.chat.completions.list(**asked)
        return "".join([one.id.removeprefix("chatcmpl-") async for one in page])

    assert await numbers() == "01234" and await numbers(order="desc", limit=2) == "43210"
    assert await numbers(model="m") == "0234" and await numbers(model="nobodys") == ""
    assert await numbers(metadata={"use": "a"}) == "012" and await numbers(metadata={"use": "b"}) == ""
    assert await numbers(metadata=both, model="m") == "0" and await numbers(metadata={"größe": "5'"}) == "2"
    assert await numbers(after="chatcmpl-2") == "34"
    await control.sdk.chat.completions.update("chatcmpl-3", metadata={"use": "b"})
    assert await numbers(metadata={"use": "b"}) == "3"
    with pytest.raises(openai.BadRequestError):
        await numbers(after="chatcmpl-nobodys")
    assert await numbers(metadata={str(number): "" for number in range(17)}) == ""
