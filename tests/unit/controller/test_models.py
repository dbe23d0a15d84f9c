"""/v1/models, through the OpenAI SDK."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from appliance.controller.access.model_access import is_model_name, resolve
from appliance.store.objects import jobs, models
from appliance.store.rows import JobJudgeRow, JobRow, VersionRow
from tests.unit.controller.conftest import ADMIN, Control, insert_model

TUNED = "ft:starter:local:maths:AbCd1234"
CHECKPOINT = f"{TUNED}:ckpt-step-10"


def insert_tuned(control: Control) -> None:
    insert_model(control.db, TUNED, kind="fine-tuned", base="starter", versions=("step-10", "step-20"))
    jobs.insert(control.db, JobRow("ftjob-1", "starter", "supervised", "f", 1, TUNED, 1.0, phase="succeeded"))
    models.update_version(control.db, TUNED, "step-10", id="ftckpt_1", checkpoint=CHECKPOINT, job_id="ftjob-1", step=10)


async def test_the_state_of_a_model_and_why_it_does_not_serve_are_said_alike_everywhere(control: Control):
    insert_tuned(control)
    message = "not serving: no memory; next try in 12 s"
    control.scheduler.troubles = [{"model": "starter", "reason": "no memory", "message": message, "lasting": False}]
    control.scheduler.replicas = [{"id": "r1", "model": TUNED, "state": "asleep"}]
    listed = (await control.sdk.models.list()).data
    found = {model.id: (model.model_extra["state"], model.model_extra["state_details"]) for model in listed}
    assert found == {"starter": ("failed", message), TUNED: ("asleep", None), CHECKPOINT: ("cold", None)}
    rows = (await control.http.get("/admin/v1/models", headers=ADMIN)).json()["data"]
    assert {row["name"]: row["message"] for row in rows} == {"starter": message, TUNED: None}
    control.scheduler.replicas.append({"id": "r2", "model": "starter", "state": "open"})
    assert (await control.sdk.models.retrieve("starter")).model_extra["state"] == "serving", "another one failed"


async def test_base_tuned_and_checkpoint_names_are_listed_and_found(control: Control):
    insert_tuned(control)
    insert_model(control.db, "Qwen/Qwen3-0.6B")
    listed = [model.id for model in (await control.sdk.models.list()).data]
    assert listed == ["starter", TUNED, "Qwen/Qwen3-0.6B", CHECKPOINT]
    for name in (*listed, f"{TUNED}@step-10"):
        found = await control.sdk.models.retrieve(name)
        assert (found.id, found.object, found.owned_by) == (name, "model", "org-local")
    plain = await control.http.get("/v1/models/Qwen/Qwen3-0.6B")
    assert plain.status_code == 200 and plain.json()["id"] == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["nothing", "ft:starter:local:x:y", "starter@v9", "@v1", "starter@", "a" * 3000, "é"])
async def test_unknown_names_are_not_found(control: Control, name: str):
    answer = await control.http.get(f"/v1/models/{quote(name, safe='')}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert len(answer.json()["error"]["message"]) < 300


async def test_download_of_a_version_in_no_tier_is_a_conflict(control: Control):
    answer = await control.http.get("/v1/models/starter/archive")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_not_ready")


async def test_deleting_a_tuned_model_takes_rows_then_replicas_then_bytes(control: Control):
    insert_tuned(control)
    deleted = await control.sdk.models.delete(TUNED)
    assert deleted.deleted and deleted.id == TUNED
    assert resolve(control.db, TUNED) is None and resolve(control.db, CHECKPOINT) is None
    assert control.scheduler.withdrawn == [TUNED]
    ((name, rows),) = control.ops.removed
    assert name == TUNED and [row.disk_path for row in rows] == ["/models/step-10", "/models/step-20"]


async def test_deleting_a_checkpoint_takes_only_its_version_and_never_the_active_one(control: Control):
    insert_tuned(control)
    await control.sdk.models.delete(CHECKPOINT)
    assert [version.version for version in models.list_versions(control.db, TUNED)] == ["step-20"]
    answer = await control.http.delete(f"/v1/models/{quote(TUNED + '@step-20', safe='')}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_in_use")


async def test_delete_model_of_unfinished_job_is_refused(control: Control):
    job_id = await control.job()
    (await control.http.post(f"/v1/fine_tuning/jobs/{job_id}/pause")).raise_for_status()
    answer = await control.http.delete("/v1/models/starter", headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_in_use")
    assert job_id in answer.json()["error"]["message"] and answer.headers["x-should-retry"] == "false"
    await control.sdk.fine_tuning.jobs.cancel(job_id)
    assert (await control.http.delete("/v1/models/starter", headers=ADMIN)).status_code == 200


async def test_delete_model_of_job_whose_key_lost_it_succeeds(control: Control):
    await control.job()
    control.db.execute("DELETE FROM model_shares")
    assert (await control.http.delete("/v1/models/starter", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize("used", [f"{TUNED}@step-30", f"{TUNED}:ckpt-step-30"])
@pytest.mark.parametrize("how", ["trained on", "judge"])
async def test_a_version_that_a_job_uses_stays_by_whichever_of_its_names(control: Control, used: str, how: str):
    insert_tuned(control)
    db, names = control.db, [f"{TUNED}@step-30", f"{TUNED}:ckpt-step-30"]
    made = {"id": "ftckpt_3", "checkpoint": names[1], "job_id": "ftjob-1", "step": 30}
    models.insert_version(db, VersionRow(TUNED, "step-30", "test", 10, 1.0, disk_path="/models/step-30", **made))
    model = used if how == "trained on" else "starter"
    jobs.insert(db, JobRow("ftjob-u", model, "distillation", "f", 1, "made", 1.0, phase="running"))
    if how == "judge":
        jobs.insert_judge(db, JobJudgeRow("ftjob-u", {"teacher": used}))
    for name in names:
        refused = await control.http.delete(f"/v1/models/{quote(name, safe='')}", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use"), name
        assert "ftjob-u" in refused.json()["error"]["message"]
    jobs.set_phase(db, "ftjob-u", "failed")
    assert (await control.http.delete(f"/v1/models/{quote(names[0], safe='')}", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize(
    ("suffix", "part"),
    [
        ("My Great Model", "my-great-model"),
        ("a:b/c..d", "a-b-c-d"),
        ("客服 v2", "v2"),
    ],
)
async def test_a_suffix_becomes_part_of_a_name_as_openai_makes_it(control: Control, suffix: str, part: str):
    job_id = await control.job(suffix=suffix)
    name = jobs.get(control.db, job_id).output_model
    assert name.startswith(f"ft:starter:local:{part}:") and is_model_name(name)
    told = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}")).json()
    assert told["user_provided_suffix"] == suffix


def test_is_model_name_takes_printable_names_without_path_tricks():
    good = ["a", "starter", "Qwen/Qwen3-0.6B", "ft:a:b:c:d", "m_1.5", "a" * 256]
    bad = ["", ".hidden", "/abs", "a//b", "a/../b", "a b", "a\nb", "a@b", "ä", "a/", "a" * 257]
    assert [is_model_name(name) for name in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
