"""Evaluations and graders, called by the unmodified SDK: runs, cancellation, restarts, validation and samples."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.grading import evals as runner
from appliance.controller.grading.evals import EvalRunner
from appliance.store.rows import EvalRunRow
from tests.unit.controller.conftest import CHECK, Control
from train.graders import sandbox

QUESTION = {"role": "user", "content": "{{item.answer}}: {{sample.output_text}}"}
JUDGE: Any = {"type": "score_model", "name": "judge", "model": "starter", "input": [QUESTION]}
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


async def bodies(control: Control) -> tuple[Any, Any]:
    one = {"data_source_config": SCHEMA, "testing_criteria": [CHECK]}
    return one, one | {"name": "b"}


async def made(control: Control, *criteria: Any) -> str:
    found = await control.sdk.evals.create(
        data_source_config=SCHEMA, testing_criteria=list(criteria or [CHECK]), name="n", metadata={"a": "b"}
    )
    return found.id


async def test_eval_run_needs_inference_scope_and_model_access(control: Control):
    control.as_key("ann", owner="ann")
    judged, plain, file = await made(control, JUDGE), await made(control), await control.upload()
    reinforcement = {"type": "reinforcement", "reinforcement": {"grader": JUDGE}}
    asking: list[tuple[str, Any]] = [
        ("/evals", {"data_source_config": SCHEMA, "testing_criteria": [JUDGE]}),
        (f"/evals/{plain}/runs", {"data_source": asked()}),
        (f"/evals/{judged}/runs", {"data_source": given(("yes", "yes"))}),
        ("/fine_tuning/alpha/graders/run", {"grader": JUDGE, "model_sample": "4"}),
    ]
    job = ("/fine_tuning/jobs", {"model": "starter", "training_file": file, "method": reinforcement})
    control.as_key("tuner", owner="ann", scopes=["fine_tuning"])
    for path, body in (*asking, job):
        answer = await control.http.post(f"/v1{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_permissions"), path
    assert (await ended(control, plain, given(("yes", "yes")))).status == "completed", "it asks no model"
    control.as_key("narrow", owner="ann", models=["other"])
    for path, body in asking:
        answer = await control.http.post(f"/v1{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), path


async def ended(control: Control, eval_id: str, source: Any) -> Any:
    run = await control.sdk.evals.runs.create(eval_id, data_source=source)
    assert run.status == "queued"
    await control.context.tasks.idle("eval_runs")
    return await control.sdk.evals.runs.retrieve(run.id, eval_id=eval_id)


def answers(control: Control, text: str) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        sent.append(body)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        used = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        return EngineAnswer(200, {"choices": [choice], "usage": used})

    control.engines.rule = rule
    return sent


async def test_eval_run_grades_given_samples(control: Control):
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
    (failed,) = [item async for item in items.list(run.id, eval_id=eval_id, status="fail", after=listed[0].id)]
    one = await items.retrieve(failed.id, eval_id=eval_id, run_id=run.id)
    result = {"name": "same", "type": "string_check", "passed": False, "score": 0.0}
    assert one.results[0].model_dump(exclude_unset=True) == result
    assert one.datasource_item == {"answer": "5"} and one.sample.output[0].content == "4"


async def test_run_samples_a_model_and_counts_its_tokens(control: Control):
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


async def test_run_with_source_responses_samples_like_completions(control: Control):
    control.as_key("carol")
    sent = answers(control, "yes")
    function = {"name": "f", "parameters": {"type": "object"}}
    schema = {"name": "n", "schema": {"type": "object"}}
    turns = [{"role": "user", "content": "hi"}]
    source = asked(
        type="responses",
        input_messages={"type": "item_reference", "item_reference": "item.turns"},
        source={"type": "file_content", "content": [{"item": {"answer": "yes", "turns": turns}}]},
        # OpenAI's examples have these parameters, but the SDK's types lack them.
        sampling_params={
            "tools": [{"type": "function", **function}],
            "text": {"format": {"type": "json_schema", **schema}},
            "max_completions_tokens": 9,
        },
    )
    run = await ended(control, await made(control), source)
    assert run.status == "completed" and run.result_counts.passed == 1
    (body,) = sent
    assert body["max_completion_tokens"] == 9 and body["messages"] == turns
    assert body["tools"][0]["function"] == function
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}


async def test_run_reads_a_file_and_names_a_bad_line(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_CHUNK", 1)
    eval_id = await made(control)
    lines = "\n".join(json.dumps(entry) for entry in entries(("a", "a"), ("b", "c")))
    marked = ("items.jsonl", b"\xef\xbb\xbf" + lines.encode())
    # Sent without the SDK, because its strict validation rejects an answer with the purpose `evals`.
    sent = await control.http.post("/v1/files", files={"file": marked}, data={"purpose": "evals"})
    source: Any = {"type": "jsonl", "source": {"type": "file_id", "id": sent.json()["id"]}}
    assert (await ended(control, eval_id, source)).result_counts.total == 2
    bad = await control.upload(b'{"item": {"answer": "a"}}\n{"answer": "a"}', "items.jsonl", purpose="user_data")
    run = await ended(control, eval_id, {"type": "jsonl", "source": {"type": "file_id", "id": bad}})
    assert (run.status, run.error.code) == ("failed", "invalid_data") and "Line 2" in run.error.message
    assert run.result_counts.total == 0


@pytest.mark.parametrize("content", [[{"item": {"answer": 3}}, {"item": {}}], []])
async def test_eval_run_without_valid_items_fails(control: Control, content: list[Any]):
    source = {"type": "jsonl", "source": {"type": "file_content", "content": content}}
    run = await ended(control, await made(control), source)
    assert (run.status, run.error.code) == ("failed", "invalid_data")
    assert not content or "line 1" in run.error.message and "line 2" in run.error.message
    assert run.data_source.source.content == [], "items are stored once, in rows of their own"


async def test_ungraded_item_is_an_error_and_no_failure(control: Control):
    lacking = {**CHECK, "name": "lacking", "reference": "{{item.nothing}}"}
    source = given(("4", "4"), ("4", "4"))
    source["source"]["content"][1]["item"]["nothing"] = "4"
    run = await ended(control, eval_id := await made(control, CHECK, lacking), source)
    assert [one.mean_reward for one in run.per_testing_criteria_results] == [1.0, 1.0], "errors are no rewards"
    assert run.result_counts.model_dump() == {"total": 2, "passed": 1, "failed": 0, "errored": 1}
    item = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=eval_id)).data[0]
    assert item.status == "error" and "nothing" in item.results[1].error  # type: ignore[attr-defined]


async def test_cancelled_run_keeps_judged_items(control: Control):
    control.as_key("carol")
    control.engines.lines = 0
    eval_id = await made(control)
    run = await control.sdk.evals.runs.create(eval_id, data_source=asked())
    while not control.engines.models:
        await asyncio.sleep(0.001)
    cancelled = await control.sdk.evals.runs.cancel(run.id, eval_id=eval_id)
    assert cancelled.status == "canceled" and cancelled.result_counts.total == 2
    await control.context.tasks.idle("eval_runs")
    assert not control.engines.models
    assert [one.id async for one in control.sdk.evals.runs.list(eval_id, status="canceled")] == [run.id]
    assert (await control.sdk.evals.runs.delete(run.id, eval_id=eval_id)).deleted


async def test_delete_eval_deletes_runs_and_items(control: Control):
    eval_id = await made(control)
    await ended(control, eval_id, given(("a", "a"), ("b", "b")))
    under_way = await control.sdk.evals.runs.create(eval_id, data_source=given(("a", "a")))
    assert (await control.sdk.evals.runs.delete(under_way.id, eval_id=eval_id)).deleted
    await control.context.tasks.idle("eval_runs")
    assert control.db.value("SELECT count(*) FROM eval_items") == 2 and not control.context.background.degraded()
    assert (await control.sdk.evals.delete(eval_id)).deleted
    for table in ("evals", "eval_runs", "eval_items"):
        assert control.db.value(f"SELECT count(*) FROM {table}") == 0


async def test_eval_run_after_kill_grades_each_item_once(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    eval_id, stored = await made(control), EvalRunner._store

    def once(self: EvalRunner, row: EvalRunRow, *args: Any) -> EvalRunRow:
        counted = stored(self, row, *args)
        monkeypatch.setattr(EvalRunner, "_store", stored)
        control.context.tasks.restart("eval_runs", row.id)
        return counted

    monkeypatch.setattr(EvalRunner, "_store", once)
    found = await ended(control, eval_id, given(("a", "a"), ("b", "b"), ("c", "d")))
    assert found.status == "completed"
    assert found.per_testing_criteria_results[0].model_dump()["passed"] == 2
    assert found.result_counts.model_dump() == {"total": 3, "passed": 2, "failed": 1, "errored": 0}


REFUSED = {
    "no grader": ({"testing_criteria": [{**CHECK, "operation": "is"}]}, "testing_criteria.0.operation"),
    "the same name": ({"testing_criteria": [CHECK, CHECK]}, "testing_criteria.1.name"),
    "a schema that refers to nothing": (
        {"data_source_config": SCHEMA | {"item_schema": {"$ref": "#/$defs/none"}}},
        "data_source_config.item_schema",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
async def test_invalid_eval_is_refused_with_its_field(control: Control, fields: Any, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.evals.create(**{"data_source_config": SCHEMA, "testing_criteria": [CHECK]} | fields)
    assert caught.value.param == param


def messages(*given: Any) -> Any:
    return asked(input_messages={"type": "template", "template": [{"role": "user", "content": one} for one in given]})


def reference(to: str) -> tuple[Any, str]:
    wrong = asked(input_messages={"type": "item_reference", "item_reference": to})
    return wrong, "data_source.input_messages.item_reference"


TEMPLATE = "data_source.input_messages.template.0.content"
REFUSED_RUNS = {
    "stored completions": ({"type": "jsonl", "source": {"type": "stored_completions"}}, "data_source.source"),
    "a hosted tool": (
        asked(sampling_params={"tools": [{"type": "web_search"}]}),
        "data_source.sampling_params.tools.0",
    ),
    "a sample that is not there yet": (messages("{{sample.output_text}}"), TEMPLATE),
    "a template that is none": (messages("{{ item.a | upper }}"), TEMPLATE),
    "a part that is none": (messages([{"type": "input_text", "text": "{{ a }}"}]), f"{TEMPLATE}.0.text"),
    "an image": (messages([{"type": "input_image", "image_url": "data:x"}]), f"{TEMPLATE}.0.type"),
    "a reference with braces": reference("{{ item.messages }}"),
    "a reference to the sample": reference("sample"),
}


@pytest.mark.parametrize(("source", "param"), REFUSED_RUNS.values(), ids=REFUSED_RUNS)
async def test_invalid_run_is_refused_with_its_field(control: Control, source: Any, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.evals.runs.create(await made(control), data_source=source)
    assert caught.value.param == param


async def test_run_fails_when_its_owner_exceeds_a_bound(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    control.as_key("carol", bounds={"bytes": 2500})
    answers(control, "long " * 500)
    run = await ended(control, await made(control), asked())
    assert (run.status, run.error.code) == ("failed", "limit_reached") and run.result_counts.failed == 1


# --- graders


async def test_grader_routes_run_and_validate(control: Control):
    found = await control.sdk.fine_tuning.alpha.graders.run(grader=CHECK, model_sample="4", item={"answer": "4"})
    assert found.reward == 1.0 and found.sub_rewards == {} and found.metadata.scores == {"same": 1.0}
    assert (found.metadata.name, found.metadata.type, found.metadata.token_usage) == ("same", "string_check", None)
    assert found.metadata.execution_time >= 0 and not found.metadata.errors.other_error
    told = await control.sdk.fine_tuning.alpha.graders.validate(grader=CHECK)
    assert told.grader is not None and told.grader.model_dump(exclude_unset=True) == CHECK
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.fine_tuning.alpha.graders.validate(grader={**CHECK, "operation": "equals"})
    assert (caught.value.param, caught.value.code) == ("grader.operation", "invalid_grader")


@pytest.mark.skipif(bool(sandbox.refusal()), reason="no sandbox for code")
@pytest.mark.parametrize(
    "source", ["def grade(sample, item)\n    return 1", "import rdkit\ndef grade(sample, item):\n    return 1"]
)
async def test_invalid_python_grader_is_rejected(control: Control, source: str):
    bad: Any = {"type": "python", "name": "p", "source": source}
    both: Any = {"type": "multi", "name": "m", "calculate_output": "p", "graders": {"p": bad}}
    for grader, param in ((bad, "grader.source"), (both, "grader.graders.p.source")):
        with pytest.raises(openai.BadRequestError) as caught:
            await control.sdk.fine_tuning.alpha.graders.validate(grader=grader)
        assert (caught.value.param, caught.value.code) == (param, "invalid_grader")


async def test_python_grader_runs_in_sandbox_or_is_rejected(control: Control, monkeypatch: pytest.MonkeyPatch):
    python: Any = {"type": "python", "name": "n", "source": "def grade(sample, item):\n    return item['n']"}
    if not sandbox.refusal():
        assert (
            await control.sdk.fine_tuning.alpha.graders.run(grader=python, model_sample="", item={"n": 4})
        ).reward == 4
        found = await control.sdk.fine_tuning.alpha.graders.run(grader=python, model_sample="", item={})
        assert found.metadata.errors.python_grader_runtime_error
        assert found.metadata.errors.python_grader_runtime_error_details == "KeyError: 'n' (line 2)"
    monkeypatch.setattr(sandbox, "missing", lambda: "the kernel offers no Landlock")
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.fine_tuning.alpha.graders.validate(grader=python)
    assert caught.value.code == "python_graders_unavailable" and "no Landlock" in caught.value.message


async def test_model_grader_is_asked_with_the_callers_key(control: Control):
    key_id = control.as_key("carol")
    sent = answers(control, json.dumps({"reason": "close", "result": 0.75}))
    found = await control.sdk.fine_tuning.alpha.graders.run(grader=JUDGE, model_sample="4", item={"answer": "2+2"})
    assert found.reward == 0.75 and found.metadata.token_usage == 10
    assert found.metadata.sampled_model_name == "starter"
    assert found.api_model_grader_token_usage_per_model == {"starter": {"total_tokens": 10}}
    assert sent[0]["messages"] == [{"role": "user", "content": "2+2: 4"}] and "structured_outputs" in sent[0]
    assert list(control.engines.models) == [] and control.engines.asked_by == [key_id]
