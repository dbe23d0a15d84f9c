"""Gates from the job's request to the version that answers: through the API, with evaluations that are really run."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from appliance.controller.evals import new_run
from appliance.controller.gates import terms, verdict
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.ports import EngineAnswer
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.events import JobEvents
from appliance.store.objects import evals, gates, jobs, models
from appliance.store.records import audit, canaries, deployments, keys
from appliance.store.rows import CanaryRow, GateRow
from tests.unit.controller.conftest import ADMIN, Control
from tests.unit.controller.test_evals import CHECK
from tests.unit.controller.test_stable_names import active, published, run

SCHEMA: Any = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
ITEMS = 12


@pytest.fixture
def events(control: Control) -> JobEvents:
    return JobEvents(control.db, control.context.files_dir, "local")


class Answers:
    """How many of the items each name that is asked gets right; 8 where nothing is said."""

    def __init__(self, control: Control):
        self.right: dict[str, int] = {}
        self.asked: list[str] = []
        control.context.sampling_engines.rule = self._rule  # type: ignore[attr-defined]

    async def _rule(self, body: dict[str, Any]) -> EngineAnswer:
        self.asked.append(body["model"])
        place = int(body["messages"][0]["content"])
        good = next((right for part, right in self.right.items() if part in body["model"]), 8)
        text = "yes" if place < good else "no"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return EngineAnswer(200, {"choices": [choice], "usage": {}}, "v1")


@pytest.fixture
def answers(control: Control) -> Answers:
    control.as_key("carol")
    return Answers(control)


async def suite(control: Control, **rules: Any) -> dict[str, Any]:
    """An evaluation, and what a gate says of it."""
    made = await control.sdk.evals.create(data_source_config=SCHEMA, testing_criteria=[CHECK], name="yes")
    lines = [{"item": {"answer": "yes", "messages": [{"role": "user", "content": str(n)}]}} for n in range(ITEMS)]
    file_id = await control.upload("".join(json.dumps(one) + "\n" for one in lines).encode(), "s.jsonl", "user_data")
    source = {
        "type": "completions",
        "source": {"type": "file_id", "id": file_id},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
        "sampling_params": {"temperature": 0},
    }
    return {"eval_id": made.id, "data_source": source, **rules}


async def gated(control: Control, *suites: dict[str, Any], **terms: Any) -> tuple[str, str]:
    """A queued job that makes a version of `fraud`, and its gate."""
    job_id = await control.job(extra_body={"publish_as": "fraud", "gate": {"suites": list(suites), **terms}})
    row = gates.of_job(control.db, job_id)
    assert row is not None
    return job_id, row.id


async def test_who_looks_at_a_job_reads_no_terms_of_its_gate(control: Control, answers: Answers):
    """A page of a pipeline's two hundred runs parsed half a MiB of each, and so did each look at a run, every second:
    an owner's hundred pipelines took the controller's loop 0.3 s of each."""
    job_id, gate_id = await gated(control, await suite(control))
    row = gates.of_job(control.db, job_id)
    assert row is not None and (row.id, row.state, row.terms) == (gate_id, "waiting", {})
    assert [(one.id, one.terms) for one in gates.of_model(control.db, "fraud")] == [(gate_id, {})]


async def looked(control: Control) -> None:
    """One look at all gates, and what it does."""
    await control.app.state.gates.look()
    await control.app.state.gates.tasks.idle()


async def seen_through(control: Control, gate_id: str, rounds: int = 12) -> GateRow:
    """Looks, and evaluations in between, until it has ended or waits for something else."""
    for _ in range(rounds):
        await looked(control)
        await control.app.state.evaluations.tasks.idle()
    row = gates.find(control.db, gate_id)
    assert row is not None
    return row


async def test_what_is_judged_is_read_beside_the_loop_and_one_gate_after_the_other(
    control: Control, events: JobEvents, answers: Answers, monkeypatch: pytest.MonkeyPatch
):
    """Of all gates that had come so far, a page of items each in every round of the loop."""
    on, at_once, most = set[int](), 0, 0
    judged_after = evals.judged_after

    def read(*asked: Any) -> Any:
        nonlocal at_once, most
        on.add(threading.get_ident())
        at_once += 1
        most = max(most, at_once)
        found = judged_after(*asked)
        at_once -= 1
        return found

    monkeypatch.setattr(evals, "judged_after", read)
    terms = await suite(control, pass_rate_at_least=0.5, better_by=0.0)
    gate_ids = []
    for _ in range(2):
        job_id, gate_id = await gated(control, terms)
        await looked(control)
        run(control, events, job_id)
        gate_ids.append(gate_id)
    for gate_id in gate_ids:
        assert (await seen_through(control, gate_id)).verdict is not None
    assert on and threading.get_ident() not in on and most == 1


async def test_the_first_version_answers_once_it_reaches_its_thresholds(
    control: Control, events: JobEvents, answers: Answers
):
    job_id, gate_id = await gated(control, await suite(control, pass_rate_at_least=0.5, better_by=0.0))
    await looked(control)
    assert (gates.find(control.db, gate_id) or GateRow("", 0, "", "")).state == "waiting"
    version = run(control, events, job_id)
    assert active(control) is None, "nothing answers before the gate has said so"
    assert "decides" in (await control.messages(job_id))[-2]
    row = await seen_through(control, gate_id)
    assert (row.state, row.verdict, row.activated, row.before) == ("ended", "passed", 1, "")
    assert active(control) == version and deployments.find(control.db, "fraud") is not None
    assert set(answers.asked) == {f"fraud:ckpt-{version}"}, "by the name that its engine has"
    shown = (await control.http.get(f"/v1/gates/{gate_id}")).json()
    (told,) = shown["suites"]
    assert told["candidate"]["pass_rate"] == pytest.approx(8 / 12) and told["runs"].keys() == {"candidate"}
    assert f"{gate_id} of {version}: passed" in (await control.messages(job_id))[-1]
    assert "gate.decide" in [one.action for one in audit.page(control.db, after=None, limit=3).data]


async def test_a_version_that_is_not_better_is_left_and_the_one_before_goes_on(
    control: Control, events: JobEvents, answers: Answers
):
    better = await suite(control, better_by=0.0)
    first, gate = await gated(control, better)
    v1 = run(control, events, first)
    assert (await seen_through(control, gate)).activated
    asked = len(answers.asked)
    second, gate = await gated(control, better)
    v2 = run(control, events, second)
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated, row.version, row.before) == ("refused", 0, v2, v1) and active(control) == v1
    assert "not shown to be better" in row.reason
    assert len(answers.asked) == asked + ITEMS, "how good the version before is, its own gate has found out"
    assert row.runs["0"]["incumbent"] == (gates.of_version(control.db, "fraud", v1) or row).runs["0"]["candidate"]
    third, gate = await gated(control, better)
    answers.right[third.removeprefix("ftjob-")[:8]] = ITEMS + 1
    v3 = run(control, events, third)
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated) == ("refused", 0), "4 of 12 more show it at 6 %"
    fourth, gate = await gated(control, better, level=0.07)
    answers.right[fourth.removeprefix("ftjob-")[:8]] = ITEMS + 1
    v4 = run(control, events, fourth)
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated, row.before) == ("passed", 1, v1) and active(control) == v4
    assert control.scheduler.converged == ["fraud"]
    assert row.told[0]["compared"]["gained"] == 4 and row.told[0]["rules"][0]["p"] == pytest.approx(1 / 16)
    held = {one.version for one in models.list_versions(control.db, "fraud") if one.held_back}
    assert held == {v2, v3}, "a roll back passes over what never answered"
    shown = (await control.http.get("/admin/v1/models/fraud", headers=ADMIN)).json()["gates"]
    assert [(one["version"], one["verdict"]) for one in shown] == [
        (v4, "passed"),
        (v3, "refused"),
        (v2, "refused"),
        (v1, "passed"),
    ]
    shown = (await control.http.get(f"/admin/v1/jobs/{second}", headers=ADMIN)).json()["gate"]
    assert shown["verdict"] == "refused" and shown["version"] == v2
    listed = (await control.http.get("/v1/gates?model=fraud&limit=2")).json()
    assert [one["verdict"] for one in listed["data"]] == ["passed", "refused"] and listed["has_more"]


async def test_a_version_that_passes_may_be_a_canary_first(control: Control, events: JobEvents, answers: Answers):
    asked = await suite(control, not_worse_by=0.1)
    first, gate = await gated(control, asked)
    v1 = run(control, events, first)
    await seen_through(control, gate)
    canary = {"share": 0.2, "watch_s": 60.0, "min_requests": 0}
    second, gate = await gated(control, asked, then="canary", canary=canary)
    v2 = run(control, events, second)
    row = await seen_through(control, gate)
    running = canaries.find_running(control.db, "fraud")
    assert row.state == "canary" and running is not None and (running.version, running.auto) == (v2, 1)
    answer = await control.http.post(f"/v1/gates/{gate}/cancel")
    assert answer.status_code == 409 and "promote it or roll it back" in answer.json()["error"]["message"]
    await control.app.state.canaries.look(running.created_s + 61)
    await control.app.state.canaries.tasks.idle()
    row = await seen_through(control, gate)
    assert (row.state, row.activated) == ("ended", 1) and "promoted" in row.reason and active(control) == v2
    third, gate = await gated(control, asked, then="canary")
    run(control, events, third)
    await seen_through(control, gate)
    await control.http.delete("/admin/v1/models/fraud/canary", headers=ADMIN)
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated) == ("passed", 0) and "taken back: asked for" in row.reason
    assert active(control) == v2 != v1


async def test_a_restart_in_the_midst_of_it_goes_on(
    control: Control, events: JobEvents, answers: Answers, monkeypatch: pytest.MonkeyPatch
):
    """At each step a controller that knows only the store: nothing is asked twice, and what answers is found to."""
    asked = await suite(control, pass_rate_at_least=0.5)
    first, gate = await gated(control, asked)
    v1 = run(control, events, first)
    evaluations, is_at_it = control.app.state.evaluations, asyncio.Event()

    async def prepares(*_: Any) -> None:
        """For ever: on a busy machine it had asked some by the time the controller ended."""
        is_at_it.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as held:
        held.setattr(evaluations, "_prepare", prepares)
        await looked(control)
        await looked(control)
        await asyncio.wait_for(is_at_it.wait(), 60)
        (run_id,) = evals.unfinished_ids(control.db)
        evaluations.let_go(run_id)
        await evaluations.tasks.idle()
    evaluations.start()
    row = await seen_through(control, gate)
    assert row.activated and len(answers.asked) == ITEMS and active(control) == v1
    second, gate = await gated(control, asked)
    v2 = run(control, events, second)
    for _ in range(2):
        await looked(control)
    await control.app.state.evaluations.tasks.idle()
    # It had begun to answer when the controller ended, before its gate said so.
    gates.update(control.db, gate, state="passed", verdict="passed")
    models.activate(control.db, "fraud", v2)
    row = await seen_through(control, gate, rounds=1)
    assert (row.state, row.activated) == ("ended", 1)


async def test_another_version_that_answers_meanwhile_is_compared_with(
    control: Control, events: JobEvents, answers: Answers
):
    asked = await suite(control, not_worse_by=0.0)
    for _ in range(2):
        job_id = await control.job(extra_body={"publish_as": "fraud"})
        run(control, events, job_id)
    v0, v1 = [one.version for one in models.list_versions(control.db, "fraud")]
    job_id, gate = await gated(control, asked)
    v2 = run(control, events, job_id)
    for _ in range(2):
        await looked(control)
    before = (gates.find(control.db, gate) or GateRow("", 0, "", "")).runs["0"]
    await control.http.post("/admin/v1/models/fraud/rollback", headers=ADMIN, json={"version": v0})
    row = await seen_through(control, gate)
    assert (row.before, row.activated) == (v0, 1) and active(control) == v2
    assert row.runs["0"]["candidate"] == before["candidate"] and row.runs["0"]["incumbent"] != before["incumbent"]
    assert (evals.find_run(control.db, before["incumbent"]) or row).status in ("canceled", "completed")  # type: ignore[union-attr]
    # Made to answer by hand before it was judged.
    job_id, gate = await gated(control, asked)
    v3 = run(control, events, job_id)
    await looked(control)
    await control.http.post("/admin/v1/models/fraud/rollback", headers=ADMIN, json={"version": v3})
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated) == ("undecided", 1) and "before it was judged" in row.reason and v1


async def test_what_ends_without_a_verdict_says_why_and_leaves_what_answers(
    control: Control, events: JobEvents, answers: Answers
):
    asked = await suite(control, pass_rate_at_least=0.5)
    job_id, gate = await gated(control, asked)
    events.failed(job_id, "training_failed", "x")
    assert "failed, so there is no version" in (await seen_through(control, gate)).reason
    job_id, gate = await gated(control, asked)
    v1 = run(control, events, job_id)
    for _ in range(2):
        await looked(control)
    await control.http.post(f"/v1/gates/{gate}/cancel")
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated) == ("cancelled", 0) and evals.unfinished_ids(control.db) == []
    assert audit.page(control.db, after=None, limit=1).data[0].action == "gate.cancel"
    job_id, gate = await gated(control, asked)
    run(control, events, job_id)
    await control.sdk.evals.delete(asked["eval_id"])
    row = await seen_through(control, gate)
    assert row.verdict == "undecided" and "was deleted" in row.reason and active(control) is None and v1
    other = await suite(control, pass_rate_at_least=0.5)
    job_id, gate = await gated(control, other, then="hold")
    run(control, events, job_id)
    row = await seen_through(control, gate)
    assert (row.verdict, row.activated) == ("passed", 0) and active(control) is None
    job_id, gate = await gated(control, other)
    run(control, events, job_id)
    await control.sdk.files.delete(other["data_source"]["source"]["id"])
    row = await seen_through(control, gate)
    assert row.verdict == "undecided" and "deleted" in row.reason


async def test_epochs_do_not_answer_before_the_gate(control: Control, events: JobEvents, answers: Answers):
    job_id, _ = await gated(control, await suite(control))
    events.started(job_id, ["n0/0"], resumed=False)
    events.ingest(job_id, published(control, job_id, 10))
    assert active(control) is None


async def test_what_cannot_be_a_gate_is_refused_in_words(control: Control, events: JobEvents, answers: Answers):
    good = await suite(control)
    run_first = {name: value for name, value in good.items() if name != "data_source"}
    content = {"type": "file_content", "content": [{"item": {}}]}
    refused = [
        ({"gate": {"suites": [good]}}, "publish_as"),
        ({"publish_as": "fraud", "gate": {"suites": []}}, "suites"),
        ({"publish_as": "fraud", "gate": {"suites": [{**good, "eval_id": "eval_x"}]}}, "No eval found"),
        ({"publish_as": "fraud", "gate": {"suites": [{**good, "criterion": "x"}]}}, "not a grader"),
        ({"publish_as": "fraud", "gate": {"suites": [{**good, "better_by": 2}]}}, "share"),
        ({"publish_as": "fraud", "gate": {"suites": [run_first]}}, "no run yet"),
        ({"publish_as": "fraud", "gate": {"suites": [good], "canary": {}}}, "canary"),
        (
            {
                "publish_as": "fraud",
                "gate": {"suites": [{**good, "data_source": {**good["data_source"], "model": "starter"}}]},
            },
            "names a model",
        ),
        (
            {
                "publish_as": "fraud",
                "gate": {"suites": [{**good, "data_source": {**good["data_source"], "source": content}}]},
            },
            "as a file",
        ),
        ({"publish_as": "fraud", "gate": {"suites": [{**good, "data_source": {"type": "jsonl"}}]}}, "data_source"),
    ]
    for fields, says in refused:
        with pytest.raises(openai.APIStatusError) as caught:
            await control.job(extra_body=fields)
        assert says in str(caught.value) and caught.value.status_code in (400, 404, 422), (fields, str(caught.value))
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []
    control.as_key("tuner", owner="carol", scopes=["fine_tuning"])
    with pytest.raises(openai.PermissionDeniedError, match="inference"):
        await control.job(extra_body={"publish_as": "fraud", "gate": {"suites": [good]}})


async def test_data_on_which_no_version_could_be_judged_is_refused_before_the_training(
    control: Control, events: JobEvents, answers: Answers
):
    models.update(control.db, "starter", max_model_len=512)
    good = await suite(control)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nope"}}}
    template = {"type": "template", "template": [{"role": "user", "content": "{{ item.nothing }}"}]}
    refused = [
        ({"sampling_params": {"response_format": form}}, "no JSON schema", "sampling_params.response_format"),
        ({"sampling_params": {"max_completion_tokens": 513}}, "<= 512, the context", "sampling_params.max_completion"),
        ({"input_messages": template}, "names 'item.nothing', which no item", "input_messages.template.0.content"),
    ]
    pipeline = {"name": "p", "data": {"uploads": "*.jsonl"}, "train": {"model": "starter", "publish_as": "fraud"}}
    for fields, says, param in refused:
        data_source = {**good["data_source"], **fields}
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            await gated(control, {**good, "data_source": data_source})
        assert (caught.value.param or "").startswith(f"gate.suites.0.data_source.{param}")
        evaluate = {"eval": good["eval_id"], "data_source": data_source}
        answer = await control.http.post("/v1/pipelines", json={"spec": {**pipeline, "evaluate": evaluate}})
        assert answer.status_code == 400 and caught.value.param.startswith(answer.json()["error"]["param"]), answer.text
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []


async def test_the_data_of_the_newest_run_is_a_suites_unless_another_is_given(
    control: Control, events: JobEvents, answers: Answers
):
    good = await suite(control)
    source = {**good["data_source"], "model": "starter"}
    await control.sdk.evals.runs.create(good["eval_id"], data_source=source)
    _, gate = await gated(control, {"eval_id": good["eval_id"]})
    (kept,) = (gates.find(control.db, gate) or GateRow("", 0, "", "")).terms["suites"]
    assert kept["data_source"] == good["data_source"]


async def test_a_gate_is_its_owners(control: Control, answers: Answers):
    _, gate = await gated(control, await suite(control))
    control.as_key("dave")
    assert (await control.http.get(f"/v1/gates/{gate}")).status_code == 404
    assert (await control.http.post(f"/v1/gates/{gate}/cancel")).status_code == 404
    assert (await control.http.get("/v1/gates")).json()["data"] == []
    assert (await control.http.get(f"/v1/gates/{gate}", headers=ADMIN)).json()["owner"] == "carol"


async def test_a_revoked_key_judges_nothing(control: Control, events: JobEvents, answers: Answers):
    job_id, gate = await gated(control, await suite(control))
    row = jobs.get(control.db, job_id)
    run(control, events, job_id)
    keys.revoke(control.db, row.key_id or "")
    found = await seen_through(control, gate)
    assert found.verdict == "undecided" and "revoked" in found.reason and answers.asked == []


def lengths_parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the length of each JSON text that is read from now on."""
    parsed: list[int] = []
    loads = json.loads

    def counting(text: str) -> Any:
        parsed.append(len(text))
        return loads(text)

    monkeypatch.setattr(json, "loads", counting)
    return parsed


async def test_a_look_reads_no_more_of_a_gate_than_it_needs(
    control: Control, events: JobEvents, answers: Answers, monkeypatch: pytest.MonkeyPatch
):
    """Two hundred gates with terms of megabytes that waited for their jobs held the controller's loop every second."""
    asked = await suite(control)
    asked["data_source"]["input_messages"] = {
        "type": "template",
        "template": [{"role": "user", "content": "0" * 5000}],
    }
    job_id, gate_id = await gated(control, asked, {**asked}, then="hold")
    parsed = lengths_parsed(monkeypatch)
    await looked(control)
    assert max(parsed) < 1000, "while it waits for its job"
    run(control, events, job_id)
    await looked(control)
    quotas = control.context.quotas
    monkeypatch.setattr(quotas, "check_eval_run", no_room)
    gates.update(control.db, gate_id, runs={}, state="evaluating")
    parsed.clear()
    await looked(control)
    assert max(parsed) < 1000, "while there is no place for its runs"
    assert (gates.outline(control.db, gate_id) or GateRow("", 0, "", "")).reason == "no room"


async def test_nor_of_one_whose_canary_runs_or_waits_for_another(
    control: Control, events: JobEvents, answers: Answers, monkeypatch: pytest.MonkeyPatch
):
    """For days, if its owner likes: a hundred with terms of half a MiB took the loop a third of each second."""
    asked = await suite(control)
    first, gate_id = await gated(control, asked)
    v1 = run(control, events, first)
    await seen_through(control, gate_id)
    asked["data_source"]["input_messages"] = {"type": "template", "template": [{"role": "user", "content": "0" * 5000}]}
    second, gate_id = await gated(control, asked, then="canary", canary={"watch_s": 86400.0})
    v2 = run(control, events, second)
    canaries.put(control.db, CanaryRow("fraud", "another", v1, 0.1, 1.0))
    gates.update(control.db, gate_id, state="passed", verdict="passed", version=v2, before=v1, reason="better")
    parsed = lengths_parsed(monkeypatch)
    await looked(control)
    assert (gates.outline(control.db, gate_id) or GateRow("", 0, "", "")).state == "passed"
    canaries.end(control.db, "fraud", "rolled_back", "asked for", now_s=2.0, compared={})
    for _ in range(2):
        await looked(control)
    running = canaries.find_running(control.db, "fraud")
    assert running is not None and (running.version, running.watch_s) == (v2, 86400.0)
    assert (gates.outline(control.db, gate_id) or GateRow("", 0, "", "")).state == "canary" and max(parsed) < 1000


def no_room(caller: Principal) -> None:
    raise ApiError(429, "no room")


async def test_what_a_gate_says_and_the_evaluations_that_it_names_are_bounded_together(
    control: Control, monkeypatch: pytest.MonkeyPatch
):
    """Each of sixteen is read on the controller's loop when the job is made."""
    control.as_key("carol")
    asked = await suite(control)
    for name, says in (("MAX_EVALS_BYTES", "evals of"), ("MAX_TERMS_BYTES", "bytes long")):
        with monkeypatch.context() as smaller:
            smaller.setattr(terms, name, 100)
            with pytest.raises(openai.BadRequestError, match=says):
                await gated(control, asked)
    monkeypatch.setattr(terms, "MAX_EVALS_BYTES", 100)
    monkeypatch.setattr(terms, "evals", SimpleNamespace(bytes_of=evals.bytes_of))  # none is read before
    with pytest.raises(openai.BadRequestError, match="evals of"):
        await gated(control, asked)


async def test_the_size_of_anothers_evaluation_is_in_no_bound(control: Control, monkeypatch: pytest.MonkeyPatch):
    """Named sixteen times, the bytes of it and that it is there were in the error."""
    control.as_key("carol")
    asked = await suite(control)
    monkeypatch.setattr(terms, "MAX_EVALS_BYTES", 100)
    control.as_key("dave")
    with pytest.raises(openai.NotFoundError, match=asked["eval_id"]):
        await gated(control, asked)


async def test_the_newest_run_is_found_by_an_index(control: Control):
    """It read the data sources of all runs, ten thousand of an evaluation at a quarter of a megabyte."""
    sql = "EXPLAIN QUERY PLAN SELECT * FROM eval_runs INDEXED BY eval_runs_sampled WHERE eval_id = 'x' AND data_source"
    where = " ->> '$.type' IN ('completions', 'responses') AND data_source ->> '$.source.type' = 'file_id'"
    (plan,) = [row["detail"] for row in control.db.execute(f"{sql}{where} ORDER BY seq DESC LIMIT 1")]
    assert plan == "SEARCH eval_runs USING INDEX eval_runs_sampled (eval_id=?)"
    assert evals.newest_sampled(control.db, "x", viewer=None) is None


async def test_one_gate_is_reckoned_at_a_time(
    control: Control, events: JobEvents, answers: Answers, monkeypatch: pytest.MonkeyPatch
):
    """Each takes a thread for seconds, and of many threads the loop hardly has a turn."""
    rows = []
    for name in ("fraud", "spam"):
        gate = {"suites": [await suite(control, pass_rate_at_least=0.5)]}
        job_id = await control.job(extra_body={"publish_as": name, "gate": gate})
        run(control, events, job_id)
        rows.append(gates.of_job(control.db, job_id))
    at_once, most = 0, 0
    both = threading.Event()
    decide = verdict.decide

    def slow(suites: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 2:
            both.set()
        both.wait(0.2)  # for the other one, which does not come
        at_once -= 1
        return decide(suites)

    monkeypatch.setattr(verdict, "decide", slow)
    for row in rows:
        assert row is not None and (await seen_through(control, row.id)).verdict == "passed"
    assert most == 1


async def test_owners_take_turns_when_gates_are_reckoned(control: Control, monkeypatch: pytest.MonkeyPatch):
    """A gate of many rewards takes half a minute, and one owner may have two hundred."""
    order, may_go = list[str](), threading.Event()

    def reckoned(suites: Any) -> Any:
        order.append(suites[0].name)
        may_go.wait(60)

    monkeypatch.setattr(verdict, "decide", reckoned)
    runner = control.app.state.gates
    monkeypatch.setattr(runner, "_suites", lambda gate_id: [SimpleNamespace(name=gate_id)])
    owners = ("ann", "ann", "ann", "bob")
    deciding = [asyncio.create_task(runner._decide(f"{one}{place}", one)) for place, one in enumerate(owners)]
    while not order:
        await asyncio.sleep(0.001)
    may_go.set()
    await asyncio.gather(*deciding)
    assert order == ["ann0", "bob3", "ann1", "ann2"]


async def test_what_sixteen_suites_ask_is_looked_at_once(control: Control, monkeypatch: pytest.MonkeyPatch):
    """Sixteen suites with an evaluation of seven hundred judges asked eleven thousand times whether the key may ask a
    model, and held the controller's loop for 0.6 s; sixteen with long expressions in their tools did so, too."""
    control.as_key("carol")
    judge = {"type": "score_model", "model": "starter", "input": [{"role": "user", "content": "?"}]}
    parts = [{**judge, "name": f"j{place}"} for place in range(8)]
    criteria: Any = [
        {"type": "multi", "name": name, "calculate_output": "j0", "graders": {one["name"]: one for one in parts}}
        for name in ("a", "b")
    ]
    made = await control.http.post("/v1/evals", json={"data_source_config": SCHEMA, "testing_criteria": criteria})
    asked = {**await suite(control, pass_rate_at_least=0.5), "eval_id": made.json()["id"]}
    seen, may_ask, fields = list[str](), new_run.check_may_ask, list[Any]()
    monkeypatch.setattr(new_run, "check_may_ask", lambda *of: (seen.append(of[2]), may_ask(*of)))
    monkeypatch.setattr(new_run, "check_asked", lambda asked, param: fields.append(asked))
    await gated(control, *[asked] * 16)
    assert seen == ["starter"] and len(fields) == 1
    monkeypatch.setattr(terms, "MAX_SAMPLING_BYTES", 40)
    source = asked["data_source"]
    others = [{**asked, "data_source": {**source, "sampling_params": {"seed": n}}} for n in range(100, 110)]
    with pytest.raises(openai.BadRequestError, match="sampling parameters"):
        await gated(control, *others)
    assert len(fields) == 4, "before more of them are looked at"
