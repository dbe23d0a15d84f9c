"""Events of a running job become rows, OpenAI events, checkpoints, and finally a model."""

from __future__ import annotations

import base64
import csv
import errno
import io

import openai
import pytest

from appliance.controller.jobs.events import JobEvents, fail
from appliance.store import jobs, models
from appliance.store.rows import DEPLOYMENTS
from tests.unit.controller.conftest import ADMIN, Control


def metrics(step: int, loss: float, total: int = 20) -> dict:
    measured = {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-4, "tokens_per_s": 900.0, "devices": 2}
    return {"event": "metrics", "step": step, "total_steps": total, "epoch": step / total, "tokens": 600, **measured}


def published(step: int) -> dict:
    at = {"version": f"step-{step}", "path": f"/dev/shm/x/step-{step}", "step": step, "epoch": 1}
    return {"event": "published", "bytes": 1000, "seconds": 0.1, **at}


async def table_of(control: Control, job_id: str) -> list[dict[str, str]]:
    """Return the rows of the job's result file, decoded as in OpenAI's scripts: base64, then CSV."""
    (file_id,) = jobs.get(control.db, job_id).result_files
    content = (await control.sdk.files.content(file_id)).read()
    return list(csv.DictReader(io.StringIO(base64.b64decode(content, validate=True).decode())))


async def test_job_events_from_start_to_success(control: Control, events: JobEvents):
    job_id, api = await control.job(suffix="maths"), control.sdk.fine_tuning.jobs
    events.started(job_id, ["n0/0", "n0/1"])
    assert (await api.retrieve(job_id)).status == "running"
    events.ingest(job_id, {"event": "validation", "step": 0, "total_steps": 20, "loss": 3.0})
    for step in range(1, 11):
        events.ingest(job_id, metrics(step, 3.0 - step / 10) | {"mean_token_accuracy": step / 16})
    told = (await api.list_events(job_id, limit=1)).data[0].data
    assert (told["train_loss"], told["train_mean_token_accuracy"]) == (2.0, 0.625) and "mean_token_accuracy" not in told
    events.ingest(job_id, {"event": "validation", "job": job_id, "step": 10, "loss": 2.5, "mean_token_accuracy": 0.25})
    measured = {"valid_loss": 2.5, "valid_mean_token_accuracy": 0.25}
    measured |= {f"full_{name}": value for name, value in measured.items()}
    told = (await api.list_events(job_id, limit=1)).data[0].data
    assert told == measured | {"step": 10, "total_steps": 20}
    events.ingest(job_id, published(10))
    row = jobs.get(control.db, job_id)
    assert (row.step, row.total_steps, row.loss, row.valid_loss) == (10, 20, 2.0, 2.5)
    shown = await api.retrieve(job_id)
    assert shown.estimated_finish is not None and shown.fine_tuned_model is None

    # A checkpoint is usable before the job ends, but the model is not.
    (checkpoint,) = (await api.checkpoints.list(job_id)).data
    assert checkpoint.fine_tuned_model_checkpoint == f"{row.output_model}:ckpt-step-10"
    measured |= {"train_loss": 2.0, "train_mean_token_accuracy": 0.625, "step": 10}
    assert checkpoint.metrics.to_dict() == measured, "every field that OpenAI's type has"
    assert (await control.sdk.models.retrieve(checkpoint.fine_tuned_model_checkpoint)).owned_by == "org-local"
    assert row.output_model not in [model.id for model in (await control.sdk.models.list()).data]

    written = {"path": "/dev/shm/x/step-12", "bytes": 65_000_000, "seconds": 0.31}
    events.ingest(job_id, {"event": "snapshot", "step": 12, **written})
    assert (await control.messages(job_id))[-1] == "Snapshot of step 12: 65.0 MB in 0.31 s"
    events.suspended(job_id, 12, "traffic took its devices")
    suspended = await api.retrieve(job_id)
    assert suspended.status == "queued" and suspended.estimated_finish is None
    events.started(job_id, ["n0/3"])
    for step in range(12, 21):
        events.ingest(job_id, metrics(step, 3.0 - step / 10))
    events.ingest(job_id, published(20))
    events.ingest(job_id, metrics(20, 1.0))  # the step is reported twice, but counts once
    events.ingest(job_id, {"event": "finished"})
    events.suspended(job_id, 19, "memory is short")  # ignored: the last step is already done
    events.succeeded(job_id)

    job = await api.retrieve(job_id)
    assert job.status == "succeeded" and job.fine_tuned_model == row.output_model and job.trained_tokens == 19 * 600
    assert jobs.get(control.db, job_id).step == 20 and job.finished_at is not None
    model = models.find(control.db, row.output_model)
    assert model is not None and (model.active_version, model.base, model.kind) == ("step-20", "starter", "fine-tuned")
    assert DEPLOYMENTS.find(control.db, row.output_model) is not None
    lines = await table_of(control, job_id)
    assert list(lines[0]) == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    # Every reported step has exactly one line; step 11 was never reported.
    assert [int(line["step"]) for line in lines] == [*range(1, 11), *range(12, 21)]
    assert lines[9]["valid_loss"] == "2.5"
    assert (await control.sdk.files.retrieve(job.result_files[0])).purpose == "fine-tune-results"


@pytest.mark.parametrize(
    ("method", "step", "validation", "columns"),
    [
        (
            "dpo",
            {"train_mean_token_accuracy": 0.5, "rewards/margins": 0.25},
            {"mean_token_accuracy": 0.75, "rewards/margins": 0.125},
            {"train_accuracy": "0.5", "valid_rewards/margins": "0.125", "train_rewards/chosen": ""},
        ),
        (
            "reinforcement",
            {"train_mean_reward": 0.5, "mismatch_kl": 0.1},
            {"mean_reward": 0.75},
            {"train_reward_mean": "0.5", "valid_reward_mean": "0.75"},
        ),
    ],
)
async def test_metrics_table_has_the_columns_of_the_method(
    control: Control, events: JobEvents, method: str, step: dict, validation: dict, columns: dict
):
    job_id = await control.job()
    jobs.update(control.db, job_id, method=method, resolved=None)
    events.started(job_id, ["n0/0"])
    events.ingest(job_id, metrics(1, 2.0) | step)
    events.ingest(job_id, {"event": "validation", "step": 1, **validation})
    events.ingest(job_id, published(1))
    events.succeeded(job_id)
    if method == "reinforcement":
        (checkpoint,) = (await control.sdk.fine_tuning.jobs.checkpoints.list(job_id)).data
        found = checkpoint.metrics.to_dict()
        assert [found[f"{part}_mean_reward"] for part in ("train", "valid", "full_valid")] == [0.5, 0.75, 0.75]
    (line,) = await table_of(control, job_id)
    assert {name: line[name] for name in columns} == columns
    assert "mismatch_kl" not in str(line)


async def test_step_reported_twice_has_one_event(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"])
    for at_s in (1e9, 1e9, 1e9 + 60):  # the same event from the log and from delivery, then a repeated step
        events.ingest(job_id, metrics(1, 1.0) | {"at_s": at_s})
    assert jobs.get(control.db, job_id).eta_s is None
    told = (await control.sdk.fine_tuning.jobs.list_events(job_id)).data
    assert len([event for event in told if event.type == "metrics"]) == 2
    assert jobs.get(control.db, job_id).trained_tokens == 600
    events.ingest(job_id, metrics(2, 1.0) | {"at_s": 1e9 + 62})
    assert jobs.get(control.db, job_id).eta_s == 36.0, "by the ranks' clock: 18 steps of 2 s"


async def test_unreported_steps_are_recorded_from_steps_event(control: Control, events: JobEvents):
    job_id = await control.job()
    reports = [metrics(step, 1.0) | {"at_s": 1e9 + step} for step in (1, 2, 3)]
    events.ingest(job_id, dict(reports[0]))
    for _ in range(2):
        events.ingest(job_id, {"event": "steps", "steps": [dict(report) for report in reports]})
    assert [row.step for row in jobs.all_metrics(control.db, job_id)] == [1, 2, 3]
    told = (await control.sdk.fine_tuning.jobs.list_events(job_id)).data
    assert len([event for event in told if event.type == "metrics"]) == 3


@pytest.mark.parametrize("end", ["succeeded", "failed"])
async def test_checkpoints_are_listed_and_only_the_result_is_active(control: Control, events: JobEvents, end: str):
    job_id = await control.job()
    events.started(job_id, ["n0/0"])
    name = jobs.get(control.db, job_id).output_model
    for step in (2, 4):
        events.ingest(job_id, metrics(step, 3.0 - step / 10, total=4))
        events.ingest(job_id, published(step))
        made = models.find(control.db, name)
        assert made is not None and made.active_version is None
    if end == "succeeded":
        events.succeeded(job_id)
    else:
        fail(control.db, job_id, "training_failed", "no")
    found = (await control.sdk.fine_tuning.jobs.checkpoints.list(job_id)).data
    assert [one.step_number for one in found] == [4, 2]
    assert [one.metrics.train_loss for one in found] == [2.6, 2.8]
    known = {one.id for one in (await control.sdk.models.list()).data}
    assert {one.fine_tuned_model_checkpoint for one in found} <= known and (name in known) is (end == "succeeded")
    held = {
        one.version: (bool(one.held_back), one.meta.get("of_epoch")) for one in models.list_versions(control.db, name)
    }
    result = (False, None) if end == "succeeded" else (True, True)
    assert held == {"step-2": (True, True), "step-4": result}
    for one in found:
        if end != "succeeded" or one.step_number == 2:
            assert (await control.sdk.models.delete(one.fine_tuned_model_checkpoint)).deleted


async def test_success_without_published_weights_fails_job(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"])
    events.succeeded(job_id)
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "failed" and job.error.code == "nothing_published"


async def test_success_on_full_disk_reports_estimate_once(control: Control, events: JobEvents, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("appliance.controller.jobs.events.storage.make_result", full)
    job_id = await control.job()
    events.ingest(job_id, metrics(1, 2.0, total=1) | {"memory_bytes": 10**9})
    events.ingest(job_id, published(1))
    events.conclude(job_id)
    events.succeeded(job_id)
    texts = [event.message for event in (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=50)).data]
    assert sum("(estimated" in text for text in texts) == 1, texts
    assert jobs.get(control.db, job_id).phase == "succeeded"


async def test_nan_and_infinity_are_stored_as_null(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"])
    events.ingest(job_id, metrics(1, float("nan")) | {"grad_norm": float("inf")})
    events.ingest(job_id, {"event": "validation", "step": 1, "loss": float("nan")})
    events.ingest(job_id, {"event": "from the future"})
    (row,) = jobs.list_metrics(control.db, job_id)
    assert (row.loss, row.grad_norm, row.valid_loss, row.learning_rate) == (None, None, None, 1e-4)
    shown = await control.http.get(f"/v1/fine_tuning/jobs/{job_id}/events")
    assert shown.status_code == 200 and shown.json()["data"][1]["data"]["grad_norm"] is None


async def test_delete_base_of_an_adapter_is_refused(control: Control, events: JobEvents):
    job_id = await control.job()
    adapter = {"base": "starter", "base_version": "v1", "rank": 8}
    events.started(job_id, ["n0/0"])
    events.ingest(job_id, {**published(10), "adapter": adapter})
    events.succeeded(job_id)
    name = jobs.get(control.db, job_id).output_model
    listed = (await control.http.get("/admin/v1/models", headers=ADMIN)).json()["data"]
    (shown,) = [model for model in listed if model["name"] == name]
    assert shown["adapter"] == {**adapter, "host": "starter"} and shown["versions"][0]["kind"] == "adapter"
    with pytest.raises(openai.ConflictError):
        await control.sdk.models.delete("starter", extra_headers=ADMIN)
    await control.sdk.models.delete(name)
    assert control.scheduler.unloaded == [f"{name}@step-10"] and control.ops.removed[0][0] == name
    assert (await control.sdk.models.delete("starter", extra_headers=ADMIN)).deleted


async def test_job_whose_rewards_are_always_equal_fails(control: Control, events: JobEvents):
    job_id = await control.job()
    jobs.update(control.db, job_id, method="reinforcement")
    events.started(job_id, ["n0/0"])
    for step in range(1, 21):
        events.ingest(job_id, metrics(step, 0.0) | {"train_mean_reward": 1.0, "equal_rewards": 1.0})
    events.ingest(job_id, published(20))
    events.succeeded(job_id)
    failed = jobs.get(control.db, job_id)
    assert (failed.phase, failed.error["code"]) == ("failed", "nothing_trained")
    assert len(failed.result_files) == 1
