"""Pipelines through the API: what a run does at each step, after a restart, by the clock and when there is new data."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import re
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from appliance.config import BoxConfig
from appliance.controller.data_checks import data_work
from appliance.controller.files import storage
from appliance.controller.jobs.events import JobEvents
from appliance.controller.jobs.gate_request import GateRequest
from appliance.controller.pipelines import new_data, pipeline_routes
from appliance.controller.pipelines import runner as pipeline_runner
from appliance.controller.pipelines.spec import PipelineSpec, job_of
from appliance.controller.sweeps.spec import SweepSpec, trials_of
from appliance.store.objects import files, gates, jobs, models, pipelines
from appliance.store.records import audit, keys
from appliance.store.rows import KeyRow, PipelineRunRow
from tests.unit.controller.conftest import ADMIN, Control, chat_lines
from tests.unit.controller.test_data_checks import began
from tests.unit.controller.test_gates import ITEMS, Answers, looked, suite
from tests.unit.controller.test_stable_names import active
from tests.unit.controller.test_stable_names import run as train

TRAIN = {"model": "starter", "publish_as": "fraud"}


@pytest.fixture
def events(control: Control) -> JobEvents:
    return JobEvents(control.db, control.context.files_dir, "local")


@pytest.fixture(autouse=True)
def administrator(control: Control) -> None:
    """The key of ADMIN lives: work that goes on without its request asks the store what it may."""
    row = KeyRow("key_admin", "admin", "0" * 64, "", 1.0, owner="key_admin", scopes=["admin"])
    keys.insert(control.db, row)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "chats"
    made.mkdir()
    return made


def put_day(folder: Path, name: str, count: int = 12, data: bytes | None = None) -> Path:
    """A file that nobody writes to any more."""
    path = folder / name
    path.write_bytes(chat_lines(count) if data is None else data)
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


async def post(control: Control, path: str, body: Any = None, status: int = 200, headers: Any = ADMIN) -> Any:
    answer = await control.http.post(f"/v1/{path}", json=body or {}, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def get(control: Control, path: str, headers: Any = ADMIN) -> Any:
    return (await control.http.get(f"/v1/{path}", headers=headers)).json()


async def put(control: Control, headers: Any = ADMIN, **spec: Any) -> str:
    spec = {"name": "nightly", "train": TRAIN, **spec}
    return str((await post(control, "pipelines", {"spec": spec}, headers=headers))["id"])


async def begun(control: Control, headers: Any = ADMIN) -> str:
    return str((await post(control, "pipelines/nightly/runs", headers=headers))["id"])


async def rounds(control: Control, run_id: str, most: int = 12) -> PipelineRunRow:
    """Looks of all who see something through."""
    state = control.app.state
    for _ in range(most):
        await state.pipelines.look()
        await state.pipelines.tasks.idle()
        await control.settle()
        await looked(control)
        await state.evaluations.tasks.idle()
    row = pipelines.find_run(control.db, run_id)
    assert row is not None
    return row


def states(run: PipelineRunRow) -> dict[str, str]:
    return {one["name"]: one["state"] for one in run.steps}


def says(run: PipelineRunRow, step: str) -> str:
    return str(next(one["says"] for one in run.steps if one["name"] == step))


async def test_a_run_goes_from_new_data_to_a_version_that_answers_and_keeps_it_only_if_better(
    control: Control, events: JobEvents, folder: Path
):
    answers = Answers(control)
    asked = await suite(control)
    await put(
        control,
        data={"folder": str(folder)},
        evaluate={"eval": asked["eval_id"], "data_source": asked["data_source"]},
        gate={"better_by": 0, "level": 0.07},
    )
    put_day(folder, "b.jsonl")
    put_day(folder, "a.jsonl", data=chat_lines(3).rstrip(b"\n"))
    put_day(folder, "notes.txt")
    run = await rounds(control, await begun(control))
    assert states(run) | {"train": "running"} == {
        "data": "done",
        "check": "done",
        "prepare": "skipped",
        "train": "running",
        "evaluate": "waiting",
        "gate": "waiting",
        "canary": "skipped",
        "promote": "waiting",
    }
    assert says(run, "data").startswith("2 files") and says(run, "check") == "15 examples"
    job = jobs.get(control.db, run.job_id or "")
    lines = (control.context.files_dir / job.training_file).read_bytes().splitlines()
    assert len(lines) == 15, "the file without a newline at its end loses none"
    v1 = train(control, events, job.id)
    run = await rounds(control, run.id)
    assert (run.state, run.outcome, active(control)) == ("succeeded", "answers", v1)
    assert states(run)["promote"] == "done" and says(run, "promote") == f"{v1} answers"
    assert "8 of 12" not in says(run, "evaluate") and "66.7% of 12 passed" in says(run, "evaluate")
    assert files.find(control.db, job.training_file, viewer=None, now_s=0) is None, "what was joined is not kept"
    # Nothing new: nothing is trained.
    run = await rounds(control, await begun(control))
    assert (run.state, run.outcome, run.job_id) == ("succeeded", "nothing_new", None)
    assert states(run)["data"] == "done" and states(run)["train"] == "skipped"
    # The next day is no better.
    put_day(folder, "c.jsonl")
    run = await rounds(control, await begun(control))
    assert list(pipelines.chosen(control.db, run.id)) == [str(folder / "c.jsonl")]
    v2 = train(control, events, run.job_id or "")
    run = await rounds(control, run.id)
    assert (run.state, run.outcome, active(control)) == ("succeeded", "left", v1)
    assert "refused" in says(run, "gate") and says(run, "promote") == f"{v1} goes on answering" and v2
    # And the one after is.
    put_day(folder, "d.jsonl")
    run = await rounds(control, await begun(control))
    answers.right[(run.job_id or "").removeprefix("ftjob-")[:8]] = ITEMS
    v3 = train(control, events, run.job_id or "")
    run = await rounds(control, run.id)
    assert (run.outcome, active(control)) == ("answers", v3) and f"in place of {v1}" in says(run, "promote")
    shown = await get(control, f"pipeline_runs/{run.id}")
    assert shown["gate_id"] and shown["data"]["files"] == 1 and [one["name"] for one in shown["steps"]][0] == "data"
    assert [one["outcome"] for one in (await get(control, "pipelines/nightly/runs"))["data"]] == [
        "answers",
        "left",
        "nothing_new",
        "answers",
    ]
    actions = [row.action for row in audit.page(control.db, after=None, limit=30).data]
    assert actions.count("pipeline.run") == actions.count("pipeline.end") == 4


async def test_steps_that_are_left_out_are_skipped(control: Control, events: JobEvents):
    headers = dict(control.http.headers)
    file_id = await control.upload()
    await put(control, headers, data={"file": file_id}, check=False)
    run = await rounds(control, await begun(control, headers))
    assert run.file_id == file_id and states(run)["check"] == "skipped"
    version = train(control, events, run.job_id or "")
    run = await rounds(control, run.id)
    assert (run.state, run.outcome, active(control)) == ("succeeded", "answers", version)
    assert {states(run)[name] for name in ("evaluate", "gate", "canary")} == {"skipped"}
    await put(control, headers, data={"file": file_id}, promote=False)
    run = await rounds(control, await begun(control, headers))
    train(control, events, run.job_id or "")
    run = await rounds(control, run.id)
    assert (run.state, run.outcome, active(control)) == ("succeeded", "left", version)


async def test_a_controller_that_is_killed_makes_nothing_twice(
    control: Control, events: JobEvents, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between any two writes: the next look begins the step anew, and finds what is there."""
    await put(control, data={"folder": str(folder)})
    put_day(folder, "a.jsonl")
    run_id = await begun(control)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "rename", lambda *_: (_ for _ in ()).throw(KeyError("killed")))
        run = await rounds(control, run_id, 1)
    assert run.file_id is None and run.data_files and list(control.context.files_dir.iterdir()) == []
    with monkeypatch.context() as patch:
        insert = pipeline_runner.insert_job

        def killed(*given: Any) -> Any:
            insert(*given)
            raise KeyError("killed")

        patch.setattr(pipeline_runner, "insert_job", killed)
        run = await rounds(control, run_id, 2)
    assert run.file_id is not None and run.job_id is None
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []
    put_day(folder, "b.jsonl")
    run = await rounds(control, run_id, 2)
    (job,) = jobs.page(control.db, viewer=None, after=None, limit=10).data
    assert run.job_id == job.id and list(pipelines.chosen(control.db, run.id)) == [str(folder / "a.jsonl")], (
        "what it has chosen, it keeps to"
    )
    run = await rounds(control, run_id, 3)
    assert len(jobs.page(control.db, viewer=None, after=None, limit=10).data) == 1


async def test_uploaded_files_are_taken_by_their_names_once(control: Control, events: JobEvents):
    headers = {"x-appliance-key-id": control.as_key("ann"), "x-appliance-scopes": "inference,fine_tuning"}
    await put(control, headers, data={"uploads": "day-*.jsonl"})
    first = await control.upload(name="day-1.jsonl")
    await control.upload(name="other.jsonl")
    run = await rounds(control, await begun(control, headers))
    assert run.file_id == first, "one file is taken as it is"
    train(control, events, run.job_id or "")
    run = await rounds(control, run.id)
    assert run.outcome == "answers" and files.find(control.db, first, viewer=None, now_s=0) is not None
    second, third = await control.upload(name="day-2.jsonl"), await control.upload(name="day-3.jsonl")
    run = await rounds(control, await begun(control, headers))
    assert pipelines.chosen(control.db, run.id).keys() == {second, third} and run.file_id not in (second, third)
    job = jobs.get(control.db, run.job_id or "")
    assert (job.owner, job.key_id) == ("ann", headers["x-appliance-key-id"])


async def test_data_that_is_bad_fails_the_run_by_line_and_is_not_taken(control: Control, folder: Path):
    await put(control, data={"folder": str(folder)}, schedule={"on_new_data": True})
    put_day(folder, "a.jsonl", data=b'{"messages": 3}\n')
    run = await rounds(control, await begun(control))
    assert run.state == "failed" and "line 1" in run.reason and states(run)["check"] == "failed"
    assert states(run)["train"] == "skipped" and jobs.page(control.db, viewer=None, after=None, limit=1).data == []
    row = pipelines.find(control.db, "nightly")
    assert row is not None and pipelines.taken(control.db, row.id) == {}
    # The schedule does not try the same again and again, and does once there is other data.
    await post(control, "pipelines/nightly/schedule", {"on": True})
    await rounds(control, run.id, 1)
    row = pipelines.find(control.db, "nightly")
    assert row is not None and "tried again once there is other data" in row.note
    put_day(folder, "a.jsonl")
    pipelines.update(control.db, row.id, next_s=0.0)
    await rounds(control, run.id, 4)
    going = pipelines.running_of(control.db, row.id)
    assert going is not None and going.trigger == "data" and going.job_id is not None


@pytest.mark.usefixtures("checked_here")
async def test_data_is_checked_and_prepared_before_it_is_trained_on(control: Control, folder: Path):
    row = json.dumps(
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Call me at a@b.de"}]}
    )
    put_day(folder, "a.jsonl", data=chat_lines(20) + f"{row}\n{row}\nno JSON\n".encode())
    await put(
        control, data={"folder": str(folder)}, check={"at_most": {"personal_data": 0.01}, "leave_out": ["language"]}
    )
    run = await rounds(control, await begun(control), 4)
    assert run.state == "failed" and "line 23" in run.reason, "nothing takes the bad line out"
    prepare = {"drop": ["bad_lines", "duplicates"], "mask": True, "split": 0.2, "seed": 3}
    await put(
        control,
        data={"folder": str(folder)},
        check={"at_most": {"personal_data": 0.01}, "leave_out": ["language"]},
        prepare=prepare,
    )
    run = await rounds(control, await begun(control), 4)
    assert run.state == "failed" and "personal data: 2 of" in run.reason and states(run)["check"] == "failed"
    await put(control, data={"folder": str(folder)}, check={"at_most": {"personal_data": 0.2}}, prepare=prepare)
    run = await rounds(control, await begun(control), 6)
    assert run.job_id is not None and states(run)["prepare"] == "done", run
    assert "1 bad lines left out" in says(run, "prepare") and "1 duplicates" in says(run, "check")
    job = jobs.get(control.db, run.job_id)
    assert (job.training_file, job.validation_file) == (run.made["prepared"], run.made["validation"])
    texts = [(control.context.files_dir / one).read_text() for one in (job.training_file, job.validation_file or "")]
    assert sum(len(text.splitlines()) for text in texts) == 21 and "a@b.de" not in "".join(texts)
    await post(control, f"pipeline_runs/{run.id}/cancel")
    assert list(control.context.files_dir.iterdir()) == [], "what was made of the data goes with the run"


async def at_check(control: Control, folder: Path) -> str:
    """A run whose next look checks its data."""
    put_day(folder, "a.jsonl")
    await put(control, data={"folder": str(folder)}, check={"at_most": {"duplicates": 1}, "leave_out": ["toxic"]})
    run_id = await begun(control)
    await rounds(control, run_id, 1)
    return run_id


async def test_a_check_waits_while_its_owner_has_as_many_as_may_wait(
    control: Control, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    run_id = await at_check(control, folder)
    monkeypatch.setattr(data_work, "_MOST_WAITING", 0)
    run = await rounds(control, run_id, 2)
    assert run.state == "running" and "checks of your data are under way" in says(run, "check")
    monkeypatch.undo()
    run = await rounds(control, run_id, 2)
    assert run.job_id is not None and "duplicates" in run.made["checked"]
    file = files.find(control.db, run.file_id or "", viewer=None, now_s=0)
    assert file is not None and file.data_check is not None and "toxic" not in file.data_check["checks"]
    assert files.unchecked(control.db) is None, "what the run has checked is not checked once more"


async def test_a_run_that_is_cancelled_ends_the_check_of_its_data(
    control: Control, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """It went on for as long as the data took, and the owner's next check waited for it."""
    run_id = await at_check(control, folder)
    processes = began(monkeypatch)
    await control.app.state.pipelines.look()
    while not processes:
        await asyncio.sleep(0)
    await post(control, f"pipeline_runs/{run_id}/cancel")
    await control.app.state.pipelines.tasks.idle()
    assert processes[0].returncode == -signal.SIGKILL
    run = await rounds(control, run_id, 1)
    assert run.state == "cancelled" and list(control.context.files_dir.iterdir()) == []


async def test_the_clock_begins_runs_in_its_time_zone_and_one_at_a_time(control: Control, folder: Path):
    schedule = {"cron": "30 2 * * *", "tz": "Europe/Berlin"}
    await put(control, data={"folder": str(folder)}, schedule=schedule)
    shown = await post(control, "pipelines/nightly/schedule", {"on": True})
    at = time.gmtime(shown["next_at"])
    assert shown["scheduled"] and (at.tm_hour, at.tm_min) in ((0, 30), (1, 30)) and shown["next_at"] > time.time()
    row = pipelines.find(control.db, "nightly")
    assert row is not None
    put_day(folder, "a.jsonl")
    pipelines.update(control.db, row.id, next_s=time.time() - 5)  # it came while the box was off, or now
    await control.app.state.pipelines.look()
    await control.app.state.pipelines.tasks.idle()
    going = pipelines.running_of(control.db, row.id)
    assert going is not None and going.trigger == "clock"
    pipelines.update(control.db, row.id, next_s=time.time() - 5)
    await rounds(control, going.id, 1)
    row = pipelines.find(control.db, "nightly")
    assert row is not None and row.note == f"{going.id} still goes on" and (row.next_s or 0) > time.time()
    assert (await post(control, "pipelines/nightly/runs", status=409))["error"]["code"] == "pipeline_running"
    await post(control, "pipelines/nightly/schedule", {"on": False})
    assert not pipelines.due(control.db, time.time() + 10 * 86400)


async def test_a_run_is_cancelled_with_its_job_and_its_gate(control: Control, folder: Path):
    Answers(control)
    asked = await suite(control)
    await put(
        control,
        data={"folder": str(folder)},
        evaluate={"eval": asked["eval_id"], "data_source": asked["data_source"]},
    )
    put_day(folder, "a.jsonl")
    run = await rounds(control, await begun(control), 3)
    shown = await post(control, f"pipeline_runs/{run.id}/cancel")
    assert shown["state"] == "cancelled" and jobs.get(control.db, run.job_id or "").phase == "cancelled"
    gate = gates.of_job(control.db, run.job_id or "")
    assert gate is not None and gate.verdict == "cancelled"
    assert (await post(control, f"pipeline_runs/{run.id}/cancel"))["state"] == "cancelled"
    row = pipelines.find(control.db, "nightly")
    assert row is not None and pipelines.taken(control.db, row.id) == {}, "its data is still new"
    answer = await control.http.delete("/v1/pipelines/nightly", headers=ADMIN)
    assert answer.json()["deleted"] and pipelines.find_run(control.db, run.id) is None


async def test_no_folder_that_cannot_be_read_is_scheduled(control: Control, folder: Path):
    async def refused(path: str, body: Any) -> str:
        error = (await post(control, path, body, 400))["error"]
        assert (error["param"], error["code"]) == ("data.folder", "folder_not_readable")
        return str(error["message"])

    absent = {"data": {"folder": str(folder / "none")}, "schedule": {"on_new_data": True}}
    await put(control, **absent)
    assert f"{folder / 'none'} cannot be read: No such file" in await refused(
        "pipelines/nightly/schedule", {"on": True}
    )
    assert not (await get(control, "pipelines/nightly"))["scheduled"]
    await put(control, **absent | {"data": {"folder": str(folder)}})
    assert (await post(control, "pipelines/nightly/schedule", {"on": True}))["scheduled"]
    await refused("pipelines", {"spec": {"name": "nightly", "train": TRAIN, **absent}})
    assert (await get(control, "pipelines/nightly"))["spec"]["data"]["folder"] == str(folder)
    folder.rename(folder.with_name("elsewhere"))
    assert not (await post(control, "pipelines/nightly/schedule", {"on": False}))["scheduled"]


async def test_a_step_that_cannot_go_on_says_why(control: Control, events: JobEvents, folder: Path):
    await put(control, data={"folder": str(folder / "none")})
    run = await rounds(control, await begun(control))
    assert run.state == "failed" and "cannot be read" in run.reason
    await put(control, data={"folder": str(folder)})
    put_day(folder, "a.jsonl")
    run = await rounds(control, await begun(control), 3)
    events.failed(run.job_id or "", "training_failed", "the loss is not finite")
    run = await rounds(control, run.id, 2)
    assert run.state == "failed" and "the loss is not finite" in run.reason and states(run)["train"] == "failed"
    assert states(run)["promote"] == "skipped"
    answer = await control.http.post(
        "/v1/files", files={"file": ("x.jsonl", chat_lines(12))}, data={"purpose": "user_data"}, headers=ADMIN
    )
    await put(control, data={"file": answer.json()["id"]})
    run = await rounds(control, await begun(control), 4)
    assert run.state == "failed" and "expected purpose 'fine-tune'" in run.reason and "'train'" not in run.reason
    key = control.as_key("ann")
    headers = {"x-appliance-key-id": key, "x-appliance-scopes": "inference,fine_tuning"}
    await control.upload(name="day-1.jsonl")
    await put(control, headers, data={"uploads": "day-*"})
    run_id = await begun(control, headers)
    keys.update(control.db, key, scopes=["inference"])
    run = await rounds(control, run_id, 4)
    assert run.state == "failed" and "needs the scope: fine_tuning" in run.reason and run.job_id is None
    run_id = await begun(control, headers)
    keys.revoke(control.db, key)
    assert "revoked" in (await rounds(control, run_id, 2)).reason


async def test_bad_lines_of_joined_files_are_named_by_their_own_file(control: Control, folder: Path):
    """They were those of a file that the run had joined, and deleted with its end: so was what it told to look at."""
    await put(control, data={"folder": str(folder)})
    put_day(folder, "a.jsonl", data=chat_lines(3).rstrip(b"\n"))
    put_day(folder, "b.jsonl", data=b"")
    put_day(folder, "c.jsonl", data=chat_lines(2) + b"{}\n" + "你好".encode("gbk") + b"\n" + b"{}\n{}\n")
    run = await rounds(control, await begun(control), 4)
    assert run.state == "failed"
    for text in (run.reason, says(run, "check")):
        assert "4 bad example(s): c.jsonl, line 3: " in text and "c.jsonl, line 4: is not UTF-8" in text
        assert text.endswith("; and 1 more")
    await control.upload(name="day-1.jsonl")
    await control.upload(chat_lines(1) + b"{}\n", name="day-2.jsonl")
    key = control.as_key("ann")
    headers = {"x-appliance-key-id": key, "x-appliance-scopes": "inference,fine_tuning"}
    await control.upload(name="day-1.jsonl")
    await control.upload(chat_lines(1) + b"{}\n", name="day-2.jsonl")
    await put(control, headers, data={"uploads": "day-*"})
    run = await rounds(control, await begun(control, headers), 4)
    assert "1 bad example(s): day-2.jsonl, line 2: " in run.reason


CODE = "def grade(sample, item): return 1"


def rewarded(grader: dict[str, Any]) -> dict[str, Any]:
    return {"model": "starter", "method": {"type": "reinforcement", "reinforcement": {"grader": grader}}}


async def test_what_cannot_be_a_pipeline_is_refused_in_words(control: Control, folder: Path):
    data = {"folder": str(folder)}
    suites = {"eval": "eval_x"}
    for fields, says_ in (
        ({"data": {}}, "one of 'file', 'uploads', 'folder' and 'bucket'"),
        ({"data": data | {"file": "file-1"}}, "one of"),
        ({"data": {"file": "file-x"}}, "No such File"),
        ({"data": {"folder": "here"}}, "folder"),
        ({"data": data, "train": {"model": "none"}}, "does not exist"),
        ({"data": data, "train": {**TRAIN, "gate": {}}}, "train.gate"),
        ({"data": data, "train": {**TRAIN, "epochs": 3}}, "train.epochs"),
        ({"data": data, "gate": {"better_by": 0}}, "'evaluate' is missing"),
        ({"data": data, "evaluate": suites}, "No eval found"),
        ({"data": data, "train": {"model": "starter"}, "evaluate": suites}, "publish_as"),
        ({"data": data, "evaluate": suites, "gate": {"better_by": 3}}, "share"),
        ({"data": data, "evaluate": suites, "canary": {}, "promote": False}, "promote"),
        ({"data": data, "schedule": {}}, "one of 'cron'"),
        ({"data": data, "schedule": {"cron": "at night"}}, "cron"),
        ({"data": data, "schedule": {"cron": "0 2 * * *", "tz": "Mars"}}, "time zone"),
        ({"data": {"file": await control.upload()}, "schedule": {"on_new_data": True}}, "does not change"),
        ({"data": data, "name": "a/b"}, "name"),
        ({"data": data, "check": {"at_most": {"spelling": 0.1}}}, "at_most"),
        ({"data": data, "prepare": {"against": "file-x"}}, "No such File"),
        ({"data": data, "prepare": {"split": 0.1}, "train": {**TRAIN, "validation_file": "file-x"}}, "split"),
        ({"data": data, "other": 1}, "other"),
        ({"data": data, "train": {"modl": "starter"}}, "Unrecognized request argument supplied: train.modl."),
        ({"data": data, "train": {f"f{n}": 1 for n in range(150)}}, "151 fields or values are not what is expected"),
        ({"data": data, "train": {}}, "Missing required parameter: 'train.model'"),
        ({"data": data, "evaluate": {"evl": "eval_x"}}, "Unrecognized request argument supplied: spec.evaluate.evl"),
        ({"dta": data, "data": ...}, "Unrecognized request argument supplied: spec.dta"),
        ({"data": data, "train": {"model": "starter", "method": {"type": "reinforcement"}}}, "reinforcement.grader'"),
        ({"data": data, "train": rewarded({"type": "python", "source": CODE})}, "grader.name"),
        ({"data": data, "train": rewarded({"type": "python", "name": "n", "source": CODE + "("})}, "is not Python"),
    ):
        spec = {k: v for k, v in {"name": "nightly", "train": TRAIN, **fields}.items() if v is not ...}
        answer = await control.http.post("/v1/pipelines", json={"spec": spec}, headers=ADMIN)
        assert answer.status_code in (400, 404, 422) and says_ in answer.text, (fields, answer.text)
    assert (await get(control, "pipelines"))["data"] == []
    # Every file of the box is the administrator's to read.
    spec = {"name": "nightly", "train": TRAIN, "data": data}
    answer = await control.http.post("/v1/pipelines", json={"spec": spec})
    assert answer.status_code == 403
    await put(control, data=data)
    assert (await post(control, "pipelines/nightly/schedule", {"on": True}, 409))["error"]["code"] == "no_schedule"


def documented(page: str) -> list[dict[str, Any]]:
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.S)]


def test_what_the_documents_show_is_what_the_box_takes():
    nightly, settings, of_bucket = documented("pipelines.md")
    spec = PipelineSpec.model_validate(nightly)
    gate = job_of(spec, "file-1").gate
    assert gate is not None and gate.then == "canary" and gate.suites[0].better_by == 0
    known = BoxConfig.model_validate(settings).controller.buckets
    fields = {name: part for name, part in nightly.items() if name not in ("data", "schedule")}
    data = PipelineSpec.model_validate(fields | of_bucket).data
    assert data.bucket is not None and known[data.bucket].credentials_profile == "reader"
    (rates,) = documented("sweeps.md")
    assert len(trials_of(SweepSpec.model_validate(rates))) == 6
    (terms,) = documented("gates.md")
    assert GateRequest.model_validate(terms).suites[0].not_worse_by == 0.02


async def test_a_pipeline_is_its_owners(control: Control):
    headers = {"x-appliance-key-id": control.as_key("ann"), "x-appliance-scopes": "inference,fine_tuning"}
    file_id = await control.upload()
    await put(control, headers, data={"file": file_id})
    run_id = await begun(control, headers)
    other = {"x-appliance-key-id": control.as_key("bob"), "x-appliance-scopes": "inference,fine_tuning"}
    for path in ("pipelines/nightly", "pipelines/nightly/runs", f"pipeline_runs/{run_id}"):
        assert (await control.http.get(f"/v1/{path}", headers=other)).status_code == 404
    await post(control, f"pipeline_runs/{run_id}/cancel", status=404, headers=other)
    await post(control, "pipelines/nightly/runs", status=404, headers=other)
    mine = await control.upload()
    await put(control, other, data={"file": mine})  # the same name, another's
    assert len((await get(control, "pipelines"))["data"]) == 2
    assert len((await get(control, "pipelines", other))["data"]) == 1


async def test_links_and_files_that_are_still_written_are_not_read(control: Control, folder: Path, tmp_path: Path):
    await put(control, data={"folder": str(folder)})
    secret = put_day(tmp_path, "secret.jsonl")
    (folder / "link.jsonl").symlink_to(secret)
    (folder / "fresh.jsonl").write_bytes(chat_lines())
    (folder / "empty.jsonl").touch()
    run = await rounds(control, await begun(control), 2)
    assert run.outcome == "nothing_new" and run.data_files == 0


async def test_a_folder_that_became_a_link_is_not_followed(control: Control, folder: Path, tmp_path: Path):
    """Only the last part of a path was looked at: who may write to a folder above had another's files trained on."""
    inner, elsewhere = folder / "inner", tmp_path / "elsewhere"
    for place in (inner, elsewhere / "inner"):
        place.mkdir(parents=True)
        put_day(place, "day.jsonl")
    found = new_data.in_folder(str(inner), "*", 9e9)
    new_data.join_chosen(found, None, tmp_path / "a", lambda: None)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(elsewhere)
    with pytest.raises(new_data.NoData, match="a symbolic link, and none is followed.*elsewhere/inner/day.jsonl"):
        new_data.join_chosen(found, None, tmp_path / "b", lambda: None)
    with pytest.raises(new_data.NoData, match="symbolic link"):
        new_data.in_folder(str(inner), "*", 9e9)


async def test_nothing_is_kept_of_patterns_that_were_looked_for(control: Control, folder: Path):
    put_day(folder, "day.jsonl")
    file_id = await control.upload(name="day.jsonl")
    owner = control.db.value("SELECT owner FROM files")
    kept = fnmatch._compile_pattern.cache_info().currsize  # type: ignore[attr-defined]
    for number in range(20):
        assert not new_data.in_folder(str(folder), f"{number}*.json[!l]", 9e9)
        assert not new_data.uploaded(control.context, f"{number}*.json[!l]", owner)
    assert list(new_data.in_folder(str(folder), "d?y*[!k]", 9e9)) == [str(folder / "day.jsonl")]
    assert list(new_data.uploaded(control.context, "d?y*[!k]", owner)) == [file_id]
    assert fnmatch._compile_pattern.cache_info().currsize == kept  # type: ignore[attr-defined]


async def test_who_is_forgotten_takes_pipelines_along(control: Control):
    key, _ = keys.create(control.db, "ann", ["inference", "fine_tuning"], owner="ann")
    headers = {"x-appliance-key-id": key.id, "x-appliance-scopes": "inference,fine_tuning"}
    control.http.headers.update(headers)
    await put(control, headers, data={"file": await control.upload()})
    run = await rounds(control, await begun(control, headers), 3)
    answer = await control.http.post("/admin/v1/forget", json={"owner": "ann", "cancel": True}, headers=ADMIN)
    assert answer.json()["done"], answer.text
    assert pipelines.find(control.db, "nightly") is None and pipelines.find_run(control.db, run.id) is None
    assert models.find(control.db, "fraud") is None


async def test_pipelines_and_the_runs_of_each_are_bounded(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline_routes, "MAX_PIPELINES", 1)
    monkeypatch.setattr(pipelines, "RUNS_KEPT", 2)
    headers = {"x-appliance-key-id": control.as_key("ann"), "x-appliance-scopes": "inference,fine_tuning"}
    await put(control, headers, data={"uploads": "none-*"})
    spec = {"name": "other", "train": TRAIN, "data": {"uploads": "none-*"}}
    assert "delete one first" in (await post(control, "pipelines", {"spec": spec}, 429, headers))["error"]["message"]
    ended = [(await rounds(control, await begun(control, headers), 1)).id for _ in range(4)]
    kept = [one["id"] for one in (await get(control, "pipelines/nightly/runs", headers))["data"]]
    assert kept == ended[:1:-1]


async def test_the_names_of_a_runs_data_are_kept_while_it_goes_on_and_read_where_they_are_needed(control: Control):
    """Of ten thousand files they are megabytes: a hundred pipelines held the controller's loop with them at every look,
    and their ended runs the disk."""
    headers = {"x-appliance-key-id": control.as_key("ann"), "x-appliance-scopes": "inference,fine_tuning"}
    for day in range(3):
        await control.upload(name=f"day-{day}{'x' * 80}.jsonl")
    await put(control, headers, data={"uploads": "day-*", "take": "all"})
    run = await rounds(control, await begun(control, headers), 1)
    assert (run.state, run.data_files, run.data_bytes) == ("running", 3, 3 * len(chat_lines()))
    shown = await get(control, f"pipeline_runs/{run.id}", headers)
    assert shown["data"] == {"files": 3, "bytes": 3 * len(chat_lines())}
    assert "xxx" not in json.dumps(pipelines.chosen(control.db, run.id)), "a file's id says which it is"
    await post(control, f"pipeline_runs/{run.id}/cancel", headers=headers)
    assert pipelines.chosen(control.db, run.id) == {}
    assert (pipelines.find_run(control.db, run.id) or run).spec == {"name": "nightly"}
    assert (await get(control, f"pipeline_runs/{run.id}", headers))["data"] == shown["data"]


@pytest.mark.parametrize("meanwhile", ["deleted", "switched off", "changed"])
async def test_what_changes_while_its_data_is_looked_for_begins_no_run(
    control: Control, folder: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
):
    """A bucket takes its time. A run of a pipeline that was deleted failed at the store, and one that had been switched
    off, or was another by then, began as it had been."""
    await put(control, data={"folder": str(folder)}, schedule={"on_new_data": True})
    await post(control, "pipelines/nightly/schedule", {"on": True})
    put_day(folder, "a.jsonl")
    runner, row = control.app.state.pipelines, pipelines.find(control.db, "nightly")
    assert row is not None
    found = runner._found

    async def slowly(*asked: Any) -> Any:
        if meanwhile == "deleted":
            pipelines.delete(control.db, row.id)
        elif meanwhile == "switched off":
            pipelines.update(control.db, row.id, scheduled=0, next_s=None)
        else:
            pipelines.update(control.db, row.id, spec={**row.spec, "check": False}, next_s=7.0)
        return await found(*asked)

    monkeypatch.setattr(runner, "_found", slowly)
    pipelines.update(control.db, row.id, next_s=time.time() - 5)
    await runner._when_due(row.id)
    assert pipelines.running_of(control.db, row.id) is None
    now = pipelines.find(control.db, row.id)
    assert (now and now.next_s) == {"deleted": None, "switched off": None, "changed": 7.0}[meanwhile]
