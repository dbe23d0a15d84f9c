"""Every listing: a table for people, and JSON whose keys scripts rely on, from the real control app."""

from __future__ import annotations

import base64
import json
import re
import time
from datetime import datetime

from appliance.controller.http import peers
from appliance.controller.interfaces.principal import Identity
from appliance.store import database
from appliance.store.objects import jobs
from appliance.store.records import deployments, keys
from appliance.store.rows import DeploymentRow, JobRow
from tests.simulator.control_plane import change
from tests.unit.cli.conftest import ControlledBox, openai_error
from tests.unit.controller.conftest import chat_lines

MODE_KEYS = {
    "policy",
    "train_devices",
    "serving_floor",
    "since_s",
    "until_s",
    "set_by",
    "window",
    "overridden",
    "by_hand",
    "notes",
    "bounds",
}


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def make_job(box: ControlledBox, tmp_path, *options: str) -> str:
    """A job that is queued, with its data checked."""
    data = tmp_path / "train.jsonl"
    data.write_bytes(chat_lines(40))
    submitted = box.run("job", "submit", "--model", "starter", "--file", str(data), "--suffix", "demo", *options)
    job_id = submitted.stdout.strip()
    assert job_id.startswith("ftjob-")
    box.settle()
    return job_id


def test_gpu_list(box):
    rows = lines(box.run("gpu", "list").stdout)
    assert rows[0] == ["DEVICE", "KIND", "NAME", "MEMORY", "HEALTH", "HOLDER", "REASON"]
    assert rows[1] == ["n0/0", "cpu", "simulated", "1.1", "GB", "ok", "-"]
    assert len(rows) == 9
    data = box.json("gpu", "list")["data"]
    told = {
        "id",
        "node",
        "index",
        "kind",
        "name",
        "memory_bytes",
        "health",
        "holder",
        "drain",
        "lost",
        "meters",
        "cordon",
    }
    assert set(data[0]) == told


def test_a_holder_is_named(box):
    box.context.scheduler.devices[2]["holder"] = {"kind": "job", "id": "ftjob-1"}
    assert lines(box.run("gpu", "list").stdout)[3][-2:] == ["job", "ftjob-1"]


def test_top_says_what_every_device_does_and_who_waits(box, tmp_path):
    job_id = make_job(box, tmp_path)
    engine = {"id": "r1", "model": "starter", "version": "v2", "state": "open", "devices": ["n0/0"]}
    box.context.scheduler.replicas.append({**engine, "inflight": 3, "rss_bytes": 4})
    devices = box.context.scheduler.devices
    devices[0]["holder"] = {"kind": "replica", "id": "r1"}
    devices[1]["holder"] = {"kind": "job", "id": job_id}
    text = box.run("top").stdout
    assert "mode auto, 2 of 8 devices held, 0 requests running, 0 waiting, no training" in text
    assert ["n0/0", "engine", "r1", "starter@v2", "3", "requests"] in lines(text)
    assert any(line[:3] == ["n0/1", "job", job_id] for line in lines(text))
    assert ["n0/2", "-", "free"] in lines(text)
    known = {
        "devices": ["n0/1"],
        "step": 12,
        "total_steps": 80,
        "tokens_per_s": 5210.0,
        "eta_s": 90.0,
    }
    box.do(lambda: jobs.update(box.context.db, job_id, **known))
    box.run("gpu", "drain", "n0/2", "--reason", "its fan")
    text = box.run("top", "--once").stdout
    assert "training 5,210 tokens/s" in text and "step 12/80, 1 min 30 s left" in text
    assert re.search(r"^n0/2 +drained +drained by .*: its fan", text, re.M)
    told = box.json("top")
    assert told["requests"] == {} and told.keys() == box.json("status").keys()


def test_status(box, tmp_path):
    job_id = make_job(box, tmp_path)
    box.context.scheduler.replicas.append(
        {
            "id": "r1",
            "model": "starter",
            "version": "v2",
            "state": "ready",
            "devices": ["n0/0"],
            "inflight": 3,
            "rss_bytes": 400_000_000,
        }
    )
    text = box.run("status").stdout
    assert "0123abcd" in text and "auto" in text and "0 of 8 held" in text
    assert ["r1", "starter", "v2", "ready", "1", "3", "400", "MB"] in lines(text)
    assert job_id in text
    assert re.search(r"backup +none yet", text)
    trouble = {"name": "backup", "since_s": time.time(), "why": "no such place", "failures": 3, "next_try_s": None}
    change(box.context, main_troubles=lambda: [trouble])
    assert "no such place" in box.run("status").stdout
    change(box.context, main_troubles=list)
    answer = box.json("status")
    assert set(answer) == {
        "box",
        "mode",
        "power",
        "devices",
        "replicas",
        "jobs",
        "memory",
        "handover",
        "degraded",
        "troubles",
        "notes",
        "requests",
    }
    assert set(answer["box"]) >= {"id", "version", "url", "started_s", "data_dir"}
    assert set(answer["mode"]) == {"policy", "train_devices"}


def test_mode_show_and_set_and_history(box):
    first = box.json("mode", "show")
    assert set(first) == MODE_KEYS and (first["policy"], first["since_s"], first["serving_floor"]) == ("auto", 0.0, 1)
    done = box.run("mode", "set", "split", "--train", "6")
    assert done.exit_code == 0
    assert "split" in done.stdout and "drain_replica" in done.stdout
    assert box.json("mode", "show")["train_devices"] == 6
    changed = box.json("mode", "set", "serve", "--wait")
    assert changed["policy"] == "serve" and changed["handover"]["state"] == "done"
    history = box.json("mode", "history")["data"]
    assert [handover["reason"] for handover in history] == ["mode serve", "mode split"]
    assert set(history[0]) == {
        "id",
        "reason",
        "state",
        "started_s",
        "ended_s",
        "seconds",
        "bytes",
        "asked_by",
        "asked_for",
        "error",
        "detail",
        "steps",
    }
    assert set(history[0]["steps"][0]) == {
        "verb",
        "target",
        "state",
        "started_s",
        "ended_s",
        "seconds",
        "bytes",
        "moved_s",
        "bytes_per_s",
        "path",
        "undoes",
        "detail",
    }
    assert box.json("mode", "history", history[1]["id"]) == history[1]
    assert box.run("mode", "history", "none").exit_code == 3
    assert len(box.json("mode", "history", "--limit", "1")["data"]) == 1
    text = box.run("mode", "history").stdout
    assert "mode serve (done" in text and ["drain_replica", "r1-0", "done"] == lines(text)[2][:3]


def test_mode_set_without_waiting_returns_a_running_handover(box):
    box.context.scheduler.hang = True
    assert box.json("mode", "set", "train", "--no-wait")["handover"]["state"] == "running"


def test_a_mode_that_is_not_reached_in_time(box):
    box.context.scheduler.hang = True
    late = box.run("mode", "set", "train", "--timeout", "1")
    assert late.exit_code == 124
    assert "goes on" in late.stderr
    assert box.json("mode", "show")["policy"] == "train"


def test_models(box):
    rows = lines(box.run("model", "list").stdout)
    assert rows[0] == ["MODEL", "KIND", "ARCHITECTURE", "PARAMS", "SIZE", "VERSION", "CHALLENGER", "STATE"]
    assert rows[1] == ["starter", "base", "llama", "5.0", "M", "10", "B", "v2", "-", "cold"]
    shown = box.json("model", "show", "starter")
    assert {"name", "kind", "arch", "params", "bytes", "active_version", "versions", "state", "base"} <= set(shown)
    text = box.run("model", "show", "starter").stdout
    assert "v2 *" in text and "v1 *" not in text


def test_model_canary_promote_and_roll_back(box):
    box.do(lambda: deployments.insert(box.context.db, DeploymentRow("starter", 1.0)))
    begun = box.json("model", "canary", "starter", "v1", "--share", "5%", "--for", "1h", "--min-requests", "9")
    assert (begun["share"], begun["watch_s"], begun["min_requests"], begun["auto"]) == (0.05, 3600.0, 9, False)
    assert lines(box.run("model", "list").stdout)[1][-3:] == ["v2", "v1", "cold"]
    text = box.run("model", "show", "starter").stdout
    assert "v1 of starter, 5% of the requests" in text and "v1 answered 0 of 9 requests" in text
    assert "no engine of v1 is open yet" in box.run("model", "canary", "starter").stdout
    assert box.run("model", "rollback", "starter").stdout.strip() == "starter: v1 -> v2"
    assert "rolled back" in box.run("model", "canary", "starter").stdout
    box.json("model", "canary", "starter", "v1", "--share", "0.2", "--auto")
    assert box.run("model", "promote", "starter").stdout.strip() == "starter: v2 -> v1"
    for wrong in (("--share", "95%"), ("--share", "much"), ("--for", "soon")):
        assert box.run("model", "canary", "starter", "v2", *wrong).exit_code == 2
    for alone in (("--share", "50%"), ("--auto",), ("--for", "1h"), ("--min-requests", "9")):
        forgotten = box.run("model", "canary", "starter", *alone)
        assert forgotten.exit_code == 2 and "which version" in forgotten.stderr, "not the state of an older one"


def test_model_import_starter_verify_rollback_rm(box, tmp_path):
    checkpoint = tmp_path / "my-model"
    checkpoint.mkdir()
    done = box.json("model", "import", str(checkpoint))
    assert (done["state"], done["result"]["name"]) == ("succeeded", "my-model")
    assert box.json("model", "show", "my-model")["source"] == str(checkpoint), "paths reach the box absolute"
    started = box.json("model", "import", "hub/other", "--name", "other", "--no-wait")
    assert started["kind"] == "import" and started["id"].startswith("op_")
    verified = box.json("model", "verify", "my-model")
    assert verified["result"] == {"versions": ["v1"], "tensors": 3, "bytes": 10}
    assert box.json("model", "rollback", "starter", "--version", "v2")["to"] == "v2"
    assert box.run("model", "rollback", "starter").stdout.strip() == "starter: v2 -> v1"
    assert box.run("model", "rm", "my-model").stdout.strip() == "deleted my-model"
    assert box.run("model", "show", "my-model").exit_code == 3


def test_what_was_verified_is_listed_place_by_place(prepared):
    checked = [{"version": "v1", "path": f"/{place}/v1", "tensors": 3, "bytes": 2000} for place in ("disk", "memory")]
    done = {
        "id": "op_1",
        "kind": "verify",
        "state": "succeeded",
        "progress": {},
        "error": None,
        "result": {"versions": checked, "tensors": 6, "bytes": 4000},
    }
    prepared.prepare("POST", "/admin/v1/models/starter/verify", (202, {"operation": done}))
    rows = lines(prepared.run("model", "verify", "starter").stdout)
    assert ["size", "4.0", "kB"] in rows
    assert rows[-1] == ["v1", "3", "2.0", "kB", "/memory/v1"]


def test_an_operation_that_fails(box):
    warned = box.run("model", "import", "/data/bare").stdout
    assert "! there is no chat template" in warned and "warnings" not in warned
    assert "! there is no chat template" in box.run("model", "show", "bare").stdout
    failed = box.run("model", "import", "broken", "--name", "x")
    assert failed.exit_code == 1
    assert "error: import failed (invalid_checkpoint): the header of model.safetensors overlaps" in failed.stderr


def test_jobs(box, tmp_path):
    assert "no jobs" in box.run("job", "list").stdout
    job_id = make_job(box, tmp_path)
    rows = lines(box.run("job", "list").stdout)
    assert rows[0] == ["JOB", "STATUS", "PHASE", "MODEL", "DEVICES", "STEP", "LOSS", "TOKENS/S", "ETA", "REASON"]
    assert rows[1][:4] == [job_id, "queued", "queued", "starter"]
    data = box.json("job", "list")["data"][0]
    assert {
        "id",
        "status",
        "phase",
        "reason",
        "model",
        "fine_tuned_model",
        "devices",
        "step",
        "total_steps",
        "loss",
        "tokens_per_s",
        "eta_s",
        "created_s",
    } <= set(data)
    assert box.json("job", "get", job_id)["id"] == job_id
    assert f"job {job_id}" in " ".join(box.run("job", "get", job_id).stdout.split())


def test_a_long_reason_is_cut_in_the_list_and_whole_with_the_job(box, tmp_path):
    job_id = make_job(box, tmp_path)
    box.do(lambda: box.job_events.failed(job_id, "invalid", "one word and another " * 40 + "end"))
    (line,) = [line for line in box.run("job", "list").stdout.splitlines() if job_id in line]
    assert line.endswith("…") and len(line) < 400
    assert "another end" in box.run("job", "get", job_id).stdout


def test_settings_of_a_job_stand_as_set_takes_them(prepared):
    settings = {"full": False, "learning_rate": 0.00029067546140603784, "lora_targets": [], "snapshot_every_s": None}
    job = {name: None for name in ("reason", "fine_tuned_model", "devices", "owner", "deadline_s", "loss", "step")}
    job |= {"tokens_per_s": None, "created_s": 0.0, "resolved": settings | {"beta": 0.1, "lora_rank": 16}}
    job |= {"id": "ftjob-1", "status": "queued", "phase": "queued", "model": "m", "priority": 0, "preemptible": True}
    prepared.prepare("GET", "/admin/v1/jobs/ftjob-1", (200, job))
    shown = dict(line.split() for line in prepared.run("job", "get", "ftjob-1").stdout.splitlines()[-6:])
    assert shown == {
        "beta": "0.1",
        "full": "false",
        "learning_rate": "0.000290675",
        "lora_rank": "16",
        "lora_targets": "-",
        "snapshot_every_s": "-",
    }


def test_pause_resume_cancel(box, tmp_path):
    job_id = make_job(box, tmp_path)
    assert box.run("job", "pause", job_id).exit_code == 0
    assert box.json("job", "get", job_id)["phase"] == "paused"
    assert box.run("job", "resume", job_id).exit_code == 0
    assert box.json("job", "cancel", job_id)["status"] == "cancelled"
    again = box.run("job", "pause", job_id)
    assert again.exit_code == 5 and "cancelled" in again.stderr


def test_several_jobs_are_asked_whatever_becomes_of_the_others(box, tmp_path):
    """One that had ended was in the way of the rest, and each took a command of its own."""
    jobs = [make_job(box, tmp_path) for _ in range(3)]
    assert box.run("job", "hold", *jobs).stdout.splitlines() == [f"{job} is held" for job in jobs]
    assert box.run("job", "cancel", jobs[0]).exit_code == 0
    several = box.run("job", "pause", jobs[0], "ftjob-none", jobs[1], jobs[2], "-o", "json")
    assert several.exit_code == 5 and jobs[0] in several.stderr and "ftjob-none" in several.stderr
    assert [one["id"] for one in json.loads(several.stdout)["data"]] == jobs[1:]
    assert box.run("job", "cancel", *jobs[1:]).exit_code == 0


def test_what_a_box_has_done_of_several_jobs_is_told_where_it_fails_at_the_next(prepared):
    """It had cancelled the first, and said only that the last could not be reached."""
    named = dict.fromkeys(("a", "b", "c", "d"), (200, {"id": "a", "status": "cancelled"}))
    named |= {"b": (404, openai_error("no b", None)), "c": (409, openai_error("not c", None))}
    named["d"] = (503, openai_error("no box", "controller_unavailable"))
    for job, answer in named.items():
        prepared.prepare("POST", f"/v1/fine_tuning/jobs/{job}/cancel", answer)
    told = prepared.run("job", "cancel", "a", "b", "c")
    assert (told.exit_code, told.stdout) == (3, "a: cancel accepted, status cancelled\n")
    assert told.stderr.splitlines() == ["error: no b", "error: not c"]
    failed = prepared.run("job", "cancel", *named, "e")
    assert (failed.exit_code, failed.stdout) == (6, told.stdout)
    assert failed.stderr.splitlines() == ["error: no b", "error: not c", "error: no box"]
    assert prepared.run("job", "cancel", "d", "a").stdout == ""


def test_files(box, tmp_path):
    path = tmp_path / "my data.jsonl"
    path.write_bytes(chat_lines(3))
    made = box.json("file", "upload", str(path))
    assert made["filename"] == path.name and made["status"] == "processed" and made["purpose"] == "fine-tune"
    assert made["bytes"] == path.stat().st_size
    assert [f["id"] for f in box.json("file", "list")["data"]] == [made["id"]]
    assert made["id"] in box.run("file", "list").stdout
    assert box.json("file", "get", made["id"]) == made
    saved = tmp_path / "saved"
    assert box.run("file", "get", made["id"], "--save", str(saved)).exit_code == 0
    assert saved.read_bytes() == path.read_bytes()
    assert box.run("file", "get", made["id"], "--save", "-").stdout_bytes == path.read_bytes()
    assert box.run("file", "rm", made["id"]).stdout.strip() == f"deleted {made['id']}"
    assert box.json("file", "list")["data"] == []


def test_a_table_of_a_job_is_saved_as_csv(prepared, tmp_path):
    """The box keeps it in base64, as OpenAI does; that of a box of an older release is not."""
    table = b"step,train_loss\r\n1,2.0\r\n"
    for content in (base64.b64encode(table), table):
        prepared.prepare("GET", "/v1/files/file-1", (200, {"id": "file-1", "purpose": "fine-tune-results"}))
        prepared.prepare("GET", "/v1/files/file-1/content", (200, content))
        saved = tmp_path / "metrics.csv"
        assert prepared.run("file", "get", "file-1", "--save", str(saved)).exit_code == 0
        assert saved.read_bytes() == table
        assert prepared.run("file", "get", "file-1", "--save", "-").stdout_bytes == table


def test_bad_training_data_is_named_by_line(box, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(chat_lines(2) + b"not json\n")
    refused = box.run("file", "upload", str(path))
    assert refused.exit_code == 1
    assert "line 3" in refused.stderr and "line 3" not in refused.stdout, "they stood on a terminal twice"
    (sent,) = box.json("file", "list")["data"]
    assert lines(refused.stdout)[-1] == ["status", "error"] and "line 3" in box.run("file", "get", sent["id"]).stdout
    submitted = box.run("job", "submit", "--model", "starter", "--file", str(path))
    assert submitted.exit_code == 1 and "line 3" in submitted.stderr
    assert box.json("job", "list")["data"] == [], "no job is made of data that cannot be trained on"


LIMITS = (
    "models",
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "max_priority",
    "bounds",
    "expires_s",
)


def test_the_audit_log_says_who_did_what(box):
    assert "nothing was changed yet" in box.run("audit").stdout
    box.run("key", "create", "--name", "trial", "--scope", "inference")
    (row,) = box.json("audit")["data"]
    assert (row["by"], row["action"], row["outcome"], row["detail"]["name"]) == ("box", "key.create", "done", "trial")
    shown = box.run("audit", "--limit", "5").stdout
    assert "key.create" in shown and 'scopes=["inference"]' in shown
    assert box.run("audit", "--limit", "0").exit_code == 2


def test_limits_of_keys_and_what_was_spent(box):
    box.run("key", "create", "--name", "trial", "--model", "starter", "--requests-per-minute", "60")
    assert "60 requests/min; only starter" in box.run("key", "list").stdout
    changed = box.run("key", "limit", "trial", "--tokens-per-day", "100000", "--lift", "models").stdout
    assert "trial: 60 requests/min; 100,000 tokens/day" in changed
    raised = box.run("key", "limit", "trial", "--max-priority", "5").stdout
    assert "; 5 priority" in raised
    assert "priority" not in box.run("key", "limit", "trial", "--lift", "max_priority").stdout
    assert box.run("key", "limit", "trial", "--lift", "patience").exit_code == 2
    assert "tokens/day" not in box.run("key", "limit", "trial", "--tokens-per-day", "none").stdout
    assert box.run("key", "limit", "trial", "--tokens-per-day", "0").exit_code == 2
    assert box.json("key", "limit", "trial", "--max-priority", "-3", "--expires", "none")["max_priority"] == -3
    assert "nothing was spent" in box.run("usage", "--by", "model", "--since", "7d").stdout
    assert box.json("usage", "--by", "owner")["by"] == "owner"
    assert box.run("usage", "--by", "colour").exit_code == 2
    assert box.run("usage", "--since", "yesterday").exit_code == 2


def test_keys(box):
    made = box.run("key", "create", "--name", "alice")
    key = made.stdout.strip()
    assert key.startswith("sk-") and "\n" not in key
    assert "not shown again" in made.stderr
    answer = box.json("key", "create", "--name", "ops", "--scope", "admin", "--scope", "inference")
    assert set(answer) == {"id", "name", "key", "owner", "prefix", "scopes", "created_s", "revoked_s", *LIMITS}
    assert answer["scopes"] == ["admin", "inference"]
    listed = box.json("key", "list")
    assert [k["name"] for k in listed["data"]] == ["alice", "ops"] and "key" not in listed["data"][0]
    assert box.run("key", "revoke", "alice").stdout.startswith("revoked alice (key_")
    assert re.match(r"alice \(key_\w+\) was revoked already, \d{4}-", box.run("key", "revoke", "alice").stdout)
    assert [k["name"] for k in box.json("key", "list")["data"]] == ["ops"]
    assert box.json("key", "list", "--all")["data"][0]["revoked_s"] is not None
    assert box.run("key", "revoke", "nobody").exit_code == 3
    assert "no key of scope admin is left" in box.run("key", "revoke", "ops").stdout
    box.run("key", "create", "--name", "ops")
    assert box.run("key", "create", "--name", "ops").exit_code == 5
    assert box.run("key", "create", "--name", "bad*name").exit_code == 2


def test_keys_that_expire(box):
    made = box.json("key", "create", "--name", "guest", "--expires", "30d")
    assert abs(made["expires_s"] - time.time() - 30 * 86_400) < 60
    day = datetime(2099, 12, 31)
    shown = box.run("key", "limit", "guest", "--expires", "2099-12-31").stdout
    assert "guest: none, until 2100-01-01 00:00:00" in shown, "its last day is the one that was given"
    (row,) = box.json("key", "list")["data"]
    assert row["expires_s"] == day.timestamp() + 86_400
    assert "2100-01-01" in box.run("key", "list").stdout
    assert box.json("key", "limit", "guest", "--lift", "expires")["expires_s"] is None
    late = box.run("key", "create", "--name", "late", "--expires", "2020-01-01")
    assert late.exit_code == 2 and "'2020-01-01', which is past" in " ".join(late.stderr.split())
    assert box.run("key", "create", "--name", "odd", "--expires", "soon").exit_code == 2
    for never in ("9999-12-31", "9999-12-31T23:59-12:00"):
        assert box.run("key", "create", "--name", "odd", "--expires", never).exit_code == 2, never


def test_a_model_is_shared_and_no_longer(box):
    assert "everybody" in box.run("model", "show", "starter").stdout
    assert box.run("model", "share", "starter", "--with", "all", "--stop").stdout.strip() == (
        "starter is for operators alone"
    )
    box.json("key", "create", "--name", "bobs", "--owner", "bob")
    shared = box.run("model", "share", "starter", "--with", "bob", "--with", "carol")
    assert shared.stdout.strip() == "starter is for bob, carol and operators"
    assert "no key has the owner carol yet" in shared.stderr
    assert "yet" not in box.run("model", "share", "starter", "--with", "bob").stderr
    assert "bob, carol and operators" in box.run("model", "show", "starter").stdout
    assert box.json("model", "share", "starter", "--with", "all")["shared_with_everybody"] is True
    assert box.run("model", "share", "nothing", "--with", "bob").exit_code == 3
    assert box.run("model", "share", "starter", "--with", "b\tb").exit_code == 2


def test_revoking_says_what_stopped(box):
    box.run("key", "create", "--name", "alice")
    key_id = box.do(lambda: keys.find(box.context.db, "alice").id)
    box.do(
        lambda: jobs.insert(
            box.context.db,
            JobRow(
                id="ftjob-1",
                model="starter",
                method="supervised",
                training_file="f",
                seed=1,
                output_model="ft:x",
                created_s=1.0,
                key_id=key_id,
                owner="alice",
                phase="queued",
            ),
        )
    )
    assert "; 1 job is paused" in box.run("key", "revoke", "alice").stdout


def test_json_is_one_line_in_a_pipe_and_holds_any_character(box):
    text = box.run("key", "create", "--name", "zoë", "-o", "json")
    assert text.exit_code == 2, "names of keys are ASCII"
    text = box.run("gpu", "list", "-o", "json").stdout
    assert text.count("\n") == 1 and json.loads(text)


def test_text_of_the_box_is_never_markup(box):
    box.context.scheduler.devices[0]["name"] = "[red]GPU[/red] \x1b[31m"
    text = box.run("gpu", "list").stdout
    assert "[red]GPU[/red]" in text and "\x1b" not in text


def test_a_list_has_the_rows_of_all_its_pages(box, monkeypatch):
    monkeypatch.setattr(database, "PAGE_BYTES", 500)
    for n in range(5):
        box.run("key", "create", "--name", f"trial-{n}", "--scope", "inference")
    names = [row["detail"]["name"] for row in box.json("audit")["data"]]
    assert names == [f"trial-{n}" for n in (4, 3, 2, 1, 0)]
    assert [row["detail"]["name"] for row in box.json("audit", "--limit", "3")["data"]] == names[:3]


def test_a_key_without_the_scope_read_lists_what_is_its_owners(box: ControlledBox, tmp_path, monkeypatch):
    others = make_job(box, tmp_path)
    scopes, ann = frozenset({"inference", "fine_tuning"}), box.json("key", "create", "--name", "ann")["id"]
    monkeypatch.setattr(peers, "BOX", Identity(ann, scopes))
    own = make_job(box, tmp_path)
    listed = box.run("job", "list").output
    assert own in listed and others not in listed
    assert [one["id"] for one in box.json("job", "list")["data"]] == [own]
    assert lines(box.run("job", "get", own).output)[0] == ["job", own]
    assert box.run("job", "get", others).exit_code == 3
    assert lines(box.run("model", "list").output)[1][:2] == ["starter", "org-local"]
    assert "starter" in box.run("model", "show", "starter").output
    monkeypatch.setattr(peers, "BOX", Identity(ann, frozenset({"metrics"})))
    refused = box.run("job", "list")
    assert refused.exit_code == 4 and "admin or read" in refused.output
