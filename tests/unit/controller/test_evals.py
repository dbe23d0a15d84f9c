"""Evaluations through the unchanged SDK: run on items with and without a model, ended, taken up after a restart."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from appliance.controller.app import create_app
from appliance.controller.context.tasks import TaskFailed
from appliance.controller.evals import runner
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.http.peers import FromBox
from appliance.controller.interfaces.records import EngineAnswer
from appliance.store.database import Database
from appliance.store.objects import evals, models
from appliance.store.records import keys, model_settings
from appliance.store.upkeep import retention
from tests.simulator.control_plane import SimulatedEngines, simulated_context
from tests.unit.controller.conftest import ADMIN, SCOPES, Control
from train.graders.grading import Graded
from train.graders.hosts import GraderHosts

CHECK: Any = {
    "type": "string_check",
    "name": "same",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
ASKERS: Any = {"type": "score_model", "name": "judge", "model": "starter", "input": [{"role": "user", "content": "?"}]}
SCHEMA: Any = {
    "type": "custom",
    "item_schema": {
        "type": "object",
        "properties": {"answer": {"type": "string"}, "nothing": {"type": "string"}},
        "required": ["answer"],
    },
    "include_sample_schema": True,
}


def entries(*pairs: tuple[str, str]) -> Any:
    return [{"item": {"answer": answer}, "sample": {"output_text": text}} for text, answer in pairs]


def given(*pairs: tuple[str, str]) -> Any:
    return {"type": "jsonl", "source": {"type": "file_content", "content": entries(*pairs)}}


def asked(model: str = "starter", **fields: Any) -> Any:
    template = [{"role": "user", "content": "Say {{ item.answer }}"}]
    return {
        "type": "completions",
        "model": model,
        "source": {"type": "file_content", "content": [{"item": {"answer": "yes"}}, {"item": {"answer": "no"}}]},
        "input_messages": {"type": "template", "template": template},
        "sampling_params": {"temperature": 0, "max_completion_tokens": 7, "seed": 3},
    } | fields


PLAIN: Any = {**CHECK, "reference": "yes"}


async def made(control: Control, *criteria: Any) -> str:
    found = await control.sdk.evals.create(
        data_source_config=SCHEMA, testing_criteria=list(criteria or [CHECK]), name="n", metadata={"a": "b"}
    )
    return found.id


async def test_a_file_for_evals_has_that_purpose(control: Control):
    lines = b"".join(orjson.dumps(entry) + b"\n" for entry in entries(("yes", "yes"), ("no", "yes")))
    # Not by the SDK, whose strict client takes the purpose in requests and not in answers.
    sent = await control.http.post("/v1/files", files={"file": ("items.jsonl", lines)}, data={"purpose": "evals"})
    assert (file := sent.json())["purpose"] == "evals"
    source = {"type": "jsonl", "source": {"type": "file_id", "id": file["id"]}}
    found = await ended(control, await made(control), source)
    assert (found.status, found.result_counts.total) == ("completed", 2)


async def test_who_makes_the_box_ask_a_model_needs_the_scope_of_inference_and_the_model(control: Control):
    """Whatever the route: runs that sample or judge, evals and jobs with a judge, graders that are tried."""
    control.as_key("ann", owner="ann")
    judged, plain, file = await made(control, ASKERS), await made(control), await control.upload()
    reinforcement = {"type": "reinforcement", "reinforcement": {"grader": ASKERS}}
    asking: list[tuple[str, Any]] = [
        ("/evals", {"data_source_config": SCHEMA, "testing_criteria": [ASKERS]}),
        (f"/evals/{plain}/runs", {"data_source": asked()}),
        (f"/evals/{judged}/runs", {"data_source": given(("yes", "yes"))}),
        ("/fine_tuning/alpha/graders/run", {"grader": ASKERS, "model_sample": "4"}),
        ("/fine_tuning/jobs", {"model": "starter", "training_file": file, "method": reinforcement}),
    ]
    control.as_key("tuner", owner="ann", scopes=["fine_tuning"])
    for path, body in asking:
        answer = await control.http.post(f"/v1{path}", json=body)
        assert answer.status_code == 403 and "scope: inference" in answer.json()["error"]["message"], (
            path,
            answer.text,
        )
    assert (await ended(control, plain, given(("yes", "yes")))).status == "completed", "it asks no model"
    control.as_key("narrow", owner="ann", models=["other"])
    for path, body in asking[:-1]:
        answer = await control.http.post(f"/v1{path}", json=body)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found", (path, answer.text)


async def test_a_model_without_a_chat_template_is_asked_nothing_and_no_engine_is_wanted(control: Control):
    """Runs that sample or judge and graders are refused when they are made; work that was accepted before, in words."""
    control.as_key("ann", owner="ann")
    sent = answers(control, "yes")
    judged, plain = await made(control, ASKERS), await made(control)
    models.update_version(control.db, "starter", "v1", meta={"chat_template": False})
    for path, body in (
        ("/evals", {"data_source_config": SCHEMA, "testing_criteria": [ASKERS]}),
        (f"/evals/{plain}/runs", {"data_source": asked()}),
        (f"/evals/{judged}/runs", {"data_source": given(("yes", "yes"))}),
        ("/fine_tuning/alpha/graders/run", {"grader": ASKERS, "model_sample": "4"}),
    ):
        error = (await control.http.post(f"/v1{path}", json=body)).json()["error"]
        assert error["code"] == "model_not_supported" and "has no chat template" in error["message"], (path, error)
    assert not sent
    model_settings.add(control.db, "starter", {"chat_template": "{{ messages[0].content }}"}, "d", "ann", 0.0)
    assert (await ended(control, plain, asked())).status == "completed" and sent, "it was given one"


async def ended(control: Control, eval_id: str, source: Any) -> Any:
    run = await control.sdk.evals.runs.create(eval_id, data_source=source)
    assert run.status == "queued"
    await control.context.tasks.idle("eval_runs")
    return await control.sdk.evals.runs.retrieve(run.id, eval_id=eval_id)


def answers(control: Control, text: str) -> list[dict[str, Any]]:
    assert isinstance(control.context.asking, SimulatedEngines)
    sent: list[dict[str, Any]] = []

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        sent.append(body)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        used = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        return EngineAnswer(200, {"choices": [choice], "usage": used}, "v1")

    control.context.asking.rule = rule
    return sent


async def test_an_answer_that_calls_no_tool_fails_and_is_no_error(control: Control):
    answers(control, "no call")
    called: Any = {**CHECK, "input": "{{ sample.output_tools[0].function.name }}"}
    run = await ended(control, await made(control, called), asked())
    counts = run.result_counts
    assert (counts.failed, counts.errored, counts.total) == (2, 0, 2)
    assert run.report_url.endswith(f"/ui#/evals/{run.eval_id}/{run.id}") and "/v1" not in run.report_url
    items = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=run.eval_id)).data
    assert items[0].status == "fail" and "has no value" in items[0].results[0].to_dict()["reason"]


async def test_evals_are_listed_by_their_last_change(control: Control):
    first, second, third = [await made(control) for _ in range(3)]
    await control.sdk.evals.update(first, name="new")

    async def listed(**more: Any) -> list[str]:
        return [one.id async for one in control.sdk.evals.list(order_by="updated_at", limit=1, **more)]

    assert await listed() == [second, third, first]
    assert await listed(order="desc") == [first, third, second]
    assert await listed(order="desc", after=third) == [second]


@pytest.mark.parametrize(
    ("criterion", "param", "says"),
    [
        (
            {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return 1 +"},
            "source",
            "SyntaxError: invalid syntax",
        ),
        ({name: value for name, value in CHECK.items() if name != "name"}, "name", "Missing required parameter"),
    ],
)
async def test_criteria_that_nothing_can_meet_are_refused(control: Control, criterion: Any, param: str, says: str):
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        await made(control, criterion)
    assert caught.value.param == f"testing_criteria.0.{param}"


async def test_an_eval_is_made_listed_changed_and_deleted(control: Control):
    first, second = await made(control), await made(control)
    assert [one.id async for one in control.sdk.evals.list(order="desc", limit=1)] == [second, first]
    found = await control.sdk.evals.update(first, name="other", metadata={"c": "d"})
    assert (found.name, found.metadata, found.data_source_config.type) == ("other", {"c": "d"}, "custom")
    schema = found.data_source_config.schema_
    assert schema["required"] == ["item", "sample"] and schema["properties"]["item"] == SCHEMA["item_schema"]
    assert found.testing_criteria[0].model_dump(exclude_unset=True) == CHECK
    assert (await control.sdk.evals.delete(first)).deleted
    with pytest.raises(openai.NotFoundError):
        await control.sdk.evals.retrieve(first)


async def test_samples_that_the_data_has_are_judged(control: Control):
    eval_id = await made(control)
    run = await ended(control, eval_id, given(("4", "4"), ("4", "5"), ("6", "6")))
    assert run.status == "completed" and run.error.code == ""
    assert run.result_counts.model_dump() == {"total": 3, "passed": 2, "failed": 1, "errored": 0}
    (judged,) = run.per_testing_criteria_results
    assert judged.model_dump(exclude={"mean_reward"}) == {"testing_criteria": "same", "passed": 2, "failed": 1}
    assert judged.mean_reward == pytest.approx(2 / 3) and run.waits_for is None
    items = control.sdk.evals.runs.output_items
    listed = [item async for item in items.list(run.id, eval_id=eval_id, limit=2)]
    assert [(item.status, item.datasource_item_id) for item in listed] == [("pass", 0), ("fail", 1), ("pass", 2)]
    (failed,) = [item async for item in items.list(run.id, eval_id=eval_id, status="fail")]
    one = await items.retrieve(failed.id, eval_id=eval_id, run_id=run.id)
    assert one.results[0].model_dump(exclude_unset=True) == {
        "name": "same",
        "type": "string_check",
        "passed": False,
        "score": 0.0,
    }
    assert one.datasource_item == {"answer": "5"} and one.sample.output[0].content == "4"
    sampled = ("seed", "temperature", "top_p", "finish_reason", "max_completion_tokens")
    assert not any(getattr(one.sample, name) for name in sampled), "no model was asked"


async def test_a_model_of_the_box_is_asked_and_its_tokens_are_told(control: Control):
    control.as_key("carol")
    sent = answers(control, "yes")
    run = await ended(control, eval_id := await made(control), asked())
    assert run.result_counts.model_dump() == {"total": 2, "passed": 1, "failed": 1, "errored": 0}
    assert sorted(body["messages"][0]["content"] for body in sent) == ["Say no", "Say yes"]
    assert {(body["temperature"], body["max_completion_tokens"], body["seed"]) for body in sent} == {(0, 7, 3)}
    (used,) = run.per_model_usage
    assert (used.run_model_name, used.invocation_count, used.total_tokens, used.cached_tokens) == ("starter", 2, 20, 8)
    item = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=eval_id)).data[0]
    assert item.sample.input[0].content == "Say yes" and item.sample.usage.total_tokens == 10
    assert (item.sample.finish_reason, item.sample.seed, item.sample.max_completion_tokens) == ("stop", 3, 7)


async def test_a_judges_question_and_answer_have_the_form_of_a_sample(control: Control):
    control.as_key("carol")
    said = json.dumps({"reason": "good", "result": 0.75})
    answers(control, said)
    judge = {**ASKERS, "sampling_params": {"seed": 5, "temperature": 0}}
    run = await ended(control, eval_id := await made(control, judge), given(("4", "4")))
    (result,) = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=eval_id)).data[0].results
    assert (result.passed, result.score) == (True, 0.75)
    assert result.sample == {
        "input": [{"role": "user", "content": "?"}],
        "output": [{"role": "assistant", "content": said}],
        "model": "starter",
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 4, "total_tokens": 10},
        "error": {"code": "", "message": ""},
        "finish_reason": "stop",
        "max_completion_tokens": 1024,
        "temperature": 0,
        "top_p": 1.0,
        "seed": 5,
    }


async def test_responses_are_written_otherwise_and_asked_the_same(control: Control):
    control.as_key("carol")
    sent = answers(control, "yes")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    source = asked(
        type="responses",
        input_messages={"type": "item_reference", "item_reference": "item.turns"},
        source={
            "type": "file_content",
            "content": [{"item": {"answer": "yes", "turns": [{"role": "user", "content": "hi"}]}}],
        },
        # As in OpenAI's own examples, not in its types.
        sampling_params={"tools": [tool], "text": {"format": form}, "max_completions_tokens": 9},
    )
    more = {**SCHEMA, "item_schema": {**SCHEMA["item_schema"], "additionalProperties": True}}
    of = await control.sdk.evals.create(data_source_config=more, testing_criteria=[CHECK])
    run = await ended(control, of.id, source)
    assert run.status == "completed" and run.result_counts.passed == 1
    (body,) = sent
    assert body["max_completion_tokens"] == 9
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["tools"][0]["function"] == {"name": "f", "parameters": {"type": "object"}}
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    }


async def test_a_file_is_read_and_a_bad_line_is_named(control: Control):
    eval_id = await made(control)
    lines = "\n".join(json.dumps(entry) for entry in entries(("a", "a"), ("b", "c")))
    marked = b"\xef\xbb\xbf" + lines.encode()
    file_id = await control.upload(marked, "items.jsonl", purpose="user_data")
    source: Any = {"type": "jsonl", "source": {"type": "file_id", "id": file_id}}
    assert (await ended(control, eval_id, source)).result_counts.total == 2
    bad = await control.upload(b'{"item": {"answer": "a"}}\n{"answer": "a"}', "items.jsonl", purpose="user_data")
    run = await ended(control, eval_id, {"type": "jsonl", "source": {"type": "file_id", "id": bad}})
    assert (run.status, run.error.code) == ("failed", "invalid_data") and "Line 2" in run.error.message


async def test_items_that_do_not_follow_the_schema_are_named_before_anything_is_asked(control: Control):
    run = await ended(
        control,
        await made(control),
        {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {"answer": 3}}, {"item": {}}]}},
    )
    assert (run.status, run.error.code) == ("failed", "invalid_data")
    assert "line 1: item.answer: 3 is not of type 'string'" in run.error.message and "line 2" in run.error.message


async def test_run_without_items_fails(control: Control):
    run = await ended(control, await made(control), given())
    assert (run.status, run.error.code) == ("failed", "invalid_data")


async def test_what_cannot_be_graded_is_an_error_and_no_failure(control: Control):
    lacking = {**CHECK, "name": "lacking", "reference": "{{item.nothing}}"}
    source = given(("4", "4"), ("4", "4"))
    source["source"]["content"][1]["item"]["nothing"] = "4"
    run = await ended(control, eval_id := await made(control, CHECK, lacking), source)
    assert [one.mean_reward for one in run.per_testing_criteria_results] == [1.0, 1.0], "errors are no rewards"
    assert run.result_counts.model_dump() == {"total": 2, "passed": 1, "failed": 0, "errored": 1}
    item = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=eval_id)).data[0]
    assert item.status == "error" and "nothing" in item.results[1].error  # type: ignore[attr-defined]


async def test_a_run_is_cancelled_and_keeps_what_was_judged(control: Control):
    control.as_key("carol")
    assert isinstance(control.context.asking, SimulatedEngines)
    control.context.asking.lines = 0
    eval_id = await made(control)
    run = await control.sdk.evals.runs.create(eval_id, data_source=asked())
    while len(evals.queued_items(control.db, run.id, 9)) != 2:
        await asyncio.sleep(0.001)
    cancelled = await control.sdk.evals.runs.cancel(run.id, eval_id=eval_id)
    assert cancelled.status == "canceled" and cancelled.result_counts.total == 2
    await control.context.tasks.idle("eval_runs")
    assert not control.context.asking.models
    assert [one.id async for one in control.sdk.evals.runs.list(eval_id, status="canceled")] == [run.id]
    assert (await control.sdk.evals.runs.delete(run.id, eval_id=eval_id)).deleted


async def test_slow_item_keeps_no_other_from_being_judged(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "AT_ONCE", 2)
    assert isinstance(control.context.asking, SimulatedEngines)
    slow, said = asyncio.Event(), list[str]()

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        said.append(text := body["messages"][-1]["content"])
        if said.index(text) == 0:
            await slow.wait()
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
        return EngineAnswer(200, {"choices": [choice], "usage": {}}, "v1")

    control.context.asking.rule = rule
    items = {"type": "file_content", "content": [{"item": {"answer": str(n)}} for n in range(6)]}
    run = await control.sdk.evals.runs.create(await made(control), data_source=asked(source=items))
    async with asyncio.timeout(60):
        while len(evals.queued_items(control.db, run.id, 9)) > 1:
            await asyncio.sleep(0.002)
    slow.set()
    await control.context.tasks.idle("eval_runs")
    found = evals.find_run(control.db, run.id)
    assert found is not None and found.status == "completed" and sum(found.counts.values()) == 6


async def test_run_grades_few_items_with_code_in_one_call(control: Control, monkeypatch: pytest.MonkeyPatch):
    counts = dict[str, list[int]]()

    async def grade(hosts: Any, owner: str, grader: Any, samples: list[Any], given: Any) -> list[Graded]:
        counts.setdefault(grader.name, []).append(len(samples))
        return [Graded(float(place), True) for place, _ in enumerate(samples)]

    async def unusable(hosts: Any, owner: str, sources: Any) -> list[tuple[str, str]]:
        return []

    monkeypatch.setattr(GraderHosts, "grade", grade)
    monkeypatch.setattr(GraderHosts, "unusable", unusable)
    code = {"type": "python", "name": "code", "source": "def grade(sample, item):\n    return 1.0"}
    run = await ended(control, await made(control, CHECK, code), given(*[("a", "a")] * 7))
    assert (run.status, run.result_counts.passed) == ("completed", 7)
    assert counts == {"same": [7], "code": [3, 3, 1]}


async def test_run_after_kill_while_judging_judges_the_rest_once(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    eval_id, stored = await made(control), EvalRunner._store

    def once(self: EvalRunner, run_id: str, *args: Any) -> None:
        stored(self, run_id, *args)
        monkeypatch.setattr(EvalRunner, "_store", stored)
        control.context.tasks.restart("eval_runs", run_id)

    monkeypatch.setattr(EvalRunner, "_store", once)
    found = await ended(control, eval_id, given(("a", "a"), ("b", "b"), ("c", "d")))
    assert found.status == "completed"
    assert found.per_testing_criteria_results[0].model_dump()["passed"] == 2
    assert found.result_counts.model_dump() == {"total": 3, "passed": 2, "failed": 1, "errored": 0}


async def test_run_after_kill_while_preparing_reads_all_items_again(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_CHUNK", 2)
    checked = list[int]()

    async def refused_items(hosts: Any, owner: str, schema: Any, items: list[Any]) -> list[tuple[int, str]]:
        checked.append(len(items))
        if len(checked) == 2:
            (run_id,) = evals.unfinished_ids(control.db, eval_id)
            control.context.tasks.restart("eval_runs", run_id)
        return []

    eval_id = await made(control)
    monkeypatch.setattr(GraderHosts, "refused_items", refused_items)
    found = await ended(control, eval_id, given(*[("a", "a")] * 3))
    assert (found.status, found.result_counts.total, found.result_counts.passed) == ("completed", 3, 3)
    assert checked[:2] == [2, 1] and checked[-2:] == [2, 1]


@pytest.mark.parametrize("whole", [False, True], ids=["the run", "its eval"])
async def test_run_deleted_while_preparing_ends_without_error(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whole: bool
):
    async def refused_items(hosts: Any, owner: str, schema: Any, items: list[Any]) -> list[tuple[int, str]]:
        (run_id,) = evals.unfinished_ids(control.db, eval_id)
        evals.delete(control.db, eval_id if whole else run_id)
        return []

    eval_id = await made(control)
    monkeypatch.setattr(GraderHosts, "refused_items", refused_items)
    run = await control.sdk.evals.runs.create(eval_id, data_source=given(("a", "a"), ("b", "c")))
    await control.context.tasks.idle("eval_runs")
    assert "bug" not in caplog.text
    assert (await control.http.get(f"/v1/evals/{eval_id}/runs/{run.id}")).status_code == 404


async def test_a_revoked_keys_run_fails_and_says_so(control: Control):
    key_id = control.as_key("carol")
    eval_id = await made(control)
    run = await control.sdk.evals.runs.create(eval_id, data_source=given(("a", "a")))
    keys.revoke(control.db, key_id)
    await control.context.tasks.idle("eval_runs")
    found = evals.find_run(control.db, run.id)
    assert found is not None and found.status == "failed" and found.error is not None
    assert found.error["code"] == "invalid_api_key"


async def test_a_key_that_is_revoked_while_an_item_is_judged_has_no_more_of_it_judged(control: Control):
    key_id = control.as_key("carol")
    assert isinstance(control.context.asking, SimulatedEngines)

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        keys.revoke(control.db, key_id)
        control.context.tasks.end_key(key_id)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
        return EngineAnswer(200, {"choices": [choice], "usage": {}}, "v1")

    control.context.asking.rule = rule
    run = await control.sdk.evals.runs.create(await made(control), data_source=asked())
    await control.context.tasks.idle("eval_runs")
    found = evals.find_run(control.db, run.id)
    assert found is not None and (found.status, found.results) == ("failed", {})
    assert len(evals.queued_items(control.db, run.id, 9)) == 2


REFUSED = {
    "no grader": ({"testing_criteria": [{**CHECK, "operation": "is"}]}, "testing_criteria.0.operation"),
    "a threshold out of reach": (
        {"testing_criteria": [{**CHECK, "pass_threshold": 1.5}]},
        "testing_criteria.0.pass_threshold",
    ),
    "the same name": ({"testing_criteria": [CHECK, CHECK]}, "testing_criteria.1.name"),
    "no schema": (
        {"data_source_config": {**SCHEMA, "item_schema": {"type": "objekt"}}, "testing_criteria": [PLAIN]},
        "data_source_config.item_schema",
    ),
    "a schema of texts": (
        {"data_source_config": {**SCHEMA, "item_schema": {"type": "string"}}, "testing_criteria": [PLAIN]},
        "data_source_config.item_schema",
    ),
    "a schema that refers to nothing": (
        {"data_source_config": {**SCHEMA, "item_schema": {"$ref": "#/$defs/none"}}, "testing_criteria": [PLAIN]},
        "data_source_config.item_schema",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
async def test_what_is_no_eval_is_refused_by_name(control: Control, fields: Any, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.evals.create(**{"data_source_config": SCHEMA, "testing_criteria": [CHECK]} | fields)
    assert caught.value.param == param


REFUSED_RUNS = {
    "what is kept, line by line": (
        {"type": "jsonl", "source": {"type": "stored_completions"}},
        "data_source.source",
    ),
    "no model": ({k: v for k, v in asked().items() if k != "model"}, "data_source.model"),
    "no messages": ({k: v for k, v in asked().items() if k != "input_messages"}, "data_source.input_messages"),
    "a hosted tool": (
        asked(sampling_params={"tools": [{"type": "web_search"}]}),
        "data_source.sampling_params.tools.0",
    ),
    "a variable": (
        asked(input_messages={"type": "template", "template": [{"role": "user", "content": "{{x}}"}]}),
        "data_source.input_messages.template.0.content",
    ),
    "a sample that is not there yet": (
        asked(input_messages={"type": "template", "template": [{"role": "user", "content": "{{sample.output_text}}"}]}),
        "data_source.input_messages.template.0.content",
    ),
    "a reference with braces": (
        asked(input_messages={"type": "item_reference", "item_reference": "{{ item.messages }}"}),
        "data_source.input_messages.item_reference",
    ),
    "an image": (
        asked(
            input_messages={
                "type": "template",
                "template": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}],
            }
        ),
        "data_source.input_messages.template.0.content.0.type",
    ),
}


@pytest.mark.parametrize(("source", "param"), REFUSED_RUNS.values(), ids=REFUSED_RUNS)
async def test_what_is_no_run_is_refused_by_name(control: Control, source: Any, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.evals.runs.create(await made(control), data_source=source)
    assert caught.value.param == param


async def test_what_no_engine_takes_is_refused_with_the_run_and_not_with_each_item(control: Control):
    control.as_key("carol")
    eval_id = await made(control)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match="`not`") as caught:
        source = asked(sampling_params={"response_format": form})
        await control.sdk.evals.runs.create(eval_id, data_source=source)
    assert caught.value.param == "data_source.sampling_params"
    named = {"name": "n", "schema": {"type": "nope"}}
    for said in (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"text": {"format": {"type": "json_schema", **named}}},
    ):
        with pytest.raises(openai.BadRequestError, match="nope") as caught:
            await control.sdk.evals.runs.create(eval_id, data_source=asked(sampling_params=said))
        assert str(caught.value.param).startswith("data_source.sampling_params.")
        assert caught.value.code == "invalid_json_schema"


async def test_what_an_owner_keeps_is_bounded(control: Control):
    control.as_key("carol", bounds={"unfinished": 0, "bytes": 400})
    eval_id = await made(control)
    with pytest.raises(openai.APIStatusError) as caught:
        await made(control)
    assert (caught.value.status_code, caught.value.body["param"]) == (413, "bytes")  # type: ignore[index]
    with pytest.raises(openai.RateLimitError):
        await control.sdk.evals.runs.create(eval_id, data_source=given(("a", "a")))


async def test_runs_are_forgotten_by_age_and_with_their_owner(control: Control):
    control.as_key("carol", owner="carol")
    eval_id = await made(control)
    run = await ended(control, eval_id, given(("a", "a")))
    assert retention.eval_runs_before(control.db, time.time() - 60) == []
    for run_id in retention.eval_runs_before(control.db, time.time() + 60):
        evals.delete(control.db, run_id)
    assert evals.find_run(control.db, run.id) is None
    await ended(control, eval_id, given(("a", "a")))
    control.http.headers.update(ADMIN)
    told = await control.http.post("/admin/v1/forget", json={"owner": "carol", "cancel": True})
    assert told.json()["evals"] == 1 and evals.find(control.db, eval_id, viewer=None) is None


ODD_SAMPLES: dict[str, Any] = {
    "choices are an object": {"choices": {"a": 1}},
    "choices are a number": {"choices": 5},
    "a choice is a text": {"choices": ["x"]},
    "a message is a text": {"choices": [{"message": "x"}]},
    "tools are a number": {"output_tools": 5},
    "an answer as the runner keeps them": {"answer": {"prompt_tokens": "x", "error": {"a": 1}}},
    "an answer that is a text": {"answer": "x"},
    "messages that are none": {"input": [1]},
    "messages that are a number": {"input": 5},
}


@pytest.mark.parametrize("sample", ODD_SAMPLES.values(), ids=ODD_SAMPLES)
async def test_a_sample_of_another_shape_fails_alone(control: Control, sample: Any):
    content = [{"item": {"answer": "a"}, "sample": sample}, *entries(("a", "a"))]
    run = await ended(
        control, await made(control), {"type": "jsonl", "source": {"type": "file_content", "content": content}}
    )
    assert run.status == "completed" and run.result_counts.passed == 1
    shown = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=run.eval_id)).data
    assert [item.status for item in shown] == ["fail", "pass"]
    assert (
        shown[0].sample.input == [] and shown[0].sample.error.message == "" and not shown[0].sample.usage.total_tokens
    )
    assert control.context.background.degraded() == []


@pytest.mark.parametrize("reference", ["sample", "item.a[", "sample.nothing", "foo"])
async def test_a_reference_that_leads_nowhere_is_refused(control: Control, reference: str):
    with pytest.raises(openai.BadRequestError) as caught:
        messages = {"type": "item_reference", "item_reference": reference}
        await control.sdk.evals.runs.create(await made(control), data_source=asked(input_messages=messages))
    assert caught.value.param == "data_source.input_messages.item_reference"


async def test_a_run_keeps_its_items_once(control: Control):
    """Its row is written for every item; with 8 MiB of items in it that was 80 GB for 10,000 of them."""
    eval_id = await made(control)
    run = await ended(control, eval_id, given(("a", "a"), ("b", "c")))
    assert run.data_source.source.content == [] and run.result_counts.total == 2
    bad = await ended(
        control, eval_id, {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {"answer": 3}}]}}
    )
    assert bad.status == "failed" and bad.data_source.source.content == []


async def test_a_run_ends_when_its_owner_holds_too_much(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    control.as_key("carol", bounds={"bytes": 3500})
    answers(control, "long " * 500)
    run = await ended(control, await made(control), asked())
    assert (run.status, run.error.code) == ("failed", "limit_reached") and run.result_counts.failed == 1


DEAR = {
    "a long line": b'{"item": {"answer": "' + b"x" * (1 << 20) + b'"}}',
    "deep": b'{"item": {"answer": "", "x": ' + b"[" * 200 + b"]" * 200 + b"}}",
    "no text": b'{"item": {"answer": "\xff"}}',
    "empty lines": b"\n" * 20_002,
    "no number": b'{"item": {"answer": NaN}}',
    "a list": b"[1]",
    "null": b"null",
}


@pytest.mark.parametrize("line", DEAR.values(), ids=DEAR)
def test_a_line_that_is_dear_to_parse_is_refused(tmp_path: Path, line: bytes):
    (tmp_path / "f").write_bytes(line)
    with pytest.raises(TaskFailed):
        list(runner.entries(tmp_path / "f"))


def test_a_file_is_read_as_a_request_is(tmp_path: Path):
    """An integer of 31 digits ended the run: no engine can be told it."""
    (tmp_path / "f").write_bytes(b'{"item": {"turns": [{"role": "user", "content": 1' + b"0" * 30 + b"}]}}")
    ((entry, _),) = runner.entries(tmp_path / "f")
    assert orjson.loads(orjson.dumps(entry.item)) == {"turns": [{"role": "user", "content": 1e30}]}


async def test_a_runs_report_opens_where_browsers_see_the_box(tmp_path: Path, db: Database):
    """Behind a proxy or at 0.0.0.0 the box's own address is nothing to them."""
    context = simulated_context(tmp_path, db)
    context.box["public_url"] = "https://box.example.org"
    app = create_app(context)
    transport = httpx.ASGITransport(FromBox(app), raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://box/v1", headers=SCOPES) as http,
    ):
        body = {"data_source_config": SCHEMA, "testing_criteria": [CHECK]}
        eval_id = (await http.post("/evals", json=body)).json()["id"]
        run = (await http.post(f"/evals/{eval_id}/runs", json={"data_source": given(("yes", "yes"))})).json()
        assert run["report_url"] == f"https://box.example.org/ui#/evals/{eval_id}/{run['id']}"
