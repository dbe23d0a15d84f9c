"""Stored responses: /v1/responses/ID through the OpenAI SDK, what gateways send and ask for, and when they go."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from appliance.controller.interfaces.principal import Listener
from appliance.store.objects import responses
from appliance.store.records import keys
from tests.unit.controller.conftest import Control

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
    return {
        "id": name(number),
        "object": "response",
        "created_at": 7,
        "model": "starter",
        "output": [message | {"content": content}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
        "temperature": 1.0,
        "top_p": 1.0,
        **nothing,
        **more,
    }


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
    """As a gateway does, which has no key."""
    transport = httpx.ASGITransport(Listener(control.app, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://box", headers=GATEWAY) as gateway:
        sent = await gateway.post("/internal/responses", json=list(copies))
    return sent.raise_for_status().json()["stored"]


async def context(control: Control, number: int) -> Any:
    return await control.http.get("/internal/responses/context", params={"id": name(number)})


async def texts(control: Control, number: int, **options: Any) -> list[str]:
    page = await control.sdk.responses.input_items.list(name(number), **options)
    return [item.content[0].text for item in page.data]  # type: ignore[union-attr]


async def test_response_is_retrieved_as_answered_and_deleted(control: Control):
    assert await send(control, copy(1)) == 1
    found = await control.sdk.responses.retrieve(name(1))
    assert found.output_text == "2" and found.created_at == 7
    assert (await control.http.get(f"/v1/responses/{name(1)}")).json() == answer(1)
    deleted = await control.http.delete(f"/v1/responses/{name(1)}")
    assert deleted.json() == {"id": name(1), "object": "response", "deleted": True}
    for call in (control.sdk.responses.retrieve, control.sdk.responses.delete, control.sdk.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await call("resp_gone")
        assert caught.value.code == "response_not_found"


async def test_take_of_a_copy_twice_stores_one(control: Control):
    assert await send(control, copy(1), copy(2)) == 2
    assert await send(control, copy(2, text="other"), copy(3)) == 1
    assert (await control.sdk.responses.retrieve(name(2))).output_text == "2"


async def test_retrieve_before_the_copy_arrives_waits(control: Control):
    asking = [asyncio.create_task(control.sdk.responses.retrieve(name(1))), asyncio.create_task(context(control, 1))]
    await asyncio.sleep(0)
    await send(control, copy(1))
    first, joined = await asyncio.gather(*asking)
    assert first.output_text == "2" and joined.status_code == 200


async def test_context_has_inputs_and_outputs_of_all_turns(control: Control):
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    await send(
        control,
        copy(1, "1+1?"),
        copy(2, [{"role": "user", "content": "add"}], previous=1, output=[thought, call]),
        copy(3, [{"type": "function_call_output", "call_id": "c1", "output": "2"}], previous=2, text=""),
    )
    items = (await context(control, 3)).json()
    assert items == [
        {"type": "message", "role": "user", "content": "1+1?"},
        *answer(1)["output"],
        {"role": "user", "content": "add"},
        thought,
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "2"},  # and a message without text is none
    ]


async def test_context_with_a_deleted_turn_is_refused(control: Control):
    await send(control, copy(1), copy(2, previous=1), copy(3, previous=2))
    assert (await context(control, 3)).status_code == 200
    await control.http.delete(f"/v1/responses/{name(1)}")
    refused = await context(control, 3)
    assert refused.status_code == 400 and name(1) in refused.json()["error"]["message"]
    assert (await control.sdk.responses.retrieve(name(3))).status == "completed"


async def test_input_items_pages_have_stable_ids(control: Control):
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
    with pytest.raises(openai.BadRequestError):
        await control.sdk.responses.input_items.list(name(2), after="msg_unknown")


async def test_cancel_of_an_answered_response_is_refused(control: Control):
    await send(control, copy(1))
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await control.sdk.responses.cancel(name(1))
    with pytest.raises(openai.BadRequestError, match="background"):
        await control.sdk.responses.retrieve(name(1), stream=True)


async def test_housekeeping_deletes_old_responses_and_those_of_owners_without_keys(control: Control):
    row, _ = keys.create(control.db, "laptop", ["inference"])
    await send(control, copy(1), copy(2), copy(3, key=row.id))
    control.db.execute("UPDATE responses SET created_s = ? WHERE id != ?", [time.time(), name(1)])

    def left() -> list[int]:
        control.app.state.responses.keep_house(time.time())
        return [n for n in (1, 2, 3) if responses.find(control.db, name(n)) is not None]

    assert left() == [2, 3]
    keys.revoke(control.db, row.id)
    assert left() == [2]


async def test_take_of_an_owner_without_keys_stores_nothing(control: Control):
    """It waited at a gateway while the controller was away: of who was forgotten by then it came into the database."""
    laptop, phone = (keys.create(control.db, one, ["inference"], "ann")[0] for one in ("laptop", "phone"))
    keys.revoke(control.db, laptop.id)
    await send(control, copy(1, key=laptop.id))
    assert responses.find(control.db, name(1)) is not None, "it is her other key's too"
    keys.revoke(control.db, phone.id)
    await send(control, copy(2, key=laptop.id), copy(3))
    assert responses.find(control.db, name(2)) is None and responses.find(control.db, name(3)) is not None
