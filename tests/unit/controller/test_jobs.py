"""/v1/fine_tuning/jobs through the OpenAI SDK: the life of a job as the API sees it, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.controller.app import create_app
from appliance.controller.files import storage
from appliance.controller.jobs.events import JobEvents
from appliance.controller.jobs.validation import VALIDATIONS, JobValidation
from appliance.store import database
from appliance.store.objects import files, jobs, models
from appliance.store.records import keys
from tests.simulator.control_plane import change, grading_of
from tests.train_support.tiny import tokenizer
from tests.unit.controller.conftest import ADMIN, Control, chat_lines, insert_model
from train.methods.methods import METHODS


async def test_a_job_is_validated_and_queued_with_auto_worked_out(control: Control):
    file_id, held_out = await control.upload(), await control.upload(chat_lines(first=100))
    made = await control.sdk.fine_tuning.jobs.create(
        model="starter",
        training_file=file_id,
        validation_file=held_out,
        suffix="maths",
        seed=7,
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 4}}},
        extra_body={"max_devices": 4, "priority": -3},
    )
    assert made.status == "validating_files" and made.fine_tuned_model is None and made.error is None
    assert made.hyperparameters.n_epochs == "auto"
    await control.settle()
    job = await control.sdk.fine_tuning.jobs.retrieve(made.id)
    assert job.status == "queued" and job.seed == 7 and job.metadata == {"team": "a"}
    assert (job.training_file, job.validation_file) == (file_id, held_out)
    assert isinstance(job.hyperparameters.n_epochs, int) and job.hyperparameters.batch_size == 4
    assert job.method.supervised.hyperparameters.n_epochs == job.hyperparameters.n_epochs
    assert await control.messages(made.id) == [
        f"Created fine-tuning job: {made.id}",
        "Files validated, 12 training examples, moving job to queued state",
    ]
    row = jobs.get(control.db, made.id)
    assert row.output_model.startswith("ft:starter:local:maths:") and len(row.output_model.split(":")[-1]) == 8
    assert row.allowed_sizes == [1, 2, 4] and row.priority == -3 and row.max_devices == 4
    folder = control.context.jobs_dir / made.id
    assert len((folder / "train.jsonl").read_text().splitlines()) == 12
    assert (folder / "valid.jsonl").exists()
    assert any(made.id in reason for reason in control.scheduler.nudges)


@pytest.mark.parametrize("spaces", ["", " "])
async def test_job_validation_file_equal_to_training_file_fails(control: Control, spaces):
    held_out = await control.upload(chat_lines().replace(b": ", f":{spaces}".encode()))
    job_id = await control.job(validation_file=held_out)
    error = (await control.sdk.fine_tuning.jobs.retrieve(job_id)).error
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")


async def test_job_validation_file_sharing_rows_warns(control: Control):
    job_id = await control.job(validation_file=await control.upload(chat_lines(11)))
    assert jobs.get(control.db, job_id).phase == "queued" and len(await warnings(control, job_id)) == 1


async def test_job_learning_rate_far_above_automatic_is_refused(control: Control):
    usual = jobs.get(control.db, await control.job()).resolved["learning_rate"]
    assert not await warnings(control, await control.job(hyperparameters={"learning_rate_multiplier": 9}))
    assert len(await warnings(control, await control.job(hyperparameters={"learning_rate_multiplier": 11}))) == 1
    assert len(await warnings(control, await control.job(hyperparameters={"learning_rate": 50 * usual}))) == 1
    for name, value in (("learning_rate_multiplier", 10_000), ("learning_rate", 1)):
        with pytest.raises(openai.BadRequestError) as refused:
            await control.job(hyperparameters={name: value})
        assert refused.value.param == f"hyperparameters.{name}"


async def warnings(control: Control, job_id: str) -> list[str]:
    events = await control.sdk.fine_tuning.jobs.list_events(job_id, limit=100)
    return [event.message for event in events.data if event.level == "warn"]


async def test_the_methods_of_the_box_are_listed_with_what_each_takes(control: Control):
    told = {one["name"]: one for one in (await control.http.get("/v1/fine_tuning/methods")).json()["data"]}
    assert told.keys() == METHODS.keys()
    assert [option["name"] for option in told["dpo"]["options"]] == ["beta"]
    assert (told["supervised"]["takes"], told["distillation"]["takes"]) == ([], ["teacher"])


async def test_extra_hyperparameters_pass_through_and_come_back(control: Control):
    job_id = await control.job(hyperparameters={"lora_rank": 8, "zero_stage": 2, "n_epochs": 2, "precision": "fp32"})
    row = jobs.get(control.db, job_id)
    assert (row.resolved["lora_rank"], row.resolved["zero_stage"], row.resolved["full"]) == (8, 2, False)
    shown = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}")).json()
    assert shown["hyperparameters"]["lora_rank"] == 8 and shown["hyperparameters"]["precision"] == "fp32"


async def test_devices_that_share_a_model_come_in_groups(control: Control):
    asked = {"tensor_parallel": 2, "batch_size": 4}
    made = jobs.get(control.db, await control.job(hyperparameters=asked))
    assert made.resolved["tensor_parallel"] == 2 and made.allowed_sizes == [2, 4, 8]
    with pytest.raises(openai.BadRequestError, match="each over 2 devices .tensor_parallel., divides into 2, 4, 8"):
        await control.job(hyperparameters=asked, extra_body={"allowed_sizes": [1, 3]})


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "from 1 to 50"),
        ({"hyperparameters": {"n_epochs": "many"}}, "hyperparameters.n_epochs", "'many'"),
        ({"hyperparameters": {"lr_scheduler": "step"}}, "hyperparameters.lr_scheduler", "wsd"),
        ({"hyperparameters": {"publish": "best"}}, "hyperparameters.publish", "`validation_file`"),
        (
            {"hyperparameters": {"early_stopping_patience": 2}},
            "hyperparameters.early_stopping_patience",
            "`validation_f",
        ),
        ({"hyperparameters": {"eval_interval": 5}}, "hyperparameters.eval_interval", "`validation_file`"),
        ({"hyperparameters": {"n_epoch": 3}}, "hyperparameters.n_epoch", "known name"),
        ({"hyperparameters": {"zero_stage": 4}}, "hyperparameters.zero_stage", "from 0 to 3"),
        ({"hyperparameters": {"batch_size": True}}, "hyperparameters.batch_size", "True"),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"lora_rank": -1}}}},
            "method.supervised.hyperparameters.lora_rank",
            "-1",
        ),
        (
            {
                "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
                "hyperparameters": {"n_epochs": 2},
            },
            "hyperparameters.n_epochs",
            "give it once",
        ),
        ({"method": {"type": "dpo", "ppo": {}}}, "method.ppo", "Unrecognized"),
        (
            {"method": {"type": "dpo", "supervised": {"hyperparameters": {"n_epochs": 1}}}},
            "method.supervised",
            "reads 'method.dpo'",
        ),
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo", "reads 'method.supervised'"),
        ({"method": {"type": "distillation", "supervised": {}}}, "method.supervised", "'method.distillation'"),
        ({"method": {"type": "dpo", "dpo": {"beta": 0.1}}}, "method.dpo.beta", "Unrecognized"),
        ({"method": {"type": "dpo", "dpo": dict.fromkeys("edcbazyx", 1)}}, "method.dpo.a", "Unrecognized"),
        ({"method": {"type": "dpo"} | dict.fromkeys(("ppo", "orpo", "kto", "ipo"), {})}, "method.ipo", "Unrecognized"),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"n_epoch": 1}}}},
            "method.dpo.hyperparameters.n_epoch",
            "k",
        ),
        (
            {"method": {"type": "supervised", "supervised": {"n_epochs": 1}}},
            "method.supervised.n_epochs",
            "Unrecognized",
        ),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}},
            "method.dpo.hyperparameters.beta",
            "to 2",
        ),
        ({"method": {"type": "reinforcement"}}, "method.reinforcement.grader", "Missing required parameter"),
        ({"method": {"type": "magic"}}, "method.type", "not supported yet; 'supervised' and"),
        ({"suffix": "<>!"}, "suffix", "letter"),
        ({"suffix": "a" * 65}, "suffix", "64"),
        ({"suffix": "客" * 65}, "suffix", "64"),
        ({"suffix": "！🎉"}, "suffix", "letter"),
        ({"suffix": "☀\ufe0f"}, "suffix", "letter"),
        ({"suffix": ""}, "suffix", "letter"),
        ({"seed": -1}, "seed", "-1"),
        ({"seed": 2**40}, "seed", "less than"),
        ({"seed": "7"}, "seed", "integer"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata", "17 pairs"),
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 64, "64 characters"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"metadata": {"k": 1}}, "metadata.k", "string"),
        ({"model": "no-such-model"}, "model", "does not exist"),
        ({"model": 5}, "model", "string"),
        ({"training_file": "/etc/passwd"}, "training_file", "not a file on this box"),
        ({"training_file": "../../etc/passwd"}, "training_file", "not a file on this box"),
        ({"validation_file": "file-none"}, "validation_file", "not a file on this box"),
        ({"integrations": [{"type": "mlflow"}]}, "integrations.0.type", "wandb"),
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "a/b"}}]},
            "integrations.0.wandb.project",
            "pattern",
        ),
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "p", "tags": [""]}}]},
            "integrations.0.wandb.tags.0",
            "at least 1 character",
        ),
        ({"max_devices": 0}, "max_devices", "greater than or equal to 1; 0 was given"),
        ({"min_devices": 4, "max_devices": 2}, "min_devices", "min <= max"),
        ({"colour": "red"}, "colour", "Unrecognized"),
    ],
)
async def test_bad_fields_are_named(control: Control, fields: dict[str, Any], param: str, says: str):
    body = {"model": "starter", "training_file": await control.upload()} | fields
    answer = await control.http.post("/v1/fine_tuning/jobs", json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), answer.text
    assert error["param"] == param and says in error["message"], error
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({f"k{n}": "v" for n in range(17)}, "object_above_max_properties"),
        ({"k" * 65: "v"}, "string_above_max_length"),
        ({"k": "v" * 513}, "string_above_max_length"),
    ],
)
async def test_metadata_beyond_openais_bounds_is_refused_with_its_codes(control: Control, metadata: Any, code: str):
    with pytest.raises(openai.BadRequestError) as refused:
        await control.job(metadata=metadata)
    assert refused.value.code == code


async def test_missing_fields_and_files_of_other_purposes_are_named(control: Control):
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: training_fle") as caught:
        await control.sdk.post("/fine_tuning/jobs", body={"model": "starter", "training_fle": "file-x"}, cast_to=object)
    assert (caught.value.param, caught.value.code) == ("training_fle", "unknown_parameter"), "it is missing, too"
    with pytest.raises(openai.BadRequestError, match="Missing required parameter: 'training_file'"):
        await control.sdk.post("/fine_tuning/jobs", body={"model": "starter"}, cast_to=object)
    other = await control.upload(b"x", "a", "assistants")
    with pytest.raises(openai.BadRequestError, match="expected purpose 'fine-tune'"):
        await control.sdk.fine_tuning.jobs.create(model="starter", training_file=other)


async def test_an_embedding_model_cannot_be_tuned(control: Control):
    insert_model(control.db, "embedder", task="embed")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        await control.sdk.fine_tuning.jobs.create(model="embedder", training_file=await control.upload())


async def test_hyperparameters_have_a_size(control: Control, monkeypatch: pytest.MonkeyPatch):
    """Two hundred jobs of 8 MB took the scheduler seconds in each of its rounds."""
    monkeypatch.setattr("appliance.controller.jobs.requests.MOST_BYTES", 1000)
    with pytest.raises(openai.BadRequestError, match="at most 1000 are allowed"):
        await control.sdk.fine_tuning.jobs.create(
            model="starter",
            training_file=await control.upload(),
            extra_body={"hyperparameters": {"lora_targets": "a" * 1000}},
        )


async def test_a_quantised_model_cannot_be_tuned(control: Control):
    insert_model(control.db, "awq", info={"quantized": True})
    with pytest.raises(openai.BadRequestError, match="quantised: they can be served, not trained"):
        await control.sdk.fine_tuning.jobs.create(model="awq", training_file=await control.upload())


async def test_bad_data_fails_the_job_with_line_numbers_before_any_device(control: Control):
    job_id = await control.job(training_file=await control.upload(chat_lines(3) + b"oops\n{}\n"))
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "failed" and job.finished_at is not None
    assert job.error.code == "invalid_training_file" and job.error.param == "training_file"
    assert "line 4" in job.error.message and "line 5" in job.error.message
    said = await control.messages(job_id)
    assert any(text.startswith("line 4: is not valid JSON") for text in said)
    assert jobs.get(control.db, job_id).started_s is None


async def test_a_file_in_another_shape_is_converted_and_that_is_no_warning(control: Control):
    job_id = await control.job(training_file=await control.upload(b'{"question": "q", "answer": "a"}\n' * 12))
    events = await control.sdk.fine_tuning.jobs.list_events(job_id)
    level = {event.message.partition(": ")[2]: event.level for event in events.data}
    assert level["converted 12 examples from the question_answer shape to chat"] == "info"


async def test_error_of_bad_lines_says_each_cause_once_and_where_all_are_listed(control: Control):
    file_id = await control.upload(chat_lines(3) + b"oops\n" * 120)
    job_id = await control.job(training_file=file_id)
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    told = f"and 20 more (GET /v1/fine_tuning/jobs/{job_id}/errors)"
    assert "120 bad example(s): line 4 and 99 more: " in job.error.message and told in job.error.message
    details = (await control.sdk.files.retrieve(file_id)).status_details
    assert f"and 20 more (GET /v1/files/{file_id}/errors)" in details and "line 5" not in details
    for url in (f"/v1/fine_tuning/jobs/{job_id}/errors", f"/v1/files/{file_id}/errors"):
        found = (await control.http.get(url)).json()
        assert found["total"] == 120 and found["has_more"] and len(found["data"]) == 100
        first = found["data"][0]
        assert first["object"] == "file.error" and first["line"] == 4 and "not valid JSON" in first["reason"]
        assert [row["line"] for row in found["data"]] == list(range(4, 104))
    good = await control.upload()
    found = (await control.http.get(f"/v1/files/{good}/errors")).json()
    assert found == {"object": "list", "data": [], "total": 0, "has_more": False}


PAIR = {
    "input": {"messages": [{"role": "user", "content": "hi"}]},
    "preferred_output": [{"role": "assistant", "content": "a"}],
    "non_preferred_output": [{"role": "assistant", "content": "b"}],
}


async def test_a_job_of_pairs_is_validated_and_shows_its_beta(control: Control):
    content = (json.dumps(PAIR) + "\n").encode() * 12
    job_id = await control.job(
        training_file=await control.upload(content),
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto", "batch_size": 4, "n_epochs": 2}}},
    )
    row = jobs.get(control.db, job_id)
    assert (row.phase, row.resolved["options"], row.resolved["n_epochs"]) == ("queued", {"beta": 0.1}, 2)
    lines = (control.context.jobs_dir / job_id / "train.jsonl").read_text().splitlines()
    assert len(lines) == 12 and len(json.loads(lines[0])["sequences"]) == 2
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    shown = job.method.dpo.hyperparameters
    assert (shown.beta, shown.batch_size, shown.n_epochs, shown.learning_rate_multiplier) == (0.1, 4, 2, 1.0)
    assert job.method.supervised is None and job.hyperparameters.n_epochs is None


async def test_pairs_are_refused_by_line(control: Control):
    same = PAIR | {"non_preferred_output": PAIR["preferred_output"]}
    content = "".join(json.dumps(row) + "\n" for row in [*[PAIR] * 11, same]).encode()
    file_id = await control.upload(content)
    file = await control.sdk.files.retrieve(file_id)
    assert file.status == "error" and "line 12: both outputs are the same" in file.status_details
    job_id = await control.job(training_file=file_id, method={"type": "dpo"})
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.status == "failed" and "line 12" in job.error.message


async def test_a_file_of_a_form_that_the_method_does_not_take_is_refused_with_the_request(control: Control):
    pairs = await control.upload(b"".join(json.dumps(PAIR).encode() + b"\n" for _ in range(12)))
    chats = await control.upload()
    asked = await control.upload(prompts())
    graded = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    for method, fields, at_fault, told in (
        ({"type": "dpo"}, {"training_file": chats}, "training_file", "'chat'; the method 'dpo' wants pairs"),
        (
            {"type": "supervised"},
            {"training_file": pairs},
            "training_file",
            "has preference pairs; the method 'supervised'",
        ),
        (graded, {"training_file": chats}, "training_file", "'chat'; the method 'reinforcement' wants"),
        ({"type": "supervised"}, {"training_file": asked}, "training_file", "ends with a message from the user"),
        (
            {"type": "dpo"},
            {"training_file": pairs, "validation_file": chats},
            "validation_file",
            "'chat'; the method 'dpo' wants pairs",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await control.job(**fields, extra_body={"method": method})
        assert (refused.value.param, refused.value.code) == (at_fault, f"invalid_{at_fault}")
        assert told in refused.value.message
    assert jobs.list_in_phase(control.db, "validating") == []


@pytest.mark.usefixtures("checked_here")
async def test_pairs_of_which_max_length_leaves_nothing_are_refused_by_line(control: Control, tmp_path: Path):
    tokenizer().save_pretrained(tmp_path / "base")
    models.update_version(control.db, "starter", "v1", disk_path=str(tmp_path / "base"))
    long = PAIR | {"input": {"messages": [{"role": "user", "content": "hi " * 200}]}}
    short, cut = [
        await control.upload("".join(json.dumps(row) + "\n" for row in rows).encode())
        for rows in ([PAIR] * 12, [*[PAIR] * 11, long])
    ]
    dpo = {"type": "dpo", "dpo": {"hyperparameters": {"max_length": 64}}}
    for given, at_fault in (({"training_file": cut}, "training_file"), ({"validation_file": cut}, "validation_file")):
        job_id = await control.job(**{"training_file": short} | given, extra_body={"method": dpo})
        job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
        assert (job.status, job.error.param) == ("failed", at_fault)
        (bad,) = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}/errors")).json()["data"]
        assert bad["line"] == 12 and "of max_length 64 tokens nothing is left" in bad["reason"]
    # That the short one fits was seen: it is the training file of the job whose validation file is at fault.
    job_id = await control.job(training_file=cut, extra_body={"method": {"type": "dpo"}})
    assert jobs.get(control.db, job_id).phase == "queued", await control.messages(job_id)


@pytest.mark.usefixtures("checked_here")
async def test_validation_keeps_a_change_made_while_it_counts_tokens(control: Control, tmp_path: Path, monkeypatch):
    tokenizer().save_pretrained(tmp_path / "base")
    models.update_version(control.db, "starter", "v1", disk_path=str(tmp_path / "base"))

    async def check_cut(_: object, row: jobs.JobRow, *__: object) -> None:
        answer = await control.http.patch(f"/admin/v1/jobs/{row.id}", headers=ADMIN, json={"max_devices": 2})
        assert answer.status_code == 200

    monkeypatch.setattr(JobValidation, "_check_cut", check_cut)
    pairs = await control.upload((json.dumps(PAIR) + "\n").encode() * 12)
    job_id = await control.job(
        training_file=pairs, hyperparameters={"batch_size": 4}, extra_body={"method": {"type": "dpo"}}
    )
    row = jobs.get(control.db, job_id)
    assert (row.phase, row.max_devices, row.allowed_sizes) == ("queued", 2, [1, 2])


async def test_pause_resume_and_cancel_tell_the_truth_in_events(control: Control):
    job_id = await control.job()
    api = control.sdk.fine_tuning.jobs
    assert (await api.pause(job_id)).status == "queued"
    assert (await api.pause(job_id)).status == "queued"
    assert jobs.get(control.db, job_id).wanted == "pause"
    shown = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}", headers={"x-appliance-scopes": "admin"})).json()
    assert (shown["status"], shown["phase"]) == ("queued", "paused")
    assert (await api.resume(job_id)).status == "queued"
    cancelled = await api.cancel(job_id)
    assert cancelled.status == "cancelled" and cancelled.finished_at is not None
    assert (await api.cancel(job_id)).status == "cancelled"
    said = await control.messages(job_id)
    assert [text.split(" by")[0] for text in said[-3:]] == [
        "Fine-tuning job paused",
        "Fine-tuning job resumed",
        "Fine-tuning job cancelled",
    ]


async def test_cancel_of_a_validating_job_ends_its_check(control: Control, monkeypatch: pytest.MonkeyPatch):
    began, ended = threading.Event(), threading.Event()

    def check(*given: Any) -> None:
        heard, deadline_s = given[-1], time.monotonic() + 30
        began.set()
        try:
            while time.monotonic() < deadline_s:
                heard(1, 0.5)
                time.sleep(0.001)
        except InterruptedError:
            ended.set()

    file_id = await control.upload()
    monkeypatch.setattr(storage, "APART_FROM_BYTES", 0)
    monkeypatch.setattr(storage, "check_apart", check)
    made = await control.sdk.fine_tuning.jobs.create(model="starter", training_file=file_id)
    assert await asyncio.to_thread(began.wait, 30)
    await control.sdk.fine_tuning.jobs.cancel(made.id)
    assert await asyncio.to_thread(ended.wait, 5)


async def test_a_job_with_devices_is_cancelled_by_the_scheduler(control: Control):
    job_id = await control.job()
    jobs.set_phase(control.db, job_id, "running", devices=["n0/0"])
    cancelled = await control.sdk.fine_tuning.jobs.cancel(job_id)
    assert cancelled.status == "cancelled" and cancelled.finished_at is None
    row = jobs.get(control.db, job_id)
    assert (row.phase, row.wanted, row.devices) == ("running", "cancel", ["n0/0"])


async def test_a_suspended_job_is_cancelled_at_once_and_its_snapshot_waits_to_be_given_back(control: Control):
    job_id = await control.job()
    snapshot = {"step": 3, "path": "/dev/shm/s"}
    jobs.set_phase(control.db, job_id, "suspended", snapshot=snapshot)
    cancelled = await control.sdk.fine_tuning.jobs.cancel(job_id)
    assert cancelled.status == "cancelled" and cancelled.finished_at is not None
    assert [(row.id, row.snapshot) for row in jobs.list_left_snapshots(control.db)] == [(job_id, snapshot)]
    jobs.update(control.db, job_id, snapshot=None)
    assert jobs.list_left_snapshots(control.db) == []


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
async def test_a_finished_job_cannot_be_moved(control: Control, verb: str):
    job_id = await control.job()
    jobs.set_phase(control.db, job_id, "failed", error={"code": "x", "message": "y", "param": None})
    answer = await control.http.post(f"/v1/fine_tuning/jobs/{job_id}/{verb}")
    assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "invalid_job_state"
    assert "failed" in answer.json()["error"]["message"]


async def test_unknown_jobs_are_not_found_on_every_route(control: Control):
    for method, path in [
        ("GET", ""),
        ("POST", "/cancel"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/events"),
        ("GET", "/checkpoints"),
    ]:
        answer = await control.http.request(method, f"/v1/fine_tuning/jobs/ftjob-none{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "fine_tune_not_found")


async def test_lists_page_and_filter_by_metadata(control: Control):
    file_id = await control.upload()
    ids = [await control.job(training_file=file_id, metadata={"n": str(n % 2)}) for n in range(4)]
    bare = await control.job(training_file=file_id)
    api = control.sdk.fine_tuning.jobs
    assert [job.id async for job in api.list(limit=2)] == [bare, *ids[::-1]]
    assert [job.id async for job in api.list(limit=1, metadata={"n": "1"})] == [ids[3], ids[1]]
    both = await control.job(training_file=file_id, metadata={"n": "1", "of": "two"})
    assert [job.id async for job in api.list(metadata={"n": "1", "of": "two"})] == [both]
    assert [job.id async for job in api.list(metadata={"n": "0", "of": "two"})] == []
    await api.cancel(both)
    nulls = await control.http.get("/v1/fine_tuning/jobs?metadata=null")
    assert [job["id"] for job in nulls.json()["data"]] == [bare]
    for query in ("metadata=null&metadata[n]=1", "metadata=1"):
        assert (await control.http.get(f"/v1/fine_tuning/jobs?{query}")).status_code == 400
    events = [event.message async for event in api.list_events(ids[0], limit=1)]
    assert len(events) == 2 and events[-1].startswith("Created")


@pytest.mark.parametrize(
    "query",
    [
        "limit=-1",
        "limit=x",
        "limit=10001",
        "limit=1e3",
        "after=ftjob-none",
        "after=" + "a" * 300,
        "limit=" + "9" * 5000,
    ],
)
async def test_bad_pagination_is_named(control: Control, query: str):
    for path in ("/v1/fine_tuning/jobs", "/v1/files"):
        answer = await control.http.get(f"{path}?{query}")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, query.split("=")[0]), answer.text
        assert len(error["message"]) < 600


@pytest.mark.parametrize(
    ("path", "query", "code"),
    [
        ("/v1/batches", "limit=101", "integer_above_max_value"),
        ("/v1/chat/completions", "limit=101", "integer_above_max_value"),
        ("/v1/files", "limit=0", None),
        ("/v1/files", "limit=10001", "integer_above_max_value"),
        ("/v1/batches", "limit=-1", "integer_below_min_value"),
        ("/v1/batches", "limit=0", None),
        ("/v1/fine_tuning/jobs", "limit=1000&api-version=2024-10-21", None),
        ("/v1/evals", "limit=1000", None),
    ],
)
async def test_a_list_is_as_long_as_openai_allows(control: Control, path: str, query: str, code: str | None):
    answer = await control.http.get(f"{path}?{query}")
    if code is None:
        assert (answer.status_code, answer.json()["object"]) == (200, "list")
    else:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "limit") and error["code"] == code


async def test_an_event_of_another_job_is_no_cursor(control: Control):
    first, second = await control.job(), await control.job()
    foreign = (await control.sdk.fine_tuning.jobs.list_events(second)).data[0].id
    with pytest.raises(openai.BadRequestError, match="is in this list"):
        await control.sdk.fine_tuning.jobs.list_events(first, after=foreign)


async def test_a_restart_takes_up_validation_and_a_vanished_file_fails_the_job(control: Control):
    job_id = await control.job()
    # As a controller that was killed between creation and validation left it.
    control.db.execute("UPDATE jobs SET phase = 'validating', resolved = NULL WHERE id = ?", [job_id])
    await control.context.tasks.stop()
    control.context.tasks.start(VALIDATIONS, job_id, None)
    again = create_app(control.context)
    async with again.router.lifespan_context(again):
        await control.context.tasks.idle(VALIDATIONS)
    assert jobs.get(control.db, job_id).phase == "queued"

    control.db.execute("UPDATE jobs SET phase = 'validating' WHERE id = ?", [job_id])
    files.delete(control.db, jobs.get(control.db, job_id).training_file)
    control.context.tasks.start(VALIDATIONS, job_id, None)
    again = create_app(control.context)
    async with again.router.lifespan_context(again):
        await control.context.tasks.idle(VALIDATIONS)
    row = jobs.get(control.db, job_id)
    assert row.phase == "failed" and row.error["code"] == "file_unreadable"


async def test_deleting_the_file_afterwards_does_not_hurt_the_job(control: Control):
    file_id = await control.upload()
    job_id = await control.job(training_file=file_id)
    await control.sdk.files.delete(file_id)
    assert jobs.get(control.db, job_id).phase == "queued"
    assert (control.context.jobs_dir / job_id / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("mode", "level", "said"),
    [(None, "warn", "not contacted"), ("offline", "info", "wandb sync"), ("online", "info", "its address follows")],
)
async def test_a_wandb_integration_is_recorded_and_it_is_said_what_becomes_of_it(
    control: Control, mode: Any, level: str, said: str
):
    """Also where the box has no W&B: a script that names it runs here unchanged."""
    change(control.context, wandb_mode=mode)
    file_id = await control.upload()
    made = await control.sdk.fine_tuning.jobs.create(
        model="starter", training_file=file_id, integrations=[{"type": "wandb", "wandb": {"project": "p"}}]
    )
    assert made.integrations[0].wandb.project == "p"
    events = (await control.sdk.fine_tuning.jobs.list_events(made.id, limit=100)).data
    assert [event.level for event in events if said in event.message] == [level]
    await control.settle()


async def test_a_running_job_is_profiled_and_its_events_say_where_its_time_goes(control: Control):
    job_id = await control.job()
    url = f"/admin/v1/jobs/{job_id}/profile"
    assert (await control.http.post(url, json={"steps": 3})).status_code == 403
    control.http.headers.update(ADMIN)
    refused = await control.http.post(url, json={"steps": 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_running")
    assert (await control.http.post(url, json={"steps": 51})).status_code == 400
    events = JobEvents(control.db, control.context.files_dir, "local")
    events.started(job_id, ["cpu0"], resumed=False)
    assert (await control.http.post(url, json={"steps": 3})).json() == {"id": job_id, "steps": 3}
    assert control.scheduler.profiled == [(job_id, 3)]
    share = {"compute": 1.2, "communication": 0.4, "input": 0.0, "idle": 0.4}
    events.ingest(job_id, {"event": "metrics", "step": 9, "total_steps": 12, "loss": 1.0})
    told = {"event": "profiled", "step": 9, "steps": 3, "seconds": 2.0, "share": share, "operators": []}
    events.ingest(job_id, told | {"trace": "/data/jobs/ftjob-1/profile/trace-9.json.gz", "bytes": 77})
    newest = (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=1)).data[0]
    assert newest.message == "Profiled 3 steps in 2.00 s: compute 60%, communication 20%, input 0%, idle 20%"
    found = newest.data["profile"]
    assert (found["trace"], found["bytes"], found["share"]) == (f"jobs/{job_id}/profile/trace-9.json.gz", 77, share)
    events.ingest(job_id, {"event": "metrics", "step": 10, "total_steps": 12, "loss": 1.0})
    rows = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}/metrics")).json()["data"]
    assert [(row["step"], row["communication"]) for row in rows] == [(9, 0.2), (10, None)]
    series = (await control.http.get("/admin/v1/metrics")).text
    assert f'appliance_job_communication_ratio{{job="{job_id}",model="starter"}} 0.2' in series


GRADER: Any = {
    "type": "string_check",
    "name": "same",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


def prompts(count: int = 12) -> bytes:
    rows = [{"messages": [{"role": "user", "content": f"{n} and 2?"}], "answer": str(n + 2)} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def test_a_job_of_rewards_is_validated_and_shows_its_grader(control: Control):
    hyperparameters = {
        "compute_multiplier": 0.5,
        "eval_samples": "auto",
        "batch_size": 4,
        "reasoning_effort": "medium",
    }
    job_id = await control.job(
        training_file=await control.upload(prompts()),
        validation_file=await control.upload(prompts(3)),
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},
    )
    row = jobs.get(control.db, job_id)
    assert row.phase == "queued", row.reason
    assert row.resolved["batch_size"] == 4 and row.resolved["options"]["group"] == 4
    lines = (control.context.jobs_dir / job_id / "train.jsonl").read_text().splitlines()
    assert len(lines) == 12 and json.loads(lines[2])["item"] == {"answer": "4"}
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.method.type == "reinforcement" and job.method.reinforcement.grader.name == "same"
    shown = job.method.reinforcement.hyperparameters
    assert (shown.compute_multiplier, shown.eval_samples, shown.batch_size) == (0.5, 1, 4)
    assert shown.reasoning_effort == "medium"
    listed = await control.sdk.fine_tuning.jobs.list()
    assert listed.data[0].method.reinforcement.grader.reference == "{{item.answer}}"


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_a_job_of_rewards_keeps_the_form_that_its_answers_are_held_to(control: Control):
    wanted = form({"type": "object", "properties": {"pattern": {"enum": [{"pattern": "x"}]}}})
    job_id = await control.job(
        training_file=await control.upload(prompts()),
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "response_format": wanted}},
    )
    assert jobs.get(control.db, job_id).phase == "queued"
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert job.method.reinforcement.response_format == wanted
    plain = await control.job(
        training_file=await control.upload(prompts()),
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "response_format": {"type": "text"}}},
    )
    shown = (await control.sdk.fine_tuning.jobs.retrieve(plain)).method.reinforcement
    assert shown.to_dict().keys() == {"grader", "hyperparameters"}


@pytest.mark.parametrize(
    "block, param, says",
    [
        ({}, "method.reinforcement.grader", "Missing required parameter"),
        ({"grader": GRADER | {"operation": "is"}}, "method.reinforcement.grader.operation", "Invalid"),
        (
            {"grader": {"type": "python", "name": "p", "source": "def grade(sample, item) return 1"}},
            "method.reinforcement.grader.source",
            "SyntaxError: expected ':'",
        ),
        ({"grader": GRADER | {"input": "{{ answer }}"}}, "method.reinforcement.grader.input", "begins with neither"),
        (
            {"grader": GRADER, "response_format": {"type": "regex"}},
            "method.reinforcement.response_format",
            "text, json_object or json_schema",
        ),
        (
            {"grader": GRADER, "response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "method.reinforcement.response_format.json_schema.schema",
            "Missing",
        ),
        (
            {
                "grader": GRADER,
                "response_format": form({"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}),
            },
            "method.reinforcement.response_format",
            "do not enforce `properties.a.pattern`",
        ),
        (
            {"grader": GRADER, "response_format": form({"type": "array", "maxItems": 1 << 31})},
            "method.reinforcement.response_format",
            "items in all",
        ),
        (
            # Its ranks were started, and the job failed with words of xgrammar.
            {"grader": GRADER, "response_format": form({"properties": {"a": {"type": "nope"}}})},
            "method.reinforcement.response_format.json_schema.schema",
            "it is no JSON schema at properties.a.type: 'nope'",
        ),
        (
            {"grader": GRADER, "hyperparameters": {"reasoning_effort": "much"}},
            "method.reinforcement.hyperparameters.reasoning_effort",
            "one of default",
        ),
        ({"grader": GRADER, "beta": 1}, "method.reinforcement.beta", "Unrecognized request argument"),
    ],
)
async def test_what_a_job_of_rewards_cannot_be_is_named(control: Control, block: Any, param: str, says: str):
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        await control.sdk.fine_tuning.jobs.create(
            model="starter",
            training_file=await control.upload(prompts()),
            method={"type": "reinforcement", "reinforcement": block},
        )
    assert refused.value.param == param
    assert jobs.list_unfinished(control.db) == []


async def test_no_engine_samples_answers_of_a_form(control: Control):
    control.context.sizes.adapter_rank_limit = lambda row: 32
    by_engine = {"rollouts": "engine", "lora_rank": 8}
    block = {"grader": GRADER, "response_format": form({}), "hyperparameters": by_engine}
    with pytest.raises(openai.BadRequestError, match="needs 'rollouts' to be 'ranks'") as refused:
        await control.sdk.fine_tuning.jobs.create(
            model="starter",
            training_file=await control.upload(prompts()),
            method={"type": "reinforcement", "reinforcement": block},
        )
    assert refused.value.param == "method.reinforcement.response_format"


@pytest.mark.parametrize(("rollouts", "status"), [("engine", 403), ("ranks", 200)])
async def test_engine_rollouts_need_the_scope_inference(control: Control, rollouts: str, status: int):
    control.context.sizes.adapter_rank_limit = lambda row: 32
    control.as_key("tuner", scopes=["fine_tuning"])
    block = {"grader": GRADER, "hyperparameters": {"rollouts": rollouts, "lora_rank": 8}}
    method = {"type": "reinforcement", "reinforcement": block}
    body = {"model": "starter", "training_file": await control.upload(prompts()), "method": method}
    assert (await control.http.post("/v1/fine_tuning/jobs", json=body)).status_code == status


@pytest.mark.parametrize("scopes", [["inference", "fine_tuning"], ["admin"]])
@pytest.mark.parametrize("name", ["nosuch", "starter@v9"])
async def test_a_job_whose_judge_is_not_there_is_refused_before_its_data_is_read(
    control: Control, scopes: list[str], name: str
):
    """An admin's key sees every model: its graders waited five minutes for each answer of one that nobody has."""
    control.as_key("ann", scopes=scopes)
    messages = [{"role": "user", "content": "{{sample.output_text}}"}]
    judge = {"type": "score_model", "name": "judge", "model": name, "input": messages}
    both = {"type": "multi", "name": "both", "calculate_output": "judge", "graders": judge}
    for grader in (judge, both):
        with pytest.raises(openai.NotFoundError, match=f"'{name}' does not exist") as refused:
            await control.sdk.fine_tuning.jobs.create(
                model="starter",
                training_file=await control.upload(prompts()),
                method={"type": "reinforcement", "reinforcement": {"grader": grader}},
            )
        assert (refused.value.code, refused.value.param) == ("model_not_found", "method.reinforcement.grader")
    assert jobs.list_unfinished(control.db) == []


async def test_answers_of_a_job_are_graded_by_its_grader(control: Control):
    key_id = control.as_key("ann", owner="ann")
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    job_id = await control.job(training_file=await control.upload(prompts()), method=method)
    grade = grading_of(control.context)
    asked = {"samples": [{"text": text, "item": {"answer": "4"}} for text in ("4", "5")] + [{"text": "4", "item": {}}]}
    told = await grade(job_id, asked)
    assert told["rewards"] == [1.0, 0.0, 0.0]
    assert told["errors"][:2] == ["", ""] and "answer" in told["errors"][2]
    keys.revoke(control.db, key_id)
    assert "revoked" in (await grade(job_id, asked))["failed"]
    assert "deleted" in (await grade("ftjob-none", asked))["failed"]


async def test_a_call_of_a_tool_is_graded_and_an_answer_without_one_is_no_error(control: Control):
    control.as_key("ann", owner="ann")
    called = {"input": "{{ sample.output_tools[0].function.arguments.city }}", "reference": "{{ item.answer }}"}
    method = {"type": "reinforcement", "reinforcement": {"grader": {**GRADER, **called}}}
    job_id = await control.job(training_file=await control.upload(prompts()), method=method)
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"city": "4"}'}}
    samples = [{"text": "", "tools": [call], "item": {"answer": "4"}}, {"text": "4", "item": {"answer": "4"}}]
    told = await grading_of(control.context)(job_id, {"samples": samples})
    assert told == {"rewards": [1.0, 0.0], "errors": ["", ""]}


async def test_a_reward_that_nothing_can_be_learnt_from_is_none_and_says_so(control: Control):
    """The loss of its step was no number any more, and the job failed with that, not a word of rewards."""
    grader = {"type": "multi", "name": "far", "calculate_output": "exp(700 * same) - 1", "graders": {"same": GRADER}}
    body = {
        "model": "starter",
        "training_file": await control.upload(prompts()),
        "method": {"type": "reinforcement", "reinforcement": {"grader": grader}},
    }
    job_id = (await control.http.post("/v1/fine_tuning/jobs", json=body)).raise_for_status().json()["id"]
    await control.settle()
    asked = {"samples": [{"text": text, "item": {"answer": "4"}} for text in ("4", "5")]}
    told = await grading_of(control.context)(job_id, asked)
    assert told["rewards"] == [None, 0.0]
    assert told["errors"] == ["the reward is 1.01423e+304: a model can learn from rewards within ±1,000,000,000", ""]


async def test_the_events_of_a_job_of_rewards_say_them(control: Control):
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    job_id = await control.job(training_file=await control.upload(prompts()), method=method)
    ingest = JobEvents(control.db, control.context.files_dir, "box").ingest
    step = {"event": "metrics", "step": 1, "total_steps": 4, "loss": 0.0, "train_mean_reward": 0.25}
    ingest(job_id, step | {"timing": {"step": {"sampling": 1.0, "training": 2.0}}})
    ingest(job_id, {"event": "validation", "step": 1, "total_steps": 4, "mean_reward": 0.5})
    events = (await control.sdk.fine_tuning.jobs.list_events(job_id)).data
    validation, metrics = events[:2]
    assert metrics.message == "Step 1/4: mean reward=0.2500" and metrics.data["timing"]["step"]["sampling"] == 1.0
    assert validation.message == "Step 1/4: validation mean reward=0.5000"
    assert validation.data["valid_mean_reward"] == 0.5 and metrics.data["train_mean_reward"] == 0.25


async def test_list_of_jobs_ends_where_graders_exceed_a_page(control: Control, monkeypatch: pytest.MonkeyPatch):
    grader = GRADER | {"reference": "x" * 3000}
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    file_id = await control.upload(prompts())
    made = [await control.job(training_file=file_id, method=method) for _ in range(3)]
    plain = await control.job()
    monkeypatch.setattr(database, "PAGE_BYTES", 8000)
    first = (await control.http.get("/v1/fine_tuning/jobs")).json()
    assert [job["id"] for job in first["data"]] == [plain, *made[:0:-1]] and first["has_more"]
    rest = (await control.http.get("/v1/fine_tuning/jobs", params={"after": first["last_id"]})).json()
    assert [job["id"] for job in rest["data"]] == made[:1] and not rest["has_more"]


@pytest.mark.parametrize(("scopes", "sees"), [("read", False), ("admin", True)])
async def test_grader_of_another_owner_is_shown_to_admins_alone(control: Control, scopes: str, sees: bool):
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    job_id = await control.job(training_file=await control.upload(prompts()), method=method)
    control.as_key("other", scopes=[scopes])
    listed = (await control.http.get("/v1/fine_tuning/jobs")).json()["data"]
    for job in (*listed, (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}")).json()):
        assert ("grader" in job["method"]["reinforcement"]) == sees


async def test_a_job_on_a_model_that_may_not_be_opened_fails_before_its_data_is_read(control: Control, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"vocab": "/box/first-key"}))
    models.update_version(control.db, "starter", "v1", disk_path=str(folder))
    job = await control.sdk.fine_tuning.jobs.retrieve(await control.job())
    assert (job.status, job.error.code, job.error.param) == ("failed", "model_refused", "model")
    assert job.error.message.startswith("tokenizer_config.json: has 'vocab'")
    assert "appliance model verify starter" in job.error.message
    asked = {"job": {"model": "starter", "training_file": await control.upload()}}
    planned = await control.http.post("/admin/v1/plan", json=asked, headers=ADMIN)
    assert (planned.status_code, planned.json()["error"]["code"]) == (400, "model_refused")
