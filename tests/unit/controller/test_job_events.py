"""What a running job tells becomes rows, OpenAI's events and checkpoints, and at the end a model."""

from __future__ import annotations

import base64
import csv
import errno
import io
import os
import sqlite3
from typing import Any
from unittest.mock import Mock

import openai
import pytest

from appliance.controller.files import results
from appliance.controller.jobs.events import JobEvents
from appliance.store.errors import RowNotFound
from appliance.store.objects import job_records, jobs, models
from appliance.store.records import deployments
from tests.unit.controller.conftest import ADMIN, Control


@pytest.fixture
def events(control: Control) -> JobEvents:
    return JobEvents(control.db, control.context.files_dir, "local")


def metrics(step: int, loss: float, total: int = 20) -> dict:
    return {
        "event": "metrics",
        "step": step,
        "total_steps": total,
        "epoch": step / total,
        "tokens": 600,
        "loss": loss,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "tokens_per_s": 900.0,
        "devices": 2,
    }


def published(step: int) -> dict:
    return {
        "event": "published",
        "version": f"step-{step}",
        "path": f"/dev/shm/x/step-{step}",
        "step": step,
        "bytes": 1000,
        "seconds": 0.1,
        "epoch": 1,
    }


async def table_of(control: Control, job_id: str) -> list[dict[str, str]]:
    """As OpenAI's own scripts read a result file."""
    (file_id,) = jobs.get(control.db, job_id).result_files
    content = (await control.sdk.files.content(file_id)).read()
    return list(csv.DictReader(io.StringIO(base64.b64decode(content, validate=True).decode())))


async def test_the_whole_life_of_a_job(control: Control, events: JobEvents):
    job_id = await control.job(suffix="maths")
    events.started(job_id, ["n0/0", "n0/1"], resumed=False)
    running = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert running.status == "running"
    events.ingest(job_id, {"event": "validation", "step": 0, "total_steps": 20, "loss": 3.0})
    assert (await control.messages(job_id))[-1] == "Step 0/20: validation loss=3.0000"
    for step in range(1, 11):
        events.ingest(job_id, metrics(step, 3.0 - step / 10) | {"mean_token_accuracy": step / 16})
    told = (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=1)).data[0].data
    assert (told["train_loss"], told["train_mean_token_accuracy"]) == (2.0, 0.625) and "mean_token_accuracy" not in told
    events.ingest(job_id, {"event": "validation", "job": job_id, "step": 10, "loss": 2.5, "mean_token_accuracy": 0.25})
    told = (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=1)).data[0].data
    measured = {"valid_loss": 2.5, "valid_mean_token_accuracy": 0.25}
    measured |= {f"full_{name}": value for name, value in measured.items()}
    assert told == measured | {"step": 10, "total_steps": 20}
    events.ingest(job_id, published(10))
    row = jobs.get(control.db, job_id)
    assert (row.step, row.total_steps, row.loss, row.valid_loss) == (10, 20, 2.0, 2.5)
    assert row.eta_s is not None and row.eta_s >= 0
    with_estimate = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert with_estimate.estimated_finish is not None and with_estimate.fine_tuned_model is None

    # A checkpoint can be used before the job is done; the model itself cannot.
    (checkpoint,) = (await control.sdk.fine_tuning.jobs.checkpoints.list(job_id)).data
    assert checkpoint.fine_tuned_model_checkpoint == f"{row.output_model}:ckpt-step-10"
    assert checkpoint.step_number == 10
    measured |= {"train_loss": 2.0, "train_mean_token_accuracy": 0.625, "step": 10}
    assert checkpoint.metrics.to_dict() == measured, "every field that OpenAI's type has"
    assert (await control.sdk.models.retrieve(checkpoint.fine_tuned_model_checkpoint)).owned_by == "org-local"
    assert row.output_model not in [model.id for model in (await control.sdk.models.list()).data]

    events.suspended(job_id, 12, "/dev/shm/snap", reason="traffic took its devices")
    suspended = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert suspended.status == "queued" and suspended.estimated_finish is None
    assert (await control.messages(job_id))[-1] == "Fine-tuning job suspended at step 12: traffic took its devices"
    events.started(job_id, ["n0/3"], resumed=True)
    assert (await control.messages(job_id))[-1] == "Fine-tuning job continues at step 12 on 1 device(s)"
    for step in range(12, 21):
        events.ingest(job_id, metrics(step, 3.0 - step / 10))
    events.ingest(job_id, published(20))
    events.ingest(job_id, metrics(20, 1.0))  # done again: it counts once
    events.ingest(job_id, {"event": "finished"})
    events.suspended(job_id, 19, "/dev/shm/snap", reason="memory is short")  # its last step is done already
    events.succeeded(job_id)

    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "succeeded" and job.fine_tuned_model == row.output_model and job.trained_tokens == 19 * 600
    assert jobs.get(control.db, job_id).step == 20, "not the snapshot's"
    assert job.finished_at is not None
    model = models.find(control.db, row.output_model)
    assert model is not None and (model.active_version, model.base, model.kind) == ("step-20", "starter", "fine-tuned")
    assert deployments.find(control.db, row.output_model) is not None
    lines = await table_of(control, job_id)
    assert list(lines[0]) == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    # Step 11 was reported by nobody, step 12 once; every reported step has exactly one line.
    assert [int(line["step"]) for line in lines] == [*range(1, 11), *range(12, 21)]
    assert lines[9]["valid_loss"] == "2.5"
    assert (await control.sdk.files.retrieve(job.result_files[0])).purpose == "fine-tune-results"
    kinds = [event.type async for event in control.sdk.fine_tuning.jobs.list_events(job_id, limit=7)]
    assert kinds.count("metrics") == 22


@pytest.mark.parametrize(
    ("method", "step", "validation", "columns"),
    [
        (
            "dpo",
            {"train_mean_token_accuracy": 0.5, "rewards/margins": 0.25},
            {"mean_token_accuracy": 0.75, "rewards/margins": 0.125},
            {
                "train_accuracy": "0.5",
                "valid_mean_token_accuracy": "0.75",
                "train_rewards/margins": "0.25",
                "valid_rewards/margins": "0.125",
                "train_rewards/chosen": "",
            },
        ),
        (
            "reinforcement",
            {"train_mean_reward": 0.5, "mismatch_kl": 0.1},
            {"mean_reward": 0.75},
            {"train_reward_mean": "0.5", "valid_reward_mean": "0.75"},
        ),
        (
            "distillation",
            {"reverse_kl": 0.5, "entropy": 2.0},
            {"reverse_kl": 0.25},
            {"train_reverse_kl": "0.5", "valid_reverse_kl": "0.25", "train_entropy": "2.0", "valid_entropy": ""},
        ),
    ],
)
async def test_the_table_of_a_job_has_what_its_method_measures(
    control: Control, events: JobEvents, method: str, step: dict, validation: dict, columns: dict
):
    job_id = await control.job()
    jobs.update(control.db, job_id, method=method, resolved=None)
    events.started(job_id, ["n0/0"], resumed=False)
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


async def test_steps_run_again_after_a_resume_replace_their_rows(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    for step in (1, 2, 3, 2, 3, 4):
        events.ingest(job_id, metrics(step, float(step)))
    assert [row.step for row in job_records.list_metrics(control.db, job_id)] == [1, 2, 3, 4]


async def test_steps_read_all_at_once_were_done_when_the_ranks_say(control: Control, events: JobEvents):
    """After a restart of the controller a job said that it had 90 ms left."""
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    for step in range(1, 6):
        events.ingest(job_id, metrics(step, 1.0) | {"at_s": 1e9 + 2 * step})
    assert jobs.get(control.db, job_id).eta_s == 30.0  # 15 steps of 2 s
    first = (await control.sdk.fine_tuning.jobs.list_events(job_id)).data[0]
    assert "at_s" not in first.data


async def test_a_step_that_is_read_and_then_delivered_too_is_told_once(control: Control, events: JobEvents):
    """After kill -9 of the controller a job's events had eleven steps twice: its ranks had outlived it."""
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    for at_s in (1e9, 1e9, 1e9 + 60):  # read in the log, delivered, and done again
        events.ingest(job_id, metrics(1, 1.0) | {"at_s": at_s})
    told = (await control.sdk.fine_tuning.jobs.list_events(job_id)).data
    assert len([event for event in told if event.type == "metrics"]) == 2
    assert jobs.get(control.db, job_id).trained_tokens == 600


async def test_an_event_twice_makes_one_version_and_one_checkpoint(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    for _ in range(2):
        events.ingest(job_id, published(5))
    assert len((await control.sdk.fine_tuning.jobs.checkpoints.list(job_id)).data) == 1
    events.succeeded(job_id)
    events.succeeded(job_id)
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "succeeded" and len(job.result_files) == 1


@pytest.mark.parametrize("end", ["succeeded", "cancelled", "failed"])
async def test_checkpoints_are_listed_however_the_job_ends_and_none_answers_for_the_model_but_the_result(
    control: Control, events: JobEvents, end: str
):
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    name = jobs.get(control.db, job_id).output_model
    for step in (2, 4):
        events.ingest(job_id, metrics(step, 3.0 - step / 10, total=4))
        events.ingest(job_id, published(step))
        made = models.find(control.db, name)
        assert made is not None and made.active_version is None
    end_it = {"succeeded": events.succeeded, "cancelled": events.cancelled}
    end_it.get(end, lambda job_id: events.failed(job_id, "training_failed", "no"))(job_id)
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


async def test_success_without_weights_is_a_failure(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    events.succeeded(job_id)
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "failed" and job.error.code == "nothing_published"


async def test_a_failed_and_a_cancelled_job_stay_as_they_are(control: Control, events: JobEvents):
    failed, cancelled = await control.job(), await control.job()
    events.started(failed, ["n0/0"], resumed=False)
    events.failed(failed, "training_diverged", "loss is not finite at step 3")
    events.failed(failed, "other", "later news")
    events.succeeded(failed)
    job = await control.sdk.fine_tuning.jobs.retrieve(failed)
    assert (job.status, job.error.code) == ("failed", "training_diverged")

    events.started(cancelled, ["n0/0"], resumed=False)
    jobs.update(control.db, cancelled, eta_s=30.0)
    assert (await control.sdk.fine_tuning.jobs.retrieve(cancelled)).estimated_finish is not None
    accepted = await control.sdk.fine_tuning.jobs.cancel(cancelled)
    assert accepted.status == "cancelled" and accepted.estimated_finish is None, "its ranks still end their step"
    events.cancelled(cancelled)
    job = await control.sdk.fine_tuning.jobs.retrieve(cancelled)
    assert job.status == "cancelled" and job.finished_at is not None
    assert jobs.get(control.db, cancelled).devices == []


async def test_numbers_that_json_does_not_know_are_unknown(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    events.ingest(job_id, metrics(1, float("nan")) | {"grad_norm": float("inf")})
    events.ingest(job_id, {"event": "validation", "step": 1, "loss": float("nan")})
    (row,) = job_records.list_metrics(control.db, job_id)
    assert (row.loss, row.grad_norm, row.valid_loss, row.learning_rate) == (None, None, None, 1e-4)
    shown = await control.http.get(f"/v1/fine_tuning/jobs/{job_id}/events")
    assert shown.status_code == 200 and shown.json()["data"][1]["data"]["grad_norm"] is None
    assert (await control.messages(job_id))[-1] == "Step 1/20: validation loss=not finite"


async def test_messages_snapshots_and_unknown_events(control: Control, events: JobEvents):
    job_id = await control.job()
    events.ingest(job_id, {"event": "message", "level": "warn", "text": "slow step"})
    events.ingest(job_id, {"event": "message", "level": "shouting", "text": "odd level"})
    events.ingest(job_id, {"event": "snapshot", "step": 4, "path": "/dev/shm/s", "bytes": 1, "seconds": 0.1})
    events.ingest(job_id, {"event": "from the future"})
    assert (await control.messages(job_id))[-3:] == ["slow step", "odd level", "Snapshot of step 4: 0.0 MB in 0.1 s"]
    kept = jobs.get(control.db, job_id).snapshot
    assert kept is not None and (kept["step"], kept["path"]) == (4, "/dev/shm/s")
    with pytest.raises(RowNotFound):
        events.ingest("ftjob-none", {"event": "message", "text": "x"})


async def test_of_many_snapshots_one_a_minute_is_told(control: Control, events: JobEvents, monkeypatch):
    """A small model on a CPU wrote one at nearly every step, and its events were little else."""
    job_id, now_s = await control.job(), 1_000_000.0
    monkeypatch.setattr("appliance.controller.jobs.events.time.time", lambda: now_s)
    for step in range(1, 125):
        now_s += 1
        events.ingest(job_id, {"event": "snapshot", "step": step, "path": f"/s{step}"})
        events.ingest(job_id, {"event": "snapshot", "step": step, "path": f"/s{step}"})
    assert [text for text in await control.messages(job_id) if text.startswith("Snapshot")] == [
        "Snapshot of step 1",
        "Snapshot of step 61",
        "Snapshot of step 121",
    ]
    kept = jobs.get(control.db, job_id).snapshot
    assert kept is not None and (kept["step"], kept["path"]) == (124, "/s124")
    events.started(job_id, ["n0/0"], resumed=True)
    events.suspended(job_id, 124, "/s124", reason="a person asked")
    assert jobs.get(control.db, job_id).snapshot == kept
    assert (await control.messages(job_id))[-1] == "Fine-tuning job suspended at step 124: a person asked"


async def test_what_writing_cost_training_is_told_once(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    cost = {"bytes": 65_000_000, "seconds": 0.31}
    for _ in range(2):  # a new controller may hear it again
        events.ingest(job_id, {"event": "snapshot", "step": 4, "path": "/dev/shm/s", **cost})
        events.ingest(job_id, {**published(5), **cost})
    told = "65.0 MB in 0.31 s"
    assert (await control.messages(job_id))[-2:] == [
        f"Snapshot of step 4: {told}",
        f"Checkpoint created at step 5: {told}",
    ]
    data = [event.data async for event in control.sdk.fine_tuning.jobs.list_events(job_id, limit=20)]
    assert [one["seconds"] for one in data if one and "seconds" in one] == [0.31, 0.31]


async def test_a_tuned_model_tuned_again_is_named_after_the_root(control: Control, events: JobEvents):
    first = await control.job(suffix="one")
    events.started(first, ["n0/0"], resumed=False)
    events.ingest(first, published(1))
    events.succeeded(first)
    tuned = (await control.sdk.fine_tuning.jobs.retrieve(first)).fine_tuned_model
    again = await control.sdk.fine_tuning.jobs.create(model=tuned, training_file=await control.upload(), suffix="two")
    await control.settle()
    assert jobs.get(control.db, again.id).output_model.startswith("ft:starter:local:two:")


async def test_an_adapter_is_told_of_and_keeps_its_base_in_place(control: Control, events: JobEvents):
    db = control.db
    job_id = await control.job()
    adapter = {"base": "starter", "base_version": "v1", "rank": 8}
    events.started(job_id, ["n0/0"], resumed=False)
    events.ingest(job_id, {**published(10), "adapter": adapter})
    events.succeeded(job_id)
    assert "Published adapter step-10, 1000 bytes, to be served alongside starter v1" in await control.messages(job_id)
    name = jobs.get(db, job_id).output_model
    listed = (await control.http.get("/admin/v1/models", headers=ADMIN)).json()["data"]
    (shown,) = [model for model in listed if model["name"] == name]
    assert shown["adapter"] == {**adapter, "host": "starter"} and shown["versions"][0]["kind"] == "adapter"

    with pytest.raises(openai.ConflictError, match="an adapter on starter v1"):
        await control.sdk.models.delete("starter", extra_headers=ADMIN)
    await control.sdk.models.delete(name)
    assert control.scheduler.unloaded == [f"{name}@step-10"] and control.ops.removed[0][0] == name
    assert (await control.sdk.models.delete("starter", extra_headers=ADMIN)).deleted


async def test_metrics_keep_seconds_of_each_rank(control: Control, events: JobEvents):
    job_id = await control.job()
    events.started(job_id, ["n0/2", "n0/5"], resumed=False)
    events.ingest(job_id, metrics(20, 2.0) | {"rank_seconds": [0.5, 0.8]})
    assert job_records.metric_at(control.db, job_id, 20).rank_seconds == [0.5, 0.8]


async def test_a_full_disk_costs_the_table_and_not_the_success(
    control: Control, events: JobEvents, monkeypatch: pytest.MonkeyPatch
):
    """It was raised into the round of the scheduler's loop that told of the end, and into every round after it."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job_id = await control.job()
    events.started(job_id, ["n0/0"], resumed=False)
    events.ingest(job_id, metrics(1, 2.0))
    events.ingest(job_id, published(1))
    monkeypatch.setattr(results, "make", full)
    events.succeeded(job_id)
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "succeeded" and job.fine_tuned_model and job.result_files == []
    said = "The table of its steps could not be written: No space left on device."
    assert any(text.startswith(said) for text in await control.messages(job_id))


async def test_a_table_whose_row_is_not_written_leaves_no_bytes(control: Control, monkeypatch: pytest.MonkeyPatch):
    db, folder = control.db, control.context.files_dir
    monkeypatch.setattr(results.files, "insert", Mock(side_effect=sqlite3.OperationalError))
    with pytest.raises(sqlite3.OperationalError):
        results.make(db, folder, b"step", "step_metrics.csv", owner="ann")
    assert list(folder.iterdir()) == []


async def test_job_success_ends_with_a_verdict(control: Control, events: JobEvents):
    job_id = await control.job(hyperparameters={"n_epochs": 5})
    events.started(job_id, ["n0/0"], resumed=False)
    for step in range(1, 21):
        events.ingest(job_id, metrics(step, 2.0 / step))
    events.ingest(job_id, published(20))
    await events.will_succeed(job_id)
    events.succeeded(job_id)
    shown = (await control.sdk.fine_tuning.jobs.retrieve(job_id)).to_dict()
    assert shown["status"] == "succeeded" and shown["verdict"]["code"] in ("learned", "still_falling")
    told = [event.message for event in (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=4)).data]
    assert shown["verdict"]["text"] in told
    assert (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}", headers=ADMIN)).json()["verdict"] == shown[
        "verdict"
    ]


async def test_job_best_version_is_judged_up_to_its_step(control: Control, events: JobEvents):
    job_id = await control.job(hyperparameters={"n_epochs": 2})
    events.started(job_id, ["n0/0"], resumed=False)
    events.ingest(job_id, {"event": "validation", "step": 0, "loss": 2.0})
    for step in range(1, 21):
        events.ingest(job_id, metrics(step, 2.0 - step / 20))
    for step, loss in ((10, 1.2), (20, 3.0)):
        events.ingest(job_id, {"event": "validation", "step": step, "loss": loss})
    events.ingest(job_id, published(10))
    events.succeeded(job_id)
    assert jobs.get(control.db, job_id).verdict["code"] in ("generalises", "still_falling")


async def test_job_with_equal_rewards_warns_and_fails(control: Control, events: JobEvents):
    job_id = await control.job()
    jobs.update(control.db, job_id, method="reinforcement")
    events.started(job_id, ["n0/0"], resumed=False)
    for step in range(1, 21):
        events.ingest(job_id, metrics(step, 0.0) | {"train_mean_reward": 1.0, "equal_rewards": 1.0})
    warned = [e for e in (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=100)).data if e.level == "warn"]
    assert len(warned) == 1
    events.ingest(job_id, published(20))
    events.succeeded(job_id)
    failed = jobs.get(control.db, job_id)
    assert (failed.phase, failed.error["code"]) == ("failed", "nothing_trained")
    assert len(failed.result_files) == 1
