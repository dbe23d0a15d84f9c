"""/v1/fine_tuning/jobs through the OpenAI SDK: the lifecycle of a job, and rejected requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.controller.app import create_app
from appliance.controller.context import tasks
from appliance.controller.grading.judging import CannotGoOn
from appliance.controller.jobs.events import VALIDATIONS
from appliance.store import files, jobs, keys, models
from tests.simulator.control_plane import change, graded
from tests.train_support.tiny import tokenizer
from tests.unit.controller.conftest import CHECK as GRADER
from tests.unit.controller.conftest import Control, chat_lines, insert_model
from train.methods.methods import METHODS
from weights.format.errors import IntegrityError, StoreFull


async def test_job_is_validated_and_queued_with_resolved_auto_values(control: Control):
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
    events = await control.sdk.fine_tuning.jobs.list_events(job_id, limit=100)
    assert [event.level for event in events.data].count("warn") == 1


async def test_methods_list_has_options_of_each_method(control: Control):
    told = {one["name"]: one for one in (await control.http.get("/v1/fine_tuning/methods")).json()["data"]}
    assert told.keys() == METHODS.keys()
    assert [option["name"] for option in told["dpo"]["options"]] == ["beta"]
    assert (told["supervised"]["takes"], told["distillation"]["takes"]) == ([], ["teacher"])


def hyper(**values: Any) -> dict[str, Any]:
    return {"hyperparameters": values}


def supervised(**values: Any) -> dict[str, Any]:
    return {"method": {"type": "supervised", "supervised": {"hyperparameters": values}}}


def wandb(**values: Any) -> dict[str, Any]:
    return {"integrations": [{"type": "wandb", "wandb": {"project": "p", **values}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (hyper(n_epochs=0), "hyperparameters.n_epochs"),
        (hyper(lora_targets="a" * 5000), "hyperparameters.lora_targets"),
        (hyper(publish="best"), "hyperparameters.publish"),
        (hyper(early_stopping_patience=2), "hyperparameters.early_stopping_patience"),
        (supervised(lora_rank=-1), "method.supervised.hyperparameters.lora_rank"),
        (supervised(n_epochs=1) | hyper(n_epochs=2), "hyperparameters.n_epochs"),
        ({"method": {"type": "dpo", "ppo": {}}}, "method.ppo"),
        ({"method": {"type": "dpo", "supervised": {"hyperparameters": {"n_epochs": 1}}}}, "method.supervised"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": []}}}, "method.dpo.hyperparameters"),
        ({"method": {"type": "dpo", "dpo": {"beta": 0.1}}}, "method.dpo.beta"),
        ({"method": {"type": "reinforcement"}}, "method.reinforcement.grader"),
        ({"method": {"type": "magic"}}, "method.type"),
        ({"suffix": "客" * 65}, "suffix"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"model": "no-such-model"}, "model"),
        ({"training_file": "../../etc/passwd"}, "training_file"),
        ({"validation_file": "file-none"}, "validation_file"),
        (wandb(project="a/b"), "integrations.0.wandb.project"),
        ({"training_file": None}, "training_file"),
    ],
)
async def test_job_with_invalid_field_names_the_field(control: Control, fields: dict[str, Any], param: str):
    body = {"model": "starter", "training_file": await control.upload()} | fields
    answer = await control.http.post("/v1/fine_tuning/jobs", json=body)
    assert (answer.status_code in (400, 404), answer.json()["error"]["param"]) == (True, param), answer.text
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []


@pytest.mark.parametrize("fields", [{"task": "embed"}, {"info": {"quantization": "gptq"}}])
async def test_job_on_embedding_or_quantised_model_is_rejected(control: Control, fields: dict[str, Any]):
    insert_model(control.db, "other", **fields)
    with pytest.raises(openai.BadRequestError) as refused:
        await control.sdk.fine_tuning.jobs.create(model="other", training_file=await control.upload())
    assert refused.value.param == "model"


async def test_file_and_job_list_bad_lines(control: Control):
    file_id = await control.upload(chat_lines(3) + b"oops\n" * 120)
    job_id = await control.job(training_file=file_id)
    job = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert (job.status, job.error.code, job.error.param) == ("failed", "invalid_training_file", "training_file")
    message = job.error.message
    assert "line 4:" in message and "line 5:" not in message, "each cause once"
    assert (await control.sdk.files.retrieve(file_id)).status == "error"
    of_lines = [text for text in await control.messages(job_id) if text.startswith("line ")]
    assert [int(text.split()[1].rstrip(":")) for text in of_lines] == list(range(5, 104))  # and one of the failure
    found = (await control.http.get(f"/v1/files/{file_id}/errors")).json()
    assert found["total"] == 120 and found["has_more"]
    assert [row["line"] for row in found["data"]] == list(range(4, 104))
    found = (await control.http.get(f"/v1/files/{await control.upload()}/errors")).json()
    assert found == {"object": "list", "data": [], "total": 0, "has_more": False}


PAIR = {
    "input": {"messages": [{"role": "user", "content": "hi"}]},
    "preferred_output": [{"role": "assistant", "content": "a"}],
    "non_preferred_output": [{"role": "assistant", "content": "b"}],
}


async def test_dpo_job_is_validated_and_shows_beta(control: Control):
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


async def test_job_with_file_shape_unfit_for_method_is_rejected(control: Control):
    pairs = await control.upload((json.dumps(PAIR) + "\n").encode() * 12)
    chats, asked = await control.upload(), await control.upload(prompts())
    graded = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    for method, fields, at_fault in (
        ({"type": "dpo"}, {"training_file": chats}, "training_file"),
        ({"type": "supervised"}, {"training_file": pairs}, "training_file"),
        (graded, {"training_file": chats}, "training_file"),
        ({"type": "supervised"}, {"training_file": asked}, "training_file"),
        ({"type": "dpo"}, {"training_file": pairs, "validation_file": chats}, "validation_file"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await control.job(**fields, extra_body={"method": method})
        assert (refused.value.param, refused.value.code) == (at_fault, f"invalid_{at_fault}")
    assert not jobs.list_unfinished(control.db, " AND phase = 'validating'")


async def test_validation_waits_for_memory_for_the_tokenizer(control: Control, monkeypatch):
    raised = [StoreFull("no room"), StoreFull("no room"), IntegrityError("damaged", path="base")]

    def bring_in(name):
        raise raised.pop(0)

    monkeypatch.setattr(tasks, "ROOM_EVERY_S", 0.01)
    monkeypatch.setattr(control.context.tiers, "bring_in", bring_in)
    job_id = await control.job()
    await control.context.tasks.idle(VALIDATIONS)
    assert (jobs.get(control.db, job_id).phase, raised) == ("queued", [])


@pytest.mark.usefixtures("checked_here")
async def test_dpo_job_rejects_pairs_cut_empty_by_max_length(control: Control, tmp_path: Path):
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
        (bad,) = (text for text in await control.messages(job_id) if text.startswith("line "))
        assert bad.startswith("line 12:") and "max_length" in bad
    # The short file is valid: above it was the training file of the job with the bad validation file.
    job_id = await control.job(training_file=cut, extra_body={"method": {"type": "dpo"}})
    assert jobs.get(control.db, job_id).phase == "queued", await control.messages(job_id)


async def test_cancel_of_suspended_job_leaves_snapshot_to_release(control: Control):
    job_id = await control.job()
    snapshot = {"step": 3, "path": "/dev/shm/s"}
    jobs.set_phase(control.db, job_id, "suspended", snapshot=snapshot)
    cancelled = await control.sdk.fine_tuning.jobs.cancel(job_id)
    assert cancelled.status == "cancelled" and cancelled.finished_at is not None
    assert [(row.id, row.snapshot) for row in jobs.list_left_snapshots(control.db)] == [(job_id, snapshot)]
    jobs.update(control.db, job_id, snapshot=None)
    assert jobs.list_left_snapshots(control.db) == []


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
async def test_finished_job_rejects_state_changes(control: Control, verb: str):
    job_id = await control.job()
    jobs.set_phase(control.db, job_id, "failed", error={"code": "x", "message": "y", "param": None})
    answer = await control.http.post(f"/v1/fine_tuning/jobs/{job_id}/{verb}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "invalid_job_state")
    assert answer.headers["x-should-retry"] == "false"


async def test_job_list_pages_and_filters_by_metadata(control: Control):
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


async def test_restart_resumes_validation_and_fails_job_without_file(control: Control):
    whole, vanished = await control.job(), await control.job()
    # The state after a kill of the controller between creation and validation.
    control.db.execute("UPDATE jobs SET phase = 'validating', resolved = NULL")
    files.delete(control.db, jobs.get(control.db, vanished).training_file)
    await control.context.tasks.stop()
    for job_id in (whole, vanished):
        control.context.tasks.start(VALIDATIONS, job_id, None)
    again = create_app(control.context)
    async with again.router.lifespan_context(again):
        await control.context.tasks.idle(VALIDATIONS)
    assert jobs.get(control.db, whole).phase == "queued"
    row = jobs.get(control.db, vanished)
    assert row.phase == "failed" and row.error["code"] == "file_unreadable"


@pytest.mark.parametrize(("mode", "level"), [(None, "warn"), ("offline", "info"), ("online", "info")])
async def test_wandb_integration_is_recorded_and_warns_if_disabled(control: Control, mode: Any, level: str):
    change(control.context, wandb_mode=mode)
    job_id = await control.job(integrations=[{"type": "wandb", "wandb": {"project": "p"}}])
    made = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert made.integrations[0].wandb.project == "p"
    events = (await control.sdk.fine_tuning.jobs.list_events(job_id, limit=100)).data
    assert len(events) == 3 and ("warn" in {event.level for event in events}) == (level == "warn")


def prompts(count: int = 12) -> bytes:
    rows = [{"messages": [{"role": "user", "content": f"{n} and 2?"}], "answer": str(n + 2)} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def rewarded(**block: Any) -> dict[str, Any]:
    return {"type": "reinforcement", "reinforcement": {"grader": GRADER, **block}}


async def test_reinforcement_job_is_validated_and_shows_grader(control: Control):
    wanted = form({"type": "object", "properties": {"pattern": {"enum": [{"pattern": "x"}]}}})
    hyperparameters = {"compute_multiplier": 0.5, "eval_samples": "auto", "batch_size": 4, "reasoning_effort": "medium"}
    job_id = await control.job(
        training_file=await control.upload(prompts()),
        validation_file=await control.upload(prompts(3)),
        method=rewarded(hyperparameters=hyperparameters, response_format=wanted),
    )
    row = jobs.get(control.db, job_id)
    assert row.phase == "queued", row.reason
    assert row.resolved["batch_size"] == 4 and row.resolved["options"]["group"] == 4
    lines = (control.context.jobs_dir / job_id / "train.jsonl").read_text().splitlines()
    assert len(lines) == 12 and json.loads(lines[2])["item"] == {"answer": "4"}
    shown = (await control.sdk.fine_tuning.jobs.retrieve(job_id)).method.reinforcement
    assert (shown.grader.to_dict(), shown.response_format) == (GRADER, wanted)
    values = shown.hyperparameters
    assert (values.compute_multiplier, values.eval_samples, values.batch_size) == (0.5, 1, 4)
    assert values.reasoning_effort == "medium"


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"grader": GRADER | {"operation": "is"}}, "grader.operation"),
        ({"grader": {"type": "python", "name": "p", "source": "def grade(sample, item) return 1"}}, "grader.source"),
        ({"grader": GRADER | {"input": "{{ answer }}"}}, "grader.input"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": form({"properties": {"a": {"type": "string", "pattern": "a+"}}})}, "response_format"),
        ({"response_format": form({"type": "array", "maxItems": 1 << 31})}, "response_format"),
        ({"response_format": form({"properties": {"a": {"type": "nope"}}})}, "response_format.json_schema.schema"),
        ({"hyperparameters": {"reasoning_effort": "much"}}, "hyperparameters.reasoning_effort"),
        ({"beta": 1}, "beta"),
    ],
)
async def test_reinforcement_job_with_invalid_field_names_the_field(control: Control, block: Any, param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        await control.job(training_file=await control.upload(prompts()), method=rewarded(**block))
    assert refused.value.param == f"method.reinforcement.{param}"
    assert jobs.list_unfinished(control.db) == []


async def test_reinforcement_job_requires_scope_inference(control: Control):
    control.as_key("tuner", scopes=["fine_tuning"])
    body = {"model": "starter", "training_file": await control.upload(prompts()), "method": rewarded()}
    assert (await control.http.post("/v1/fine_tuning/jobs", json=body)).status_code == 403


async def test_reinforcement_answers_are_graded_by_grader_of_job(control: Control):
    key_id = control.as_key("ann", owner="ann")
    job_id = await control.job(training_file=await control.upload(prompts()), method=rewarded())
    told = await graded(control.context, job_id, "4", "5", item={"answer": "4"})
    assert told == {"rewards": [1.0, 0.0], "errors": ["", ""]}
    told = await graded(control.context, job_id, "4", item={})
    assert told["rewards"] == [0.0] and "answer" in told["errors"][0]
    keys.revoke(control.db, key_id)
    with pytest.raises(CannotGoOn):
        await graded(control.context, job_id, "4", item={"answer": "4"})


@pytest.mark.parametrize(("scopes", "sees"), [("read", False), ("admin", True)])
async def test_grader_of_other_owner_is_shown_only_to_admins(control: Control, scopes: str, sees: bool):
    job_id = await control.job(training_file=await control.upload(prompts()), method=rewarded())
    control.as_key("other", scopes=[scopes])
    listed = (await control.http.get("/v1/fine_tuning/jobs")).json()["data"]
    for job in (*listed, (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}")).json()):
        assert ("grader" in job["method"]["reinforcement"]) == sees
