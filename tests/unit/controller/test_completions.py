"""Kept chat completions: /v1/chat/completions through the OpenAI SDK, what is kept of them, and when they go."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.unit.controller.conftest import ADMIN, Control
from tests.unit.controller.test_responses import copy, send

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1+1?"}, {"type": "text", "text": "Now."}]},
]


def completion(completion_id: str, *, key: str = "key_test", text: str = "2", **asked: Any) -> dict[str, Any]:
    """As a gateway sends it."""
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
    for call in (kept.retrieve("chatcmpl-1"), kept.delete("chatcmpl-1"), kept.update("chatcmpl-1", metadata={})):
        with pytest.raises(openai.NotFoundError) as caught:
            await call
        assert caught.value.code == "chat_completion_not_found"
    actions = [row["action"] for row in (await control.http.get("/admin/v1/audit", headers=ADMIN)).json()["data"]]
    assert actions.count("completion.update") == 2 and actions.count("completion.delete") == 1


async def test_completion_messages_are_paged_with_ids(control: Control):
    """As the SDK has it by default: its strict validation knows kept messages of assistants alone."""
    await send(control, completion("chatcmpl-1"))
    loose = openai.AsyncOpenAI(base_url=control.sdk.base_url, api_key="-", http_client=control.http)
    listed = loose.chat.completions.messages.list
    found = (await listed("chatcmpl-1")).data
    assert [(one.id, one.role, one.content) for one in found] == [
        ("chatcmpl-1-0", "system", "Be brief."),
        ("chatcmpl-1-1", "user", "1+1?\nNow."),
    ]
    assert found[0].content_parts is None and found[1].content_parts is not None and len(found[1].content_parts) == 2
    first = await listed("chatcmpl-1", limit=1, order="desc")
    assert [one.id for one in first.data] == ["chatcmpl-1-1"] and first.has_more
    assert [one.id async for one in first] == ["chatcmpl-1-1", "chatcmpl-1-0"]
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
