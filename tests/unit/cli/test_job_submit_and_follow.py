"""Commands submit a job with a file and follow the job until it ends."""

import json
import threading

import pytest

from appliance.controller.jobs.events import fail
from tests.unit.cli.conftest import openai_error
from tests.unit.cli.test_tables_and_json import make_job

JOB = "/v1/fine_tuning/jobs/ftjob-1"


def test_submit_sends_the_given_options(prepared, tmp_path):
    for name in ("train.jsonl", "valid.jsonl"):
        (tmp_path / name).write_text('{"messages": []}\n')
    uploads = [(200, {"id": f"file-{n}", "filename": "f", "status": "processed"}) for n in (1, 2)]
    prepared.prepare("POST", "/v1/files", *uploads)
    prepared.prepare("POST", "/v1/fine_tuning/jobs", (200, {"id": "ftjob-1"}))
    train, valid = str(tmp_path / "train.jsonl"), str(tmp_path / "valid.jsonl")
    options = (
        "--suffix s --epochs 3 --batch-size auto --learning-rate-multiplier 0.5 --lora-rank 8 --lora --zero-stage 2 "
        "--max-length 256 --seed 7 --set lora_dropout=0.1 --set precision=fp32 --set packing=false "
        '--set lora_targets=["q_proj"] --metadata team=a=b --max-devices 4 --priority -1'
    )
    asked = ["job", "submit", "--model", "starter", "--file", train, "--validation-file", valid, *options.split()]
    done = prepared.run(*asked)
    assert (done.exit_code, done.stdout) == (0, "ftjob-1\n")
    first, second = prepared.sent("POST", "/v1/files")
    assert b'name="purpose"\r\n\r\nfine-tune\r\n' in first["content"] and b"train.jsonl" in first["content"]
    assert b"valid.jsonl" in second["content"]
    (request,) = prepared.sent("POST", "/v1/fine_tuning/jobs")
    assert request["headers"]["idempotency-key"]
    assert json.loads(request["content"]) == {
        "model": "starter",
        "training_file": "file-1",
        "validation_file": "file-2",
        "suffix": "s",
        "seed": 7,
        "metadata": {"team": "a=b"},
        "max_devices": 4,
        "priority": -1,
        "method": {
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "n_epochs": 3,
                    "batch_size": "auto",
                    "learning_rate_multiplier": 0.5,
                    "lora_rank": 8,
                    "full": False,
                    "zero_stage": 2,
                    "max_length": 256,
                    "lora_dropout": 0.1,
                    "precision": "fp32",
                    "packing": False,
                    "lora_targets": ["q_proj"],
                }
            },
        },
    }


@pytest.mark.parametrize("words", [("job", "submit", "--model", "starter", "--file"), ("batch", "create")])
def test_refusal_after_upload_names_the_uploaded_file(prepared, tmp_path, words):
    data = tmp_path / "d.jsonl"
    data.write_text('{"messages": []}\n')
    prepared.prepare("POST", "/v1/files", (200, {"id": "file-1", "filename": "f", "status": "processed"}))
    path = "/v1/batches" if words[0] == "batch" else JOB.rpartition("/")[0]
    prepared.prepare("POST", path, (400, openai_error("not so", None)))
    done = prepared.run(*words, str(data))
    assert done.exit_code == 2 and "not so" in done.stderr and "file-1 on the box" in done.stderr


def test_refusal_names_the_command_that_lists_bad_lines(box, tmp_path):
    path = tmp_path / "bad.jsonl"
    # Each line has a different error, because equal errors are reported only once.
    path.write_text("".join(json.dumps({"messages": [{"role": f"role {n}", "content": "a"}]}) + "\n" for n in range(9)))
    refused = box.run("file", "upload", str(path))
    file_id = box.json("file", "list")["data"][0]["id"]
    assert refused.exit_code == 1 and f"`appliance file get {file_id} --errors` lists all" in refused.stderr
    shown = box.run("file", "get", file_id, "--errors").stdout.splitlines()
    assert len(shown) == 9 and shown[8].startswith("line 9: messages[0].role is ")
    assert box.run("file", "get", file_id, "--errors", "--save", "x").exit_code == 2


def test_job_logs_follows_job_until_success(box, tmp_path):
    job_id = make_job(box, tmp_path)
    events = box.job_events
    box.do(lambda: events.started(job_id, ["n0/0", "n0/1"]))
    outcome = {}
    follower = threading.Thread(target=lambda: outcome.update(result=box.run("job", "logs", "-f", job_id)))
    follower.start()
    for step in range(1, 31):
        metrics = {
            "event": "metrics",
            "step": step,
            "total_steps": 30,
            "loss": 3 - step / 20,
            "tokens_per_s": 1234.0,
            "devices": 2,
            "learning_rate": 1e-4,
            "grad_norm": 0.5,
            "epoch": 0.1,
        }
        box.do(lambda metrics=metrics: events.ingest(job_id, metrics))
    box.do(lambda: events.ingest(job_id, {"event": "validation", "step": 30, "loss": 1.25}))
    published = {"event": "published", "step": 30, "version": "final", "path": "/x", "bytes": 10, "seconds": 0.1}
    box.do(lambda: events.ingest(job_id, published))
    box.do(lambda: events.succeeded(job_id))
    follower.join(30)
    result = outcome["result"]
    assert result.exit_code == 0, result.stderr
    steps = [line.split()[2] for line in result.stdout.splitlines() if line[8:].lstrip().startswith("step ")]
    assert steps == [*(f"{n}/30" for n in range(1, 31)), "30/30"], "each event once and in order"
    assert "train loss 1.5000" in result.stdout and "tokens/s 1,234" in result.stdout and "devices 2" in result.stdout
    assert "valid loss 1.2500" in result.stdout
    model = box.json("job", "get", job_id)["fine_tuned_model"]
    assert f"succeeded: {model}" in result.stderr
    as_json = [json.loads(line) for line in box.run("job", "logs", job_id, "-o", "json").stdout.splitlines()]
    assert len(as_json) == len(result.stdout.splitlines())
    assert {"id", "type", "level", "message", "created_at", "data"} <= set(as_json[0])
    assert box.run("job", "wait", job_id).exit_code == 0
    assert box.json("job", "wait", job_id)["fine_tuned_model"] == model


def test_logs_of_a_failing_job_exit_with_1(box, tmp_path):
    job_id = make_job(box, tmp_path)
    box.do(lambda: fail(box.context.db, job_id, "out_of_memory", "the model does not fit"))
    for command in (("job", "wait", job_id), ("job", "logs", "-f", job_id)):
        result = box.run(*command)
        assert result.exit_code == 1 and "failed: the model does not fit" in result.stderr


def test_job_wait_survives_restart_of_box(prepared):
    done = {"id": "ftjob-1", "status": "succeeded", "fine_tuned_model": "ft:x"}
    away = (503, openai_error("the controller is away", "controller_unavailable"))
    prepared.prepare("GET", JOB, away, (200, done))
    result = prepared.run("job", "wait", "ftjob-1")
    assert result.exit_code == 0
    assert "the controller is away; trying again" in result.stderr
