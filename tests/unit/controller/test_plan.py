"""A plan and the job that follows choose the same, from the same count of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.controller.jobs.events import JobEvents
from appliance.store.objects import jobs, models
from appliance.store.rows import JobMetricRow
from tests.train_support.tiny import tokenizer
from tests.unit.controller.conftest import ADMIN, Control, chat_lines, insert_model

pytestmark = pytest.mark.usefixtures("checked_here")


async def ask(control: Control, **job):
    return await control.http.post("/admin/v1/plan", json={"job": {"model": "starter"} | job}, headers=ADMIN)


@pytest.mark.parametrize("given", [{}, {"lora_rank": 8}, {"batch_size": 4, "n_epochs": 2}])
@pytest.mark.parametrize("with_tokenizer", [False, True])
async def test_a_plan_chooses_what_the_job_gets(control: Control, tmp_path: Path, given, with_tokenizer):
    if with_tokenizer:
        tokenizer().save_pretrained(tmp_path / "v1")
        models.update_version(control.db, "starter", "v1", disk_path=str(tmp_path / "v1"))
    file_id = await control.upload(chat_lines(40))
    told = (await ask(control, training_file=file_id, hyperparameters=given)).json()
    method = {"type": "supervised", "supervised": {"hyperparameters": given}}
    row = jobs.get(control.db, await control.job(training_file=file_id, method=method))
    assert row.resolved is not None and told["hyperparameters"].items() <= row.resolved.items()
    assert told["sizes"] == row.allowed_sizes
    assert told["data"]["counted"] and told["data"]["examples"] == 40


async def test_plan_by_an_owner_knows_what_a_job_of_theirs_may_use(control: Control):
    file_id = await control.upload()
    insert_model(control.db, "ft:bobs", kind="fine-tuned", base="starter", owner="bob")
    for job, status in (
        ({"model": "starter", "training_file": file_id}, 200),
        ({"model": "starter", "training_file": "file-none"}, 404),
        ({"model": "ft:bobs"}, 404),
    ):
        assert (await control.http.post("/admin/v1/plan", json={"job": job})).status_code == status
    assert (await control.http.post("/admin/v1/plan", json={"serve": {"model": "starter"}})).status_code == 403


async def test_ended_job_shows_what_it_took_and_corrects_the_next_estimate(control: Control):
    file_id = await control.upload(chat_lines(40))
    job_id = await control.job(training_file=file_id)
    estimate = jobs.get(control.db, job_id).estimate
    taken = int(1.2 * estimate["device_bytes"])
    for step in (1, 2, 3):
        row = JobMetricRow(job_id, step, float(step), tokens_per_s=100.0 * step, devices=2, memory_bytes=taken)
        jobs.upsert_metric(control.db, row)
    JobEvents(control.db, control.context.files_dir, "org").conclude(job_id)
    measured = jobs.get(control.db, job_id).estimate["measured"]
    assert measured == {"device_bytes": taken, "tokens_per_s": 100.0 * estimate["devices"]}
    after = (await ask(control, training_file=file_id)).json()["layouts"][0]
    assert after["device_bytes"] == pytest.approx(taken, rel=1e-3)
    assert after["tokens_per_s"] == pytest.approx(measured["tokens_per_s"])


async def test_layout_that_does_not_fit_gives_way_to_one_that_does(control: Control, tmp_path: Path):
    config = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 32000}))
    models.update_version(control.db, "starter", "v1", disk_path=str(tmp_path))
    device = control.scheduler.devices[0] | {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    control.scheduler.devices = [device | {"id": f"n0/{n}", "memory_bytes": 16 * 2**30} for n in range(8)]
    given = {"full": True, "micro_batch": 64, "batch_size": 64, "max_length": 2048}
    told = (await ask(control, hyperparameters=given)).json()
    assert told["fits"] and told["hyperparameters"]["micro_batch"] < 64
    assert "does not fit with micro_batch 64" in told["warnings"][0]
    assert {"hours", "kwh", "bound_by", "device_bytes"} <= told["layouts"][0].keys()
    assert told["layouts"][0]["hours"] > 0 and told["device_hours"] > 0


async def test_a_plan_on_a_bad_or_unknown_file_says_so(control: Control):
    bad = await control.upload(b"{}\n" * 3)
    answer = await ask(control, training_file=bad)
    assert answer.status_code == 400 and "line 1" in answer.json()["error"]["message"]
    assert (await ask(control, training_file="file-none")).status_code == 404
    assumed = (await ask(control)).json()["data"]
    assert not assumed["counted"] and assumed["examples"] == 1000


async def test_examples_that_are_cut_are_a_warning_of_plan_and_job_alike(control: Control):
    line = {"messages": [{"role": "user", "content": "a " * 400}, {"role": "assistant", "content": "b"}]}
    file_id = await control.upload(json.dumps(line).encode() + b"\n" + chat_lines(12))
    given = {"max_length": 64}
    told = (await ask(control, training_file=file_id, hyperparameters=given)).json()["warnings"]
    assert "max_length is 64: what is beyond is cut off" in told[-1]
    method = {"type": "supervised", "supervised": {"hyperparameters": given}}
    assert told[-1] in await control.messages(await control.job(training_file=file_id, method=method))
    longer = (await ask(control, training_file=file_id, hyperparameters={"max_length": 1024})).json()["warnings"]
    assert not any("cut off" in text for text in longer)


async def test_the_automatic_batch_follows_the_devices_that_were_asked_for(control: Control):
    """64 short examples make steps of four rows; on eight devices, if that is asked, of eight."""
    row = jobs.get(control.db, await control.job(extra_body={"min_devices": 8}))
    assert row.phase == "queued" and row.allowed_sizes == [8] and row.resolved["batch_size"] % 8 == 0
