"""Distillation jobs: valid teachers, and the teacher's log-probabilities of a job's answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.grading.judging import CannotGoOn, Grading, Sampled
from appliance.store import jobs, keys, models
from tests.integration.controller.test_jobs import prompts
from tests.simulator.control_plane import judging_of
from tests.train_support.tiny import tokenizer
from tests.unit.controller.conftest import ADMIN, Control, insert_model
from train.rollouts.samples import Prompt, Verdict

pytestmark = pytest.mark.usefixtures("checked_here")


def with_tokenizer(control: Control, folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    at = folder / name
    tokenizer().save_pretrained(at)
    made = json.loads((at / "tokenizer.json").read_text())
    change(made)
    (at / "tokenizer.json").write_text(json.dumps(made))
    models.update_version(control.db, name, "v1", disk_path=str(at))


def swapped(made: dict[str, Any]) -> None:
    tokens = made["model"]["vocab"]
    first, second = (next(text for text, number in tokens.items() if number == one) for one in (100, 101))
    tokens[first], tokens[second] = 101, 100


@pytest.fixture
def taught(control: Control, tmp_path: Path) -> Control:
    """`starter` and `teacher` have equal tokens in different files; `stranger` has other tokens."""
    for name in ("teacher", "stranger", "embedder"):
        insert_model(control.db, name, task="embed" if name == "embedder" else "generate")
    insert_model(control.db, "anns", kind="fine-tuned", owner="ann")
    with_tokenizer(control, tmp_path, "starter", lambda made: None)
    with_tokenizer(control, tmp_path, "teacher", lambda made: made.update(version="1.0 as another made it"))
    with_tokenizer(control, tmp_path, "stranger", swapped)
    return control


def method(teacher: Any = "teacher", **hyperparameters: Any) -> Any:
    block = {"hyperparameters": {"max_completion_tokens": 16, **hyperparameters}}
    return {"type": "distillation", "distillation": block if teacher is None else {"teacher": teacher, **block}}


async def asked(control: Control, chosen: Any = None, **more: Any) -> httpx.Response:
    """Create a job without the SDK, which would reject a method that OpenAI lacks."""
    file_id = more.pop("training_file", None) or await control.upload(prompts())
    body = {"model": "starter", "training_file": file_id, "method": chosen or method(), **more}
    answer = await control.http.post("/v1/fine_tuning/jobs", json=body)
    await control.settle()
    return answer


async def made(control: Control, chosen: Any = None, **more: Any) -> str:
    answer = await asked(control, chosen, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


async def test_distillation_job_is_validated_and_shows_teacher(taught: Control):
    job_id = await made(taught, validation_file=await taught.upload(prompts(3)))
    row = jobs.get(taught.db, job_id)
    assert row.phase == "queued" and row.resolved and row.resolved["options"]["group"] == 4, row.reason
    shown = (await taught.http.get(f"/v1/fine_tuning/jobs/{job_id}")).json()["method"]["distillation"]
    assert shown["teacher"] == "teacher" and shown["hyperparameters"]["samples"] == 4
    pinned = await made(taught, method("teacher@v1"))
    assert jobs.get(taught.db, pinned).phase == "queued"


@pytest.mark.parametrize(
    ("teacher", "fields", "param"),
    [
        (None, {}, "teacher"),
        (["teacher"], {}, "teacher"),
        ("nobody", {}, "teacher"),
        ("teacher@v9", {}, "teacher"),
        ("anns", {}, "teacher"),
        ("embedder", {}, "teacher"),
        ("teacher", {"max_length": 2048}, "teacher"),
        ("teacher", {"samples": 65}, "hyperparameters.samples"),
    ],
)
async def test_distillation_job_rejects_unsuitable_teacher(
    taught: Control, teacher: Any, fields: dict[str, Any], param: str
):
    models.update(taught.db, "teacher", max_model_len=1024)
    refused = await asked(taught, method(teacher, **fields))
    assert refused.status_code in (400, 404) and refused.json()["error"]["param"] == f"method.distillation.{param}"
    assert jobs.list_unfinished(taught.db) == []


async def test_job_list_page_is_limited_in_bytes(taught: Control, monkeypatch: pytest.MonkeyPatch):
    newest = [await made(taught), await made(taught)][1]
    monkeypatch.setattr("appliance.controller.openai.job_routes.PAGE_BYTES", 10)
    listed = (await taught.http.get("/v1/fine_tuning/jobs")).json()
    assert ([job["id"] for job in listed["data"]], listed["has_more"]) == ([newest], True)


# --- the teacher's answers


async def scored(body: dict[str, Any]) -> EngineAnswer:
    """An answer like vLLM's: null for the first token, then -token / 10 for each."""
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("teacher", 1, 0)
    places = [{str(one): {"logprob": -one / 10, "rank": 1, "decoded_token": "x"}} for one in body["prompt"]]
    used = {"prompt_tokens": len(places), "completion_tokens": 1, "total_tokens": len(places) + 1}
    return EngineAnswer(200, {"choices": [{"prompt_logprobs": [None, *places[1:]]}], "usage": used})


async def teach(control: Control, job_id: str, *answers: list[int], judges: Grading | None = None) -> Verdict:
    samples, row = [Sampled(ids, [], "") for ids in answers], jobs.get(control.db, job_id)
    return await (judges or judging_of(control.context)).verdict(row, Prompt([7, 8], {}, 0), samples)


async def test_teacher_requests_are_charged_to_key_of_job(taught: Control):
    key_id = taught.as_key("ann", owner="ann")
    job_id = await made(taught)
    taught.engines.rule = scored
    assert await teach(taught, job_id, [3, 4], [2]) == {"log_probs": [[-0.3, -0.4], [-0.2]], "errors": ["", ""]}
    assert taught.engines.asked_by == [key_id] * 2
    keys.revoke(taught.db, key_id)
    with pytest.raises(CannotGoOn, match="revoked"):
        await teach(taught, job_id, [3])


async def test_teacher_or_judge_cannot_be_deleted_while_job_runs(taught: Control):
    taught.as_key("ann")
    judge = {"type": "score_model", "name": "j", "model": "teacher@v1", "input": [{"role": "user", "content": "x"}]}
    several = {"type": "multi", "name": "m", "calculate_output": "j", "graders": {"j": judge}}
    learnt = {"type": "reinforcement", "reinforcement": {"grader": several}}
    for chosen in (method(), method("teacher@v1"), learnt):
        job_id = await made(taught, chosen)
        (await taught.http.post(f"/v1/fine_tuning/jobs/{job_id}/pause")).raise_for_status()
        refused = await taught.http.delete("/v1/models/teacher", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use"), refused.text
        assert job_id in refused.json()["error"]["message"]
        assert (await taught.http.delete("/v1/models/stranger", headers=ADMIN)).status_code in (200, 404), "it is not"
        (await taught.http.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")).raise_for_status()
    assert (await taught.http.delete("/v1/models/teacher", headers=ADMIN)).status_code == 200
