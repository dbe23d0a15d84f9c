"""Gates decide by real evaluation runs whether the version that a job made is activated."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.gates import Gates, not_worse, threshold
from appliance.controller.jobs.events import JobEvents, fail
from appliance.store import jobs, models
from appliance.store.rows import AUDIT, DEPLOYMENTS
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_evals import CHECK
from tests.unit.controller.test_stable_names import active, run

SCHEMA: Any = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
ITEMS = 12


class Answers:
    """Fake engines. right: part of a model's name -> correct answers of the model out of 12; default 8."""

    def __init__(self, control: Control):
        self.right: dict[str, int] = {}
        self.asked: list[str] = []
        control.engines.rule = self._rule  # type: ignore[attr-defined]

    async def _rule(self, body: dict[str, Any]) -> EngineAnswer:
        self.asked.append(body["model"])
        place = int(body["messages"][0]["content"])
        good = next((right for part, right in self.right.items() if part in body["model"]), 8)
        text = "yes" if place < good else "no"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return EngineAnswer(200, {"choices": [choice], "usage": {}})


@pytest.fixture
def answers(control: Control) -> Answers:
    control.as_key("carol")
    return Answers(control)


async def evaluation(control: Control, *, has_run: bool = True) -> str:
    made = await control.sdk.evals.create(data_source_config=SCHEMA, testing_criteria=[CHECK], name="yes")
    lines = [{"item": {"answer": "yes", "messages": [{"role": "user", "content": str(n)}]}} for n in range(ITEMS)]
    file_id = await control.upload("".join(json.dumps(one) + "\n" for one in lines).encode(), "s.jsonl", "user_data")
    source: Any = {
        "type": "completions",
        "model": "starter",
        "source": {"type": "file_id", "id": file_id},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
    }
    if has_run:
        await control.sdk.evals.runs.create(made.id, data_source=source)
        await control.context.tasks.idle("eval_runs")
    return made.id


async def gated(control: Control, eval_id: str, **fields: Any) -> str:
    """Create a job that makes a version of `fraud` and has a gate on this evaluation; return its id."""
    return await control.job(extra_body={"publish_as": "fraud", "gate": {"eval_id": eval_id, **fields}})


async def looked(control: Control, rounds: int = 3) -> None:
    """Look at all gates `rounds` times; after each look, wait until all evaluation runs have ended."""
    for _ in range(rounds):
        await Gates(control.context).look()
        await control.context.tasks.idle("eval_runs")


def gate(control: Control, job_id: str) -> dict[str, Any]:
    return jobs.get(control.db, job_id).gate or {}


async def test_gate_with_threshold_decides_for_the_first_version(control: Control, events: JobEvents, answers: Answers):
    eval_id = await evaluation(control)
    answers.asked.clear()
    refused = await gated(control, eval_id, pass_rate_at_least=0.75)
    run(control, events, refused)
    await looked(control)
    assert (gate(control, refused)["verdict"], active(control)) == ("refused", None)
    passed = await gated(control, eval_id, pass_rate_at_least=0.5)
    await looked(control)
    assert gate(control, passed)["verdict"] is None, "its job has not ended"
    version = run(control, events, passed)
    assert active(control) is None
    await looked(control)
    assert active(control) == version and DEPLOYMENTS.find(control.db, "fraud") is not None
    assert f"fraud:ckpt-{version}" in answers.asked
    shown = (await control.sdk.fine_tuning.jobs.retrieve(passed)).to_dict()["gate"]
    assert (shown["verdict"], shown["activated"], shown["version"]) == ("passed", True, version)
    assert shown["runs"].keys() == {version}
    (event, *_) = (await control.sdk.fine_tuning.jobs.list_events(passed)).data
    assert event.data["gate"]["verdict"] == "passed"  # type: ignore[index]
    assert "gate.decide" in [one.action for one in AUDIT.page(control.db, after=None, limit=3).data]


async def test_gate_without_threshold_refuses_a_worse_version(control: Control, events: JobEvents, answers: Answers):
    eval_id = await evaluation(control)
    first = await gated(control, eval_id)
    v1 = run(control, events, first)
    await looked(control)
    assert gate(control, first)["activated"] and active(control) == v1, "there was none before"
    worse = await gated(control, eval_id)
    answers.right[worse.removeprefix("ftjob-")[:8]] = 2
    v2 = run(control, events, worse)
    await looked(control)
    assert (gate(control, worse)["verdict"], gate(control, worse)["activated"]) == ("refused", False)
    assert active(control) == v1 and gate(control, worse)["before"] == v1
    assert set(answers.asked[-2 * ITEMS :]) == {f"fraud:ckpt-{v2}", f"fraud@{v1}"}, "by the engines that serve them"
    same = await gated(control, eval_id)
    v3 = run(control, events, same)
    await looked(control)
    assert gate(control, same)["verdict"] == "passed" and active(control) == v3
    assert control.scheduler.converged == ["fraud"]
    assert [one.version for one in models.list_versions(control.db, "fraud") if one.held_back] == [v2]


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_gate_interrupted_after_its_verdict_activates_the_version(
    control: Control, events: JobEvents, answers: Answers, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
):
    eval_id = await evaluation(control)
    before = run(control, events, await control.job(extra_body={"publish_as": "fraud"}))
    job_id = await gated(control, eval_id, pass_rate_at_least=0.5)
    version = run(control, events, job_id)

    async def killed(*_: Any) -> str:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(Gates, "_activate", killed)
        await looked(control)
    assert (gate(control, job_id)["verdict"], active(control)) == ("passed", before)
    if is_deleted:
        models.delete_version(control.db, "fraud", version)
    await looked(control)
    assert gate(control, job_id)["activated"] is not is_deleted and jobs.gated(control.db) == []
    assert active(control) == (before if is_deleted else version)


async def test_undecided_gate_gives_reason_and_keeps_active_version(
    control: Control, events: JobEvents, answers: Answers
):
    evals = [await evaluation(control) for _ in range(3)]
    failed, cancelled, deleted = [await gated(control, one, pass_rate_at_least=0.5) for one in evals]
    fail(control.db, failed, "training_failed", "x")
    for job_id in (cancelled, deleted):
        run(control, events, job_id)
    await control.sdk.evals.delete(evals[2])
    await Gates(control.context).look()
    (run_id,) = gate(control, cancelled)["runs"].values()
    await control.sdk.evals.runs.cancel(run_id, eval_id=gate(control, cancelled)["eval_id"])
    await looked(control)
    for job_id in (failed, cancelled, deleted):
        assert (gate(control, job_id)["verdict"], gate(control, job_id)["activated"]) == ("undecided", False)
    assert active(control) is None and jobs.gated(control.db) == []


async def test_gate_of_other_owner_or_without_scope_is_rejected(control: Control, answers: Answers):
    eval_id, not_run = await evaluation(control), await evaluation(control, has_run=False)
    with pytest.raises(openai.BadRequestError):
        await gated(control, not_run)
    control.as_key("dave", owner="dave")
    with pytest.raises(openai.NotFoundError):
        await gated(control, eval_id)
    control.as_key("tuner", owner="carol", scopes=["fine_tuning"])
    with pytest.raises(openai.PermissionDeniedError):
        await gated(control, eval_id)
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []


def items(*passed: bool | None) -> dict[int, bool | None]:
    return dict(enumerate(passed))


def test_threshold_is_undecided_with_too_few_judged_items():
    assert threshold(items(*[True] * 15, *[False] * 5), 0.75)[0] == "passed"
    assert threshold(items(*[True] * 14, *[False] * 6), 0.75)[0] == "refused"
    assert threshold(items(None, *[True] * 19), 1.0)[0] == "passed"
    assert threshold(items(None, None, *[True] * 18), 0.5)[0] == "undecided"
    assert threshold({}, 0.0)[0] == "undecided"


def test_not_worse_is_mcnemars_test_on_common_items():
    same = [True] * 40
    assert not_worse(items(*same), items(*same))[0] == "passed"
    four, five = (items(*same, *[False] * lost) for lost in (4, 5))
    assert not_worse(four, items(*same, *[True] * 4))[0] == "passed", "p = 1/16"
    assert not_worse(five, items(*same, *[True] * 5))[0] == "refused", "p = 1/32"
    gains = items(*same, *[False] * 5, *[True] * 5)
    assert not_worse(gains, items(*same, *[True] * 5, *[False] * 5))[0] == "passed"
    assert not_worse(items(None, *same), items(False, *same))[0] == "passed"
    assert not_worse(items(*[None] * 5, *same), items(*[True] * 45))[0] == "undecided"
