"""Evaluations over what is kept: chat completions and responses chosen by a run's source, judged as they were answered
or asked of a model again."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from appliance.controller.responses import entries
from appliance.store.objects import evals, responses
from tests.unit.controller.conftest import ADMIN, Control
from tests.unit.controller.test_completions import MESSAGES, completion
from tests.unit.controller.test_evals import answers, ended
from tests.unit.controller.test_responses import copy, name, send

CHECK: Any = {
    "type": "string_check",
    "name": "two",
    "input": "{{sample.output_text}}",
    "reference": "2",
    "operation": "eq",
}


async def made(control: Control, kind: str = "stored_completions", **metadata: str) -> str:
    config: Any = {"type": kind, "metadata": metadata}
    return (await control.sdk.evals.create(data_source_config=config, testing_criteria=[CHECK])).id


def of_completions(**source: Any) -> Any:
    return {"type": "completions", "source": {"type": "stored_completions", **source}}


def of_responses(**source: Any) -> Any:
    return {"type": "responses", "source": {"type": "responses", **source}}


def items(control: Control, run: Any) -> list[Any]:
    """In the order in which they were taken."""
    return evals.page_items(control.db, run.id, status=None, limit=100, descending=False).data


async def judged(control: Control, eval_id: str, source: Any) -> list[str]:
    """Ids of what was judged; [] for a run that found nothing."""
    run = await ended(control, eval_id, source)
    if run.status == "failed":
        assert run.error.code == "no_items", run.error
        unnamed = [name for name in source["source"] if name != "limit" and f"{name} " not in run.error.message]
        assert not unnamed, "what was asked for is named"
        return []
    assert run.status == "completed" and run.per_model_usage == []
    return [one.item["id"].removeprefix("chatcmpl-") for one in items(control, run)]


async def test_the_config_is_shown_with_the_schema_of_its_items(control: Control):
    for kind in ("stored_completions", "logs"):
        found = await control.sdk.evals.retrieve(await made(control, kind, use="a"))
        config = found.data_source_config
        assert config.type == kind and config.metadata == {"use": "a"}  # type: ignore[union-attr]
        assert config.schema_["required"] == ["item", "sample"]


async def test_kept_completions_are_judged_as_they_were_answered(control: Control):
    await send(control, completion("chatcmpl-1"), completion("chatcmpl-2", text="3"))
    run = await ended(control, await made(control), of_completions())
    assert (run.status, run.model, run.per_model_usage) == ("completed", "", [])
    assert (run.result_counts.passed, run.result_counts.failed) == (1, 1)
    second, first = items(control, run)
    assert (first.status, second.status) == ("pass", "fail") and first.item["input"] == MESSAGES
    shown = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=run.eval_id)).data
    assert [one.sample.output[0].content for one in shown] == ["3", "2"]


async def test_a_source_chooses_by_model_metadata_time_and_number(control: Control):
    for number, (model, metadata) in enumerate([("m", {"use": "a"}), ("m", {"use": "b"}), ("n", {"use": "a"})]):
        one = completion(f"chatcmpl-{number}", model=model, metadata=metadata)
        one["response"]["created"] = 10 + number
        await send(control, one)
    await send(control, copy(1), completion("chatcmpl-bobs", key="key_other"))
    everything, of_use = await made(control), await made(control, use="a")
    assert await judged(control, everything, of_completions()) == ["2", "1", "0"]
    assert await judged(control, everything, of_completions(limit=2)) == ["2", "1"]
    assert await judged(control, everything, of_completions(model="m")) == ["1", "0"]
    assert await judged(control, everything, of_completions(metadata={"use": "b"})) == ["1"]
    assert await judged(control, everything, of_completions(created_after=11, created_before=11)) == ["1"]
    assert await judged(control, of_use, of_completions(model="m")) == ["0"]
    assert await judged(control, everything, of_completions(model="nobodys")) == []


async def test_a_model_is_asked_again_what_was_asked_then(control: Control):
    sent = answers(control, "2")
    await send(control, completion("chatcmpl-1", text="3"))
    source = of_completions() | {"model": "starter", "sampling_params": {"temperature": 0}}
    run = await ended(control, await made(control), source)
    assert run.result_counts.passed == 1 and [body["messages"] for body in sent] == [MESSAGES]
    template = [{"role": "user", "content": "Is it {{item.output_text}}?"}]
    again = source | {"input_messages": {"type": "template", "template": template}}
    await ended(control, await made(control), again)
    assert sent[1]["messages"] == [{"role": "user", "content": "Is it 3?"}]


async def test_kept_responses_are_chats_with_the_turns_before_them(control: Control):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
    result = [{"type": "function_call_output", "call_id": "c1", "output": "2"}]
    tool = {"type": "function", "name": "f", "parameters": {}}
    await send(control, copy(1, output=[{"type": "reasoning", "id": "rs_1", "summary": []}, call], tools=[tool]))
    await send(control, copy(2, result, previous=1, instructions="Add."))
    run = await ended(control, await made(control, "logs"), of_responses(limit=1))
    (found,) = items(control, run)
    chat_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert found.item["id"] == name(2) and found.item["input"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [chat_call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    assert (found.status, found.item["output_text"]) == ("pass", "2")
    run = await ended(control, run.eval_id, of_responses(has_tool_calls=True))
    (found,) = items(control, run)
    assert found.item["id"] == name(1) and found.sample["output_tools"] == [chat_call]
    assert found.item["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def test_a_source_of_responses_chooses_by_what_they_were_asked_with(control: Control):
    plain, told = {"metadata": {"use": "a"}}, {"instructions": "Be very brief.", "user": "u", "temperature": 0.5}
    tool = {"type": "function", "name": "f", "parameters": {}}
    effort = {"reasoning": {"effort": "low"}, "tools": [tool], "model": "m", "top_p": 0.5}
    await send(control, copy(1, **plain), copy(2, **told), copy(3, **effort), completion("chatcmpl-1"))
    await send(control, copy(4, status="failed"), copy(5, key="key_other"))
    eval_id = await made(control, "logs")
    for source, numbers in (
        ({}, [3, 2, 1]),
        ({"model": "m"}, [3]),
        ({"metadata": {"use": "a"}}, [1]),
        ({"instructions_search": "very"}, [2]),
        ({"users": ["u", "v"]}, [2]),
        ({"temperature": 0.5}, [2]),
        ({"top_p": 0.5}, [3]),
        ({"reasoning_effort": "low"}, [3]),
        ({"tools": ["f", "g"]}, [3]),
        ({"has_tool_calls": True}, []),
        ({"has_tool_calls": False, "limit": 1}, [3]),
    ):
        assert await judged(control, eval_id, of_responses(**source)) == [name(number) for number in numbers], source


async def test_only_ones_own_are_judged_an_administrators_too_and_with_the_scope_of_inference(control: Control):
    await send(control, completion("chatcmpl-1"), completion("chatcmpl-2", key="key_other"))
    eval_id = await made(control)
    asked = {"data_source": of_completions()}
    run = (await control.http.post(f"/v1/evals/{eval_id}/runs", json=asked, headers=ADMIN)).json()
    await control.app.state.evaluations.tasks.idle()
    row = evals.find_run(control.db, run["id"])
    assert row is not None and row.error is not None and row.error["code"] == "no_items", "others' are not looked at"
    control.as_key("tuner", owner="key_test", scopes=["fine_tuning"])
    refused = await control.http.post(f"/v1/evals/{await made(control)}/runs", json=asked)
    assert refused.status_code == 403 and "scope: inference" in refused.json()["error"]["message"]


async def test_what_is_too_long_to_be_judged_is_left_out(control: Control, monkeypatch: pytest.MonkeyPatch):
    await send(control, completion("chatcmpl-1"), completion("chatcmpl-2", text="x" * 5000))
    await send(control, copy(1), copy(2, previous=1))
    monkeypatch.setattr(entries, "MAX_BYTES", 4000)
    read, find = list[str](), responses.find
    monkeypatch.setattr(responses, "find", lambda db, one: (read.append(one), find(db, one))[1])
    assert await judged(control, await made(control), of_completions()) == ["1"]
    assert read == ["chatcmpl-1"], "sixteen at once were read, of up to 20 MiB each, before they were left out"
    row = responses.find(control.db, name(2))
    assert row is not None
    monkeypatch.setattr(entries, "MAX_BYTES", row.bytes)
    assert await judged(control, await made(control, "logs"), of_responses()) == [name(1)], "the second with its first"


async def test_a_source_that_asks_for_what_there_is_not_is_refused_by_name(control: Control):
    eval_id = await made(control)
    for source, param in (
        (of_completions(limit=0), "data_source.source.limit"),
        (of_completions(users=["u"]), "data_source.source.users"),
        (of_completions(metadata={"a": 1}), "data_source.source.metadata.a"),
        (of_completions() | {"sampling_params": {"seed": 1}}, "data_source.sampling_params"),
        ({"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {}}]}}, "data_source.type"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await control.sdk.evals.runs.create(eval_id, data_source=source)
        assert param.rpartition(".")[2] in str(caught.value.param), caught.value.param


def test_calls_of_namespaces_and_custom_tools_are_calls_in_a_conversation() -> None:
    items = [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "function_call", "namespace": "store", "name": "price", "call_id": "c1", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "note", "call_id": "c2", "input": "hi"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
    ]
    messages = entries._chat_messages(items)
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("store__price", "{}"),
        ("note", '{"input":"hi"}'),
    ]
    assert messages[2] == {"role": "tool", "tool_call_id": "c2", "content": "ok"}
    space = {"type": "namespace", "name": "store", "tools": [{"type": "function", "name": "price"}]}
    tools = entries._chat_tools([space, {"type": "custom", "name": "note"}])
    assert [tool["function"]["name"] for tool in tools] == ["store__price", "note"]
