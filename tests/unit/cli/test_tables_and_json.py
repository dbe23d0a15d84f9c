"""Commands print tables, and JSON with stable keys, from answers of the real control app."""

import base64
import json
import threading
import time
from datetime import datetime
from pathlib import Path

from appliance.cli import output
from appliance.controller.jobs import settings
from appliance.store import jobs
from appliance.store.rows import DEPLOYMENTS, DeploymentRow
from runtime.devices.kind import Reading
from tests.simulator.control_plane import change
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import chat_lines


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def make_job(box: ControlledBox, tmp_path: Path, *options: str) -> str:
    """Submit a job, wait until it is validated, and return its id."""
    data = tmp_path / "train.jsonl"
    data.write_bytes(chat_lines(40))
    submitted = box.run("job", "submit", "--model", "starter", "--file", str(data), "--suffix", "demo", *options)
    job_id = submitted.stdout.strip()
    assert job_id.startswith("ftjob-")
    box.settle()
    return job_id


def test_view_formats_values_by_field_name(capsys):
    answer = {"object": "x", "size_bytes": 2_000_000, "since_s": 90.0, "none": None, "of": {"kind": "job", "id": "j"}}
    answer |= {"share": 0.25, "on": True, "rows": [{"a": 1, "b": None}, {"a": 2, "b": None}], "notes": ["mind this"]}
    output.draw(output.view({**answer, "part": {"w": 1, "x": 2, "y": 3, "z_s": 0.5}}))
    shown = capsys.readouterr().out
    for told in ("size 2.0 MB", "since 1 min 30 s", "of job j", "share 25.0 %", "on yes", "! mind this", "z 500 ms"):
        assert told in " ".join(shown.split()), told
    assert ["A"] in lines(shown) and ["A", "B"] not in lines(shown), "a column without a value is left out"
    assert "none" not in shown and "object" not in shown


def test_gpu_list_shows_devices_with_their_meters(box: ControlledBox):
    box.context.scheduler.devices[2]["holder"] = {"kind": "job", "id": "ftjob-1"}
    box.context.scheduler.devices[0]["name"] = "[red]GPU[/red] \x1b[31m"
    text = box.run("gpu", "list").stdout
    rows = lines(text)
    assert rows[0] == ["DEVICE", "KIND", "NAME", "MEMORY", "HEALTH", "HOLDER"] and len(rows) == 9
    assert rows[3][-2:] == ["job", "ftjob-1"]
    assert "[red]GPU[/red]" in text and "\x1b" not in text, "text of the box is never markup"
    box.context.health.newest = lambda: {"n0/1": Reading("n0/1", 0.0, temperature_c=61, power_w=690.4)}
    text = box.run("gpu", "list").stdout
    assert "HEAT" in text and "61 °C" in text and "690 W" in text
    printed = box.run("gpu", "list", "-o", "json").stdout
    assert printed.count("\n") == 1


def test_gpu_drain_waits_until_holder_has_left(box: ControlledBox):
    assert box.json("gpu", "drain", "n0/3", "--reason", "fan noise")["cordon"] == "person"
    assert "drained by box: fan noise" in box.run("gpu", "list").stdout
    assert box.run("gpu", "undrain", "n0/3").stdout.strip() == "n0/3: ok"
    assert box.run("gpu", "drain", "n0/99").exit_code == 3
    device = box.context.scheduler.devices[2]
    device["holder"] = {"kind": "replica", "id": "r1-0"}
    assert box.run("gpu", "drain", "n0/2", "--timeout", "0").exit_code == 124
    assert box.json("gpu", "drain", "n0/2", "--no-wait")["holder"]["id"] == "r1-0"
    leaving = threading.Timer(0.05, lambda: device.update(holder=None))
    leaving.start()
    assert box.json("gpu", "drain", "n0/2")["holder"] is None
    leaving.join()


def test_status_shows_box_replicas_jobs_and_troubles(box: ControlledBox, tmp_path: Path):
    job_id = make_job(box, tmp_path)
    replica = {"id": "r1", "model": "starter", "version": "v2", "state": "ready", "devices": ["n0/0"]}
    box.context.scheduler.replicas.append({**replica, "inflight": 3, "rss_bytes": 400_000_000})
    text = box.run("status").stdout
    assert "0123abcd" in text and "auto" in text and "0 of 8 held" in text and "none yet" in text
    assert "weights 0 B of 1.1 GB of shared memory" in " ".join(text.split())
    assert ["r1", "starter", "v2", "ready", "1", "3", "400", "MB"] in lines(text) and job_id in text
    trouble = {"name": "backup", "since_s": time.time(), "why": "no such place", "failures": 3}
    change(box.context, main_troubles=lambda: [trouble])
    assert "no such place" in box.run("status").stdout


def test_mode_set_moves_devices_and_history_shows_steps(box: ControlledBox):
    assert box.json("mode", "show")["policy"] == "auto"
    assert "since" not in box.run("mode", "show").stdout, "it was never set"
    done = box.run("mode", "set", "split", "--train", "6")
    assert done.exit_code == 0 and "drain_replica" in done.stdout
    assert box.json("mode", "set", "serve", "--wait")["handover"]["state"] == "done"
    history = box.json("mode", "history")["data"]
    assert [handover["reason"] for handover in history] == ["mode serve", "mode split"]
    assert box.json("mode", "history", history[1]["id"]) == history[1]
    assert "drain_replica" in box.run("mode", "history", history[1]["id"]).stdout
    assert "mode serve" in box.run("mode", "history").stdout
    assert box.run("mode", "history", "none").exit_code == 3
    assert len(box.json("mode", "history", "--limit", "1")["data"]) == 1
    box.context.scheduler.hang = True
    assert box.json("mode", "set", "train", "--no-wait")["handover"]["state"] == "running"
    assert box.json("mode", "show")["policy"] == "train"


def test_model_canary_starts_shows_rolls_back_and_promotes(box: ControlledBox):
    box.do(lambda: DEPLOYMENTS.insert(box.context.db, DeploymentRow("starter", 1.0)))
    begun = box.json("model", "canary", "starter", "v1", "--share", "5%", "--for", "1h", "--min-requests", "9")
    assert (begun["share"], begun["watch_s"], begun["min_requests"], begun["auto"]) == (0.05, 3600.0, 9, False)
    assert "v1" in lines(box.run("model", "list").stdout)[1]
    assert "5.0 %" in box.run("model", "show", "starter").stdout
    assert box.run("model", "rollback", "starter").stdout.startswith("starter: v1 -> v2")
    box.json("model", "canary", "starter", "v1", "--share", "0.2", "--auto")
    assert box.run("model", "promote", "starter").stdout.strip() == "starter: v2 -> v1"
    for wrong in (("--share", "95%"), ("--share", "much"), ("--for", "soon")):
        assert box.run("model", "canary", "starter", "v2", *wrong).exit_code == 2


def test_model_deploy_changes_only_given_settings(box: ControlledBox):
    made = box.json("model", "deploy", "starter", "--max-replicas", "3", "--ttft-p95-s", "1.5", "--pin")
    assert (made["max_replicas"], made["ttft_p95_s"], made["pinned"]) == (3, 1.5, True)
    assert box.json("model", "deploy", "starter", "--ttft-p95-s", "none", "--unpin")["ttft_p95_s"] is None
    assert ["max", "replicas", "3"] in lines(box.run("model", "deploy", "starter").stdout)
    assert box.run("model", "deploy", "starter", "--max-replicas", "many").exit_code == 2
    assert box.run("model", "deploy", "nobody").exit_code == 3


def test_file_upload_list_get_and_rm(box: ControlledBox, tmp_path: Path):
    path, saved = tmp_path / "my data.jsonl", tmp_path / "saved"
    path.write_bytes(chat_lines(3))
    made = box.json("file", "upload", str(path))
    assert (made["filename"], made["status"], made["purpose"]) == (path.name, "processed", "fine-tune")
    assert [f["id"] for f in box.json("file", "list")["data"]] == [made["id"]]
    assert box.json("file", "get", made["id"]) == made
    assert box.run("file", "get", made["id"], "--save", str(saved)).exit_code == 0
    assert saved.read_bytes() == path.read_bytes()
    assert box.run("file", "get", made["id"], "--save", "-").stdout_bytes == path.read_bytes()
    assert box.run("file", "rm", made["id"]).stdout.strip() == f"deleted {made['id']}"
    assert box.json("file", "list")["data"] == []


def test_file_get_saves_job_metrics_as_csv(prepared, tmp_path: Path):
    table, saved = b"step,train_loss\r\n1,2.0\r\n", tmp_path / "metrics.csv"
    prepared.prepare("GET", "/v1/files/file-1", (200, {"id": "file-1", "purpose": "fine-tune-results"}))
    prepared.prepare("GET", "/v1/files/file-1/content", (200, base64.b64encode(table)))
    assert prepared.run("file", "get", "file-1", "--save", str(saved)).exit_code == 0
    assert saved.read_bytes() == table


def batch_file(tmp_path: Path, *numbers: int) -> str:
    path = tmp_path / "requests.jsonl"
    body = {"model": "starter", "messages": [{"role": "user", "content": "hi"}]}
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_batch_create_wait_list_and_show(box: ControlledBox, tmp_path: Path):
    made = box.json("batch", "create", batch_file(tmp_path, 1, 2, 3), "--wait")
    assert made["status"] == "completed" and made["request_counts"]["completed"] == 3
    assert made["id"] in box.run("batch", "list").stdout and "completed" in box.run("batch", "show", made["id"]).stdout
    assert box.run("batch", "cancel", made["id"]).exit_code == 5
    refused = box.run("batch", "create", batch_file(tmp_path, 1, 1), "--wait")
    assert refused.exit_code == 1 and "is failed" in refused.stderr and "'r1' is used twice" in refused.stdout
    assert box.run("batch", "show", "batch_none").exit_code == 3


def test_forget_asks_before_deleting(box: ControlledBox):
    box.run("key", "create", "--name", "ann")
    unasked = box.run("forget", "--owner", "ann")
    assert unasked.exit_code == 1 and "ann" in unasked.stdout and "--yes" in unasked.stderr
    assert box.json("forget", "--owner", "ann", "--yes")["keys"] == ["ann"]


def test_model_share_with_owners_and_with_everybody(box: ControlledBox):
    assert box.run("model", "share", "starter", "--with", "all", "--stop").exit_code == 0
    box.json("key", "create", "--name", "bobs", "--owner", "bob")
    shared = box.run("model", "share", "starter", "--with", "bob", "--with", "carol")
    assert ["shared", "with", "bob,", "carol"] in lines(shared.stdout)
    assert box.json("model", "share", "starter", "--with", "all")["shared_with_everybody"] is True


def test_model_import_resolves_path_and_reports_failure(box: ControlledBox, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = box.json("model", "import", "./none", "--name", "none")  # the simulated box imports from any path
    assert box.json("model", "show", done["result"]["name"])["source"] == str(tmp_path / "none")
    started = box.json("model", "import", "hub/other", "--name", "other", "--no-wait")
    assert started["kind"] == "import" and started["id"].startswith("op_")
    assert "! there is no chat template" in box.run("model", "import", "/data/bare").stdout
    failed = box.run("model", "import", "broken", "--name", "x")
    assert failed.exit_code == 1 and "import failed (invalid_checkpoint)" in failed.stderr


def test_job_submit_and_update_set_device_options(box: ControlledBox, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(settings, "host_cores", lambda: 8)
    options = ("--priority", "3", "--min-devices", "2", "--deadline", "8h", "--no-preemptible", "--batch-size", "8")
    job_id = make_job(box, tmp_path, *options)
    row = box.do(lambda: jobs.get(box.context.db, job_id))
    assert (row.priority, row.allowed_sizes, row.preemptible) == (3, [2, 4, 8], 0)
    assert 7.9 * 3600 < row.deadline_s - time.time() <= 8 * 3600
    assert lines(box.run("job", "queue").stdout)[1][:4] == ["1", job_id, "-", "3"]
    assert box.run("job", "update", job_id, "--deadline", "none", "--min-devices", "1").exit_code == 0
    assert box.json("job", "get", job_id)["allowed_sizes"] == [1, 2, 4, 8]
    for day in ("2099-12-31", "20991231"):
        assert box.run("job", "update", job_id, "--deadline", day).exit_code == 0
        row = box.do(lambda: jobs.get(box.context.db, job_id))
        assert row.deadline_s == datetime(2100, 1, 1).timestamp(), "the end of the day"
    for wrong in ((), ("--min-devices", "0"), ("--deadline", "soon"), ("--deadline", "2020-01-01T00:00")):
        assert box.run("job", "update", job_id, *wrong).exit_code == 2


def test_key_create_limit_and_revoke(box: ControlledBox):
    made = box.run("key", "create", "--name", "alice")
    assert made.stdout.strip().startswith("sk-") and "not shown again" in made.stderr
    limits = ("--model", "starter", "--requests-per-minute", "60", "--bound", "bytes=9", "--expires", "2099-12-31")
    limited = box.json("key", "limit", "alice", *limits)
    assert (limited["models"], limited["requests_per_minute"], limited["bounds"]) == (["starter"], 60, {"bytes": 9})
    assert limited["expires_s"] == datetime(2099, 12, 31).timestamp() + 86_400, "its last day is the one given"
    lifted = ("--model", "none", "--requests-per-minute", "none", "--bound", "none", "--expires", "none")
    freed = box.json("key", "limit", "alice", *lifted)
    assert all(freed[name] is None for name in ("models", "requests_per_minute", "expires_s")) and not freed["bounds"]
    for wrong in (("--tokens-per-day", "0"), ("--bound", "jobs"), ("--expires", "2020-01-01"), ("--expires", "soon")):
        assert box.run("key", "limit", "alice", *wrong).exit_code == 2, wrong
    assert box.run("key", "revoke", "alice").exit_code == 0
    assert box.json("key", "list")["data"] == []
    assert box.json("key", "list", "--all")["data"][0]["revoked_s"] is not None
