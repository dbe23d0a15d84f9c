"""Sweeps: which trials go on, and what a box makes and deletes of them on the way."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from appliance.controller.jobs.events import JobEvents
from appliance.controller.sweeps import halving, runner, sweep_routes
from appliance.controller.sweeps.halving import Round
from appliance.store.objects import files, jobs, models, sweeps
from appliance.store.records import keys, usage
from appliance.store.rows import SweepRow
from tests.unit.controller.conftest import Control, chat_lines
from tests.unit.controller.test_job_events import metrics
from tests.unit.controller.test_jobs import GRADER

FILES = ("training_file", "validation_file")
GRID = {"learning_rate_multiplier": [0.1, 0.3, 1.0, 3.0]}


def test_each_round_has_more_data_and_fewer_trials():
    assert halving.rounds(9, 0.1, 3) == [Round(0.1, 9), Round(pytest.approx(0.3), 3), Round(1.0, 1)]
    assert halving.rounds(27, 1 / 9, 3)[-1] == Round(1.0, 3)
    assert halving.rounds(4, 0.01, 4) == [Round(0.01, 4), Round(1.0, 1)], "one that is left is trained on all data"
    assert halving.rounds(3, 1.0, 2) == [Round(1.0, 3)]


def test_the_least_losses_go_on_and_none_that_is_no_number():
    assert halving.best({0: 2.0, 1: None, 2: 1.0, 3: float("nan"), 4: 1.5}, 2) == [2, 4]
    assert halving.best({0: None, 1: float("inf")}, 1) == []


def test_combinations_and_draws():
    assert halving.grid({"a": [1, 2], "b": ["x"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    ranges = {
        "r": {"low": 0.01, "high": 1.0, "log": True},
        "n": {"low": 1, "high": 4, "integer": True},
        "o": ["x", "y"],
    }
    found = halving.drawn(200, ranges, 3)
    assert found == halving.drawn(200, ranges, 3) != halving.drawn(200, ranges, 4)
    assert all(0.01 <= one["r"] <= 1 and one["n"] in (1, 2, 3, 4) and one["o"] in "xy" for one in found)
    assert 70 < sum(one["r"] < 0.1 for one in found) < 130, "half of a logarithm's range"


@pytest.fixture
def events(control: Control) -> JobEvents:
    return JobEvents(control.db, control.context.files_dir, "local")


async def begun(control: Control, **more: Any) -> str:
    data = {"training_file": await control.upload(chat_lines(100)), "validation_file": await control.upload()}
    spec = {"name": "rates", "device_hours": 1, "train": {"model": "starter", **data}, "grid": GRID, "first": 0.25}
    answer = await control.http.post("/v1/sweeps", json={"spec": spec | more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def look(control: Control, sweep_id: str, times: int = 3) -> SweepRow:
    for _ in range(times):
        await control.app.state.sweeps.look()
        await control.app.state.sweeps.tasks.idle()
        await control.settle()
    row = sweeps.find(control.db, sweep_id)
    assert row is not None
    return row


def end(events: JobEvents, job_id: str, loss: float | None) -> None:
    """The job with this validation loss; None: it fails."""
    events.started(job_id, ["n0/0"], resumed=False)
    if loss is None:
        events.failed(job_id, "training_failed", "x")
        return
    events.ingest(job_id, metrics(10, 2.0))
    events.ingest(job_id, {"event": "validation", "step": 10, "loss": loss})
    version = {"event": "published", "version": "step-10", "path": "/dev/shm/x", "step": 10, "bytes": 10, "epoch": 1}
    events.ingest(job_id, version)
    events.succeeded(job_id)


async def test_the_best_go_on_with_more_data_and_the_models_of_the_others_go(control: Control, events: JobEvents):
    sweep_id = await begun(control)
    row = await look(control, sweep_id)
    first = [trial["jobs"][0]["job_id"] for trial in row.trials]
    assert len(first) == 4 and len(set(first)) == 4, "looked at again, no job is made twice"
    part = files.find(control.db, row.files["0"], viewer=None, now_s=0)
    assert part is not None and (part.report or {})["n_examples"] == 25
    rates = [jobs.get(control.db, one).hyperparameters["learning_rate_multiplier"] for one in first]
    assert rates == GRID["learning_rate_multiplier"]
    for job_id, loss in zip(first, (1.5, 1.0, None, 1.2), strict=True):
        end(events, job_id, loss)
    row = await look(control, sweep_id, 4)
    assert row.round == 1 and [len(trial["jobs"]) for trial in row.trials] == [1, 2, 1, 2]
    second = [row.trials[number]["jobs"][1]["job_id"] for number in (1, 3)]
    kept = [one for one in first if models.find(control.db, jobs.get(control.db, one).output_model) is not None]
    assert kept == [], "what a round has made is not needed by the next"
    for job_id, loss in zip(second, (0.9, 0.8), strict=True):
        end(events, job_id, loss)
    row = await look(control, sweep_id, 4)
    (last,) = [trial["jobs"][2]["job_id"] for trial in row.trials if len(trial["jobs"]) == 3]
    assert jobs.get(control.db, last).training_file == row.spec["train"]["training_file"], "all of the data"
    end(events, last, 0.7)
    row = await look(control, sweep_id)
    assert (row.state, row.best) == ("succeeded", 3)
    shown = (await control.http.get(f"/v1/sweeps/{sweep_id}")).json()
    assert shown["best"] == {
        "trial": 3,
        "parameters": {"learning_rate_multiplier": 3.0},
        "loss": 0.7,
        "model": jobs.get(control.db, last).output_model,
    }
    assert [one["trials"] for one in shown["rounds"]] == [4, 2, 1]
    left = [one.output_model for one in jobs.page(control.db, viewer=None, after=None, limit=20).data]
    assert [name for name in left if models.find(control.db, name) is not None] == [shown["best"]["model"]]
    assert [files.find(control.db, one, viewer=None, now_s=0) for one in row.files.values()] == [None, None]


async def test_trials_of_rewards_are_compared_by_the_reward_held_out(control: Control, events: JobEvents):
    """They had no loss, and the sweep failed with that once its first round was paid for."""
    lines = {name: {"messages": [{"role": "user", "content": f"{name}?"}], "answer": "4"} for name in FILES}
    data = {name: await control.upload((json.dumps(line) + "\n").encode() * 40) for name, line in lines.items()}
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    train = {"model": "starter", "method": method, **data}
    sweep_id = await begun(control, train=train, grid={"learning_rate_multiplier": [1.0, 3.0]}, first=0.5)
    row = await look(control, sweep_id)
    for job_id, rewards in zip((t["jobs"][0]["job_id"] for t in row.trials), ([0.9, 0.2], [0.1, 0.7]), strict=True):
        events.started(job_id, ["n0/0"], resumed=False)
        for step, reward in enumerate(rewards):
            events.ingest(job_id, metrics(step + 1, 0.0) | {"train_mean_reward": reward})
            events.ingest(job_id, {"event": "validation", "step": step + 1, "mean_reward": reward})
        version = {"event": "published", "version": "step-2", "path": "/dev/shm/x", "step": 2, "bytes": 1, "epoch": 1}
        events.ingest(job_id, version)
        events.succeeded(job_id)
    row = await look(control, sweep_id, 4)
    assert [trial["jobs"][0]["loss"] for trial in row.trials] == [-0.2, -0.7], "of the last validation"
    assert row.round == 1 and [len(trial["jobs"]) for trial in row.trials] == [1, 2]


async def test_beyond_its_budget_nothing_more_is_trained(control: Control, events: JobEvents, monkeypatch):
    sweep_id = await begun(control)
    row = await look(control, sweep_id)
    ids = [trial["jobs"][0]["job_id"] for trial in row.trials]
    end(events, ids[0], 1.0)
    monkeypatch.setattr(usage, "device_s", lambda db, job_ids, now_s: 900.0 * len(job_ids))
    row = await look(control, sweep_id)
    assert (row.state, row.best) == ("succeeded", 0) and "1 device-hours are spent" in row.reason
    assert {jobs.get(control.db, one).phase for one in ids[1:]} == {"cancelled"}


async def test_a_sweep_that_cannot_go_on_says_why(control: Control, events: JobEvents):
    sweep_id = await begun(control)
    row = await look(control, sweep_id)
    for trial in row.trials:
        end(events, trial["jobs"][0]["job_id"], None)
    row = await look(control, sweep_id)
    assert row.state == "failed" and "no trial of round 1 came to a loss" in row.reason
    key = control.as_key("ann")
    sweep_id = await begun(control)
    keys.revoke(control.db, key)
    assert "revoked" in (await look(control, sweep_id, 1)).reason
    key = control.as_key("ben")
    sweep_id = await begun(control)
    keys.update(control.db, key, scopes=["inference"])
    row = await look(control, sweep_id, 1)
    assert row.state == "failed" and "needs the scope: fine_tuning" in row.reason


async def test_a_sweep_is_cancelled_with_its_jobs(control: Control, events: JobEvents):
    sweep_id = await begun(control)
    row = await look(control, sweep_id)
    end(events, row.trials[0]["jobs"][0]["job_id"], 1.0)
    for _ in range(2):
        answer = await control.http.post(f"/v1/sweeps/{sweep_id}/cancel")
        assert answer.json()["state"] == "cancelled"
    made = jobs.page(control.db, viewer=None, after=None, limit=20).data
    assert all(one.finished for one in made)
    assert [one.output_model for one in made if models.find(control.db, one.output_model) is not None] == []


async def test_what_cannot_be_a_sweep_is_refused_in_words(control: Control, monkeypatch: pytest.MonkeyPatch):
    file_id = await control.upload()
    train = {"model": "starter", "training_file": file_id, "validation_file": file_id}
    good = {"name": "n", "device_hours": 1, "train": train, "grid": GRID}
    drawn = {"trials": 3, "parameters": {"n_epochs": [1, 2]}}
    code = {"type": "python", "name": "n", "source": "def grade(sample, item) return 1"}
    for more, says in (
        ({"grid": {"n_epochs": [1]}}, "expected 2 to 64"),
        ({"random": drawn}, "give one of them"),
        ({"train": {**train, "publish_as": "x"}}, "publish_as"),
        ({"train": {**train, "gate": {}}}, "train.gate"),
        ({"train": {"model": "starter", "training_file": file_id}}, "validation_file"),
        ({"train": {**train, "model": "none"}}, "does not exist"),
        ({"train": {**train, "training_file": "file-x"}}, "No such File"),
        ({"device_hours": 0}, "device_hours"),
        ({"first": 2}, "first"),
        # Whichever trial it is of: what its job is refused for would end the sweep with others' jobs begun.
        ({"grid": {"n_epochs": [1, 2, 400]}}, "n_epochs"),
        ({"grid": {"lora_rank": [8], "warmth": [1, 2]}}, "warmth"),
        ({"train": {**train, "hyperparameters": [1]}}, "hyperparameters"),
        ({"train": {**train, "method": {"type": "supervised", "supervised": [1]}}}, "supervised"),
        ({"train": {**train, "method": {"type": "dpo", "dpo": {"hyperparameters": [1]}}}}, "hyperparameters"),
        ({"train": {**train, "method": {"type": "reinforcement", "reinforcement": {"grader": code}}}}, "is not Python"),
    ):
        answer = await control.http.post("/v1/sweeps", json={"spec": good | more})
        assert answer.status_code in (400, 404, 422) and says in answer.text, (more, answer.text)
    bad = {**good, "random": {**drawn, "parameters": {"lr": {"low": 0, "high": 1, "log": True}}}}
    del bad["grid"]
    assert "above 0" in (await control.http.post("/v1/sweeps", json={"spec": bad})).text
    monkeypatch.setattr(sweep_routes, "MAX_RUNNING", 1)
    assert (await control.http.post("/v1/sweeps", json={"spec": good})).status_code == 200
    assert (await control.http.post("/v1/sweeps", json={"spec": good})).status_code == 429


async def test_ended_sweeps_are_kept_up_to_a_number(control: Control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweeps, "KEPT", 1)
    ids = [await begun(control) for _ in range(3)]
    for sweep_id in ids:
        await control.http.post(f"/v1/sweeps/{sweep_id}/cancel")
    assert [one["id"] for one in (await control.http.get("/v1/sweeps")).json()["data"]] == [ids[-1]]


async def test_a_sweeps_row_stays_small_and_can_be_shown(control: Control):
    """Whatever its values are: the row is read in each look at it, and infinity is no JSON."""
    file_id = await control.upload()
    train = {"model": "starter", "training_file": file_id, "validation_file": file_id}
    good = {"name": "n", "device_hours": 1, "train": train}
    long = ["x" * 1500]
    huge = {"low": -1.7e308, "high": 1.7e308}
    for more in (
        {"grid": {"n_epochs": long, "batch_size": [*range(64)]}},
        {"random": {"trials": 64, "parameters": {"n_epochs": long}}},
        {"random": {"trials": 4, "parameters": {"lr": huge}}},
        {"random": {"trials": 4, "parameters": {"lr": {**huge, "integer": True}}}},
    ):
        answer = await control.http.post("/v1/sweeps", json={"spec": good | more})
        assert answer.status_code == 400, answer.text[:200]
    assert (await control.http.get("/v1/sweeps")).json()["data"] == []


async def test_a_loss_that_is_no_number_is_none(control: Control, events: JobEvents):
    sweep_id = await begun(control)
    row = await look(control, sweep_id)
    end(events, row.trials[0]["jobs"][0]["job_id"], float("inf"))
    row = await look(control, sweep_id)
    assert row.trials[0]["jobs"][0] | {"job_id": ""} == {"job_id": "", "state": "succeeded", "loss": None}
    assert (await control.http.get(f"/v1/sweeps/{sweep_id}")).status_code == 200


async def test_one_sweeps_data_keeps_no_others_waiting(
    control: Control, events: JobEvents, monkeypatch: pytest.MonkeyPatch
):
    """Nor is it read by the controller itself: a file may be one line of gigabytes, or very many short ones."""
    waits = threading.Event()
    whole = runner.write_apart

    def slowly(source: Path, target: Path, share: float, least: int) -> int:
        waits.wait()
        return whole(source, target, share, least)

    monkeypatch.setattr(runner, "write_apart", slowly)
    # Both are made before the first makes its part: an owner's files have their turn one after the other.
    sweep_id, other = await begun(control), await begun(control, first=1)
    try:
        await control.app.state.sweeps.look()
        for _ in range(50):  # turns of the loop, of which each of the four jobs takes a few
            await asyncio.sleep(0)
        row = sweeps.find(control.db, other)
        assert row is not None and [len(trial["jobs"]) for trial in row.trials] == [1, 1, 1, 1]
        waiting = sweeps.find(control.db, sweep_id)
        assert waiting is not None and waiting.state == "running" and not waiting.files
    finally:
        waits.set()
    assert len((await look(control, sweep_id)).files) == 1
