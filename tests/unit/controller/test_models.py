"""/v1/models, called by the OpenAI SDK; imports of models; and the archive of a version."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.controller.access.model_access import is_model_name, resolve
from appliance.store import jobs, models
from appliance.store.rows import JobJudgeRow, JobRow, VersionRow
from tests.unit.controller.conftest import ADMIN, Control, insert_model
from tests.unit.controller.test_admin import ask, ended
from weights.tiers.copies import seal_dir

TUNED = "ft:starter:local:maths:AbCd1234"
CHECKPOINT = f"{TUNED}:ckpt-step-10"


def insert_tuned(control: Control) -> None:
    insert_model(control.db, TUNED, kind="fine-tuned", base="starter", versions=("step-10", "step-20"))
    jobs.insert(control.db, JobRow("ftjob-1", "starter", "supervised", "f", 1, TUNED, 1.0, phase="succeeded"))
    models.update_version(control.db, TUNED, "step-10", id="ftckpt_1", checkpoint=CHECKPOINT, job_id="ftjob-1", step=10)


async def test_model_state_and_reason_agree_in_all_views(control: Control):
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


async def test_base_tuned_and_checkpoint_models_are_listed_and_retrieved(control: Control):
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
async def test_unknown_model_names_are_not_found(control: Control, name: str):
    answer = await control.http.get(f"/v1/models/{quote(name, safe='')}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert len(answer.json()["error"]["message"]) < 300


async def test_archive_of_version_in_no_tier_returns_409(control: Control):
    answer = await control.http.get("/v1/models/starter/archive")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_not_ready")


async def test_delete_tuned_model_removes_rows_then_replicas_then_bytes(control: Control):
    insert_tuned(control)
    deleted = await control.sdk.models.delete(TUNED)
    assert deleted.deleted and deleted.id == TUNED
    assert resolve(control.db, TUNED) is None and resolve(control.db, CHECKPOINT) is None
    assert control.scheduler.withdrawn == [TUNED]
    ((name, rows),) = control.ops.removed
    assert name == TUNED and [row.disk_path for row in rows] == ["/models/step-10", "/models/step-20"]


async def test_delete_checkpoint_removes_only_an_inactive_version(control: Control):
    insert_tuned(control)
    await control.sdk.models.delete(CHECKPOINT)
    assert [version.version for version in models.list_versions(control.db, TUNED)] == ["step-20"]
    answer = await control.http.delete(f"/v1/models/{quote(TUNED + '@step-20', safe='')}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_in_use")


async def test_delete_model_of_unfinished_job_is_rejected(control: Control):
    job_id = await control.job()
    (await control.http.post(f"/v1/fine_tuning/jobs/{job_id}/pause")).raise_for_status()
    answer = await control.http.delete("/v1/models/starter", headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_in_use")
    assert job_id in answer.json()["error"]["message"] and answer.headers["x-should-retry"] == "false"
    await control.sdk.fine_tuning.jobs.cancel(job_id)
    assert (await control.http.delete("/v1/models/starter", headers=ADMIN)).status_code == 200


async def test_delete_model_of_job_whose_key_lost_access_succeeds(control: Control):
    await control.job()
    control.db.execute("DELETE FROM model_shares")
    assert (await control.http.delete("/v1/models/starter", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize("used", [f"{TUNED}@step-30", f"{TUNED}:ckpt-step-30"])
@pytest.mark.parametrize("how", ["trained on", "judge"])
async def test_delete_version_used_by_a_job_is_refused_under_each_name(control: Control, used: str, how: str):
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
    ("suffix", "part"), [("My Great Model", "my-great-model"), ("a:b/c..d", "a-b-c-d"), ("客服 v2", "v2")]
)
async def test_suffix_in_name_follows_openai(control: Control, suffix: str, part: str):
    job_id = await control.job(suffix=suffix)
    name = jobs.get(control.db, job_id).output_model
    assert name.startswith(f"ft:starter:local:{part}:") and is_model_name(name)
    told = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}")).json()
    assert told["user_provided_suffix"] == suffix


def test_is_model_name_accepts_only_safe_printable_names():
    good = ["a", "starter", "Qwen/Qwen3-0.6B", "ft:a:b:c:d", "m_1.5", "a" * 256]
    bad = ["", ".hidden", "/abs", "a//b", "a/../b", "a b", "a\nb", "a@b", "ä", "a/", "a" * 257]
    assert [is_model_name(name) for name in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.fixture
def roomy(control: Control) -> Control:
    """A box with engines that accept adapters of rank 32 or less, and with files of `starter` on disk."""
    control.context.sizes.adapter_rank_limit = lambda row: 32
    models.update_version(control.db, "starter", "v1", disk_path="/models/starter/v1")
    return control


@pytest.mark.parametrize("source", ["/data/adapter-of-starter", "/data/adapter"])
async def test_import_adapter_uses_base_of_its_config_or_of_request(roomy: Control, source: str):
    body = {"source": source, "name": "pirate"} | ({} if "starter" in source else {"base": "starter"})
    done = await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json=body))
    assert done["state"] == "succeeded"
    (row,) = models.callable_adapters(roomy.db)
    assert (row.name, row.model, row.base, row.base_version) == ("pirate", "pirate", "starter", "v1")
    assert row.host == "starter"
    model, base = models.find(roomy.db, "pirate"), models.find(roomy.db, "starter")
    assert (model.kind, model.base, model.arch, model.max_model_len) == ("fine-tuned", "starter", base.arch, 2048)
    assert models.shared_with(roomy.db, "pirate") == models.shared_with(roomy.db, "starter") == ["*"]
    assert (await ask(roomy, "GET", "/models/pirate"))["adapter"]["rank"] == 8


async def test_import_from_package_records_the_package_as_source(roomy: Control):
    body = {"source": "/tmp/x/m.gguf", "name": "tiny", "origin": "package tiny==1.0"}
    await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json=body))
    shown = await ask(roomy, "GET", "/models/tiny")
    assert [shown["source"], *(version["source"] for version in shown["versions"])] == ["package tiny==1.0"] * 2
    error = await ask(roomy, "POST", "/models/import", 400, json={"source": "/x", "origin": "a\nb"})
    assert error["error"]["param"] == "origin"


@pytest.mark.parametrize("name", ["starter", TUNED])
async def test_import_as_version_requires_whole_weights_and_activates_nothing(roomy: Control, name: str):
    models.update_version(roomy.db, "starter", "v1", version="v0")
    models.update(roomy.db, "starter", active_version="v0")
    insert_tuned(roomy)
    models.update(roomy.db, TUNED, job_id="ftjob-1")
    before = await ask(roomy, "GET", f"/models/{name}")
    body = {"source": "/data/whole", "name": name, "as_version": True}
    done = await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json=body))
    after = await ask(roomy, "GET", f"/models/{name}")
    assert done["state"] == "succeeded" and after["active_version"] == before["active_version"]
    more = {one["version"] for one in after["versions"]} - {one["version"] for one in before["versions"]}
    assert more == {done["result"]["version"]} and after["owner"] == before["owner"]
    insert_model(roomy.db, "adapter", kind="fine-tuned", base="starter")
    models.update_version(roomy.db, "adapter", "v1", meta={"adapter": {"base": "starter", "base_version": "v0"}})
    for refused in ("nosuch", "adapter"):
        error = await ask(roomy, "POST", "/models/import", 400, json=body | {"name": refused})
        assert error["error"]["param"] == "name"


async def test_adapter_of_a_private_base_is_private(roomy: Control):
    models.unshare(roomy.db, "starter", "*")
    models.share(roomy.db, "starter", "ann")
    await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json={"source": "/data/adapter-of-starter"}))
    assert models.shared_with(roomy.db, "adapter-of-starter") == ["ann"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"source": "/data/adapter"}, 400, "base"),
        ({"source": "/data/adapter", "base": "nosuch"}, 400, "base"),
        ({"source": "/data/adapter", "base": "tuned"}, 400, "base"),
        ({"source": "/data/whole", "base": "starter"}, 400, "base"),
        ({"source": "/data/starter/adapter", "name": "starter"}, 409, "name"),
        ({"source": "/x/adapter-starter", "base": "cold"}, 409, "base"),
    ],
)
async def test_adapter_without_a_base_is_refused(roomy: Control, body, status, param):
    insert_model(roomy.db, "tuned", kind="fine-tuned", base="starter")
    models.update_version(roomy.db, "tuned", "v1", meta={"adapter": {"base": "starter", "base_version": "v1"}})
    insert_model(roomy.db, "cold")
    models.update_version(roomy.db, "cold", "v1", disk_path=None, shm_path=None)
    assert (await ask(roomy, "POST", "/models/import", status, json=body))["error"]["param"] == param


async def test_deploy_adapter_refuses_engine_settings(roomy: Control):
    await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json={"source": "/data/adapter-of-starter"}))
    path = "/models/adapter-of-starter"
    for field, value in (("idle_sleep_s", 60), ("tensor_parallel", 2), ("max_replicas", 1), ("ttft_p95_s", 2)):
        error = (await ask(roomy, "PATCH", f"{path}/deployment", 400, json={"pinned": True, field: value}))["error"]
        assert error["param"] == field
    wish = {"pinned": True, "min_replicas": 1, "idle_sleep_s": None}
    assert (await ask(roomy, "PATCH", f"{path}/deployment", json=wish)).items() >= wish.items()
    await ask(roomy, "PATCH", f"{path}/settings", 400, json={"set": {"max_num_seqs": 2}})


@pytest.fixture
def folder(control: Control, tmp_path: Path) -> Path:
    """Write the files of a `starter` version to disk; return their folder."""
    folder = tmp_path / "stored"
    folder.mkdir()
    save_file({"w": np.arange(3000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    seal_dir(folder, kind="version", model="starter", version="v1")
    (version,) = models.list_versions(control.db, "starter")
    models.update_version(control.db, "starter", version.version, disk_path=str(folder))
    return folder


async def test_archive_has_all_files_and_resumes_at_a_range(control: Control, folder: Path):
    whole = await control.http.get("/v1/models/starter/archive")
    assert int(whole.headers["content-length"]) == len(whole.content)
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
        assert tar.getnames() == ["manifest.json", "config.json", "model.safetensors"]
        assert all(tar.extractfile(name).read() == (folder / name).read_bytes() for name in tar.getnames())
    for asked, if_range, status, sent in (
        ("bytes=100-", None, 206, slice(100, None)),
        ("bytes=5000-7000", whole.headers["etag"], 206, slice(5000, 7001)),
        ("bytes=100-", '"another"', 200, slice(0, None)),
        ("bytes=" + "9" * 5000 + "-", None, 200, slice(0, None)),
        (f"bytes={len(whole.content)}-", None, 416, None),
    ):
        headers = {"range": asked} | ({"if-range": if_range} if if_range else {})
        answer = await control.http.get("/v1/models/starter/archive", headers=headers)
        assert answer.status_code == status and (sent is None or answer.content == whole.content[sent])
