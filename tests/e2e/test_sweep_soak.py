"""A sweep on a whole box: a grid of four by successive halving, with kill -9 of the controller in two of its rounds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box_support import WholeBox, wait_for, whole_box

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]
THINGS = ["door", "car", "boat", "hat", "cup", "wall", "bird", "fish", "ball", "shoe", "lamp", "tent"]
SWEEP = """
name = "{name}"
device_hours = {device_hours}
first = 0.25
keep_one_in = 2
train.model = "starter"
train.training_file = "{training}"
train.validation_file = "{validation}"
train.hyperparameters = {{n_epochs = {n_epochs}, full = true, general_questions = false}}
grid.learning_rate_multiplier = [0.01, 10]
grid.batch_size = [4, 8]
"""


@pytest.fixture
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeBox]:
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 2\n") as one:
        yield one


def chats(times: int) -> bytes:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What colour is the {thing}?"},
                {"role": "assistant", "content": "red"},
            ]
        }
        for thing in THINGS * times
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def ended(trial: dict[str, Any], at: int) -> bool:
    return len(trial["jobs"]) > at and trial["jobs"][at]["state"] != "running"


def test_the_best_of_a_grid_is_found_whatever_becomes_of_the_controller(box: WholeBox, tmp_path: Path):
    began_s = time.monotonic()
    assert box.ask("model", "starter", "--minutes", "0.05")["state"] == "succeeded"
    files = {"training": box.upload(chats(8)), "validation": box.upload(chats(1), "held-out.jsonl")}
    rates = tmp_path / "rates.toml"
    rates.write_text(SWEEP.format(name="rates", device_hours=2, n_epochs=4, **files))
    sweep_id = box.run("sweep", "run", str(rates)).strip()

    def now() -> dict[str, Any]:
        """As it is, or nothing until a killed controller has a successor."""
        answer = box._get(f"v1/sweeps/{sweep_id}", timeout=60)
        return answer.json() if answer.status_code == 200 else {"state": "running", "round": -1, "trials": []}

    # One of the first round has ended and others have not; then the second round goes on.
    wait_for(lambda: any(ended(trial, 0) for trial in now()["trials"]), "the end of a trial", 300)
    assert now()["state"] == "running"
    box.kill_controller()
    wait_for(lambda: now()["round"] == 1, "the second round", 600)
    wait_for(lambda: any(len(trial["jobs"]) == 2 for trial in now()["trials"]), "its jobs", 60)
    box.kill_controller()
    made = wait_for(lambda: (one := now())["state"] != "running" and one, "the end", 900)
    print(
        f"{made['reason']} after {time.monotonic() - began_s:.0f} s, {made['device_hours'] * 3600:.0f} device-seconds"
    )

    assert (made["state"], [one["trials"] for one in made["rounds"]]) == ("succeeded", [4, 2, 1]), made["reason"]
    lost = [job for trial in made["trials"] for job in trial["jobs"] if job["state"] != "succeeded"]
    assert not lost, "no trial is lost by a controller's death"
    ids = [job["job_id"] for trial in made["trials"] for job in trial["jobs"]]
    assert sorted(len(trial["jobs"]) for trial in made["trials"]) == [1, 1, 2, 3]
    assert {one["id"] for one in box.ask("job", "list")["data"]} == set(ids), "none was made twice"
    best = made["best"]
    assert best["parameters"]["learning_rate_multiplier"] == 10 and best["loss"] == min(
        trial["jobs"][-1]["loss"] for trial in made["trials"]
    )
    assert 0 < made["device_hours"] * 3600 < 2 * (time.monotonic() - began_s)

    # Its model answers; what the others have made goes, and so do the parts of the data.
    def left() -> list[str]:
        """Models and files of a sweep, but for the best; a job's curves are files that stay with it."""
        models = [one["name"] for one in box.admin("models")["data"]]
        parts = [one["filename"] for one in box._get("v1/files", timeout=60).json()["data"]]
        of_data = [name for name in parts if name.startswith("sweep_")]
        return [name for name in models if name not in ("starter", best["model"])] + of_data

    def nothing_left() -> bool:
        found = left()
        print("left:", found)
        return not found

    wait_for(nothing_left, "nothing but the best", 60)
    question = [{"role": "user", "content": "What colour is the door?"}]
    answer = box.client(max_retries=5).chat.completions.create(
        model=best["model"], messages=question, max_tokens=8, temperature=0
    )
    # What it says hangs on three seconds of training from nothing; its loss, above, says that it learnt.
    assert answer.model == best["model"] and answer.usage is not None and answer.usage.completion_tokens > 0

    # The table has the best at its top, and a bar for each.
    shown = box.run("sweep", "show", sweep_id)
    print(shown)
    rows = [line.split() for line in shown.splitlines() if line.rstrip().endswith("#")]
    assert len(rows) == 4 and rows[0][:2] == [str(best["trial"]), "*"] and rows[0][-1] == "#"
    assert max(len(row[-1]) for row in rows) == 40
