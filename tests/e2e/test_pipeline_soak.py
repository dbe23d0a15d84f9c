"""The ten lines of docs/pipelines.md on a whole box: retrained on the day's data, kept only where the paired test shows
that it is better; with kill -9 of the controller while it trains and while it is judged."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box_support import WholeBox, wait_for, whole_box

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]
DOCUMENTED = Path(__file__).parents[2] / "docs" / "pipelines.md"
THINGS = ["door", "car", "boat", "hat", "cup", "wall", "bird", "fish", "ball", "shoe", "lamp", "tent"]
GRADER = {
    "type": "string_check",
    "name": "red",
    "operation": "ilike",
    "input": "{{ sample.output_text }}",
    "reference": "red",
}


@pytest.fixture
def box(tmp_path_factory: pytest.TempPathFactory):
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 2\n") as one:
        yield one


def asked(thing: str) -> dict[str, str]:
    return {"role": "user", "content": f"What colour is the {thing}?"}


def day(folder: Path, name: str, colour: str) -> None:
    """A day's chats, written a minute ago."""
    rows = [{"messages": [asked(thing), {"role": "assistant", "content": colour}]} for thing in THINGS] * 4
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (time.time() - 60, time.time() - 60))


def ten_lines(folder: Path, eval_id: str, **other: str) -> str:
    """As they are documented, with this folder, evaluation, model and a canary of seconds."""
    (text, *_) = re.findall(r"```toml\n(.*?)```", DOCUMENTED.read_text(), re.S)
    assert len(text.strip().splitlines()) == 10
    values = {
        "data.folder": json.dumps(str(folder)),
        "train.model": '"starter"',
        "train.hyperparameters": "{n_epochs = 40, batch_size = 8, learning_rate_multiplier = 10, full = true, "
        "general_questions = false}",
        "evaluate.eval": json.dumps(eval_id),
        "canary": "{share = 0.1, watch_s = 3, min_requests = 0}",
        **other,
    }
    for name, value in values.items():
        text, found = re.subn(rf"^{re.escape(name)} = .*$", f"{name} = {value}", text, flags=re.M)
        assert found == 1, name
    return text


def versions_by_job(shown: dict[str, Any]) -> list[int]:
    """How many versions each job made, oldest job first."""
    return list(Counter(one["source"] for one in shown["versions"]).values())


def step_of(run: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in run["steps"] if one["name"] == name)


def test_a_box_retrains_on_the_days_data_and_keeps_it_only_if_better(box: WholeBox, tmp_path: Path):
    began_s = time.monotonic()
    assert box.ask("model", "starter", "--minutes", "0.05")["state"] == "succeeded"
    suite, grader, folder = tmp_path / "colours.jsonl", tmp_path / "grader.json", tmp_path / "chats"
    folder.mkdir()
    suite.write_text("".join(json.dumps({"messages": [asked(thing)]}) + "\n" for thing in THINGS))
    grader.write_text(json.dumps(GRADER))
    options = ["--suite", str(suite), "--grader", str(grader), "--max-tokens", "8", "--wait"]
    made = box.ask("eval", "run", "starter", *options, timeout_s=600)
    assert made["runs"][0]["result_counts"]["total"] == len(THINGS)
    nightly = tmp_path / "nightly.toml"
    nightly.write_text(ten_lines(folder, made["id"]))
    print(f"ready after {time.monotonic() - began_s:.0f} s")

    # The first day: whatever comes of it answers, for nothing did.
    day(folder, "1.jsonl", "blue")
    first = box.ask("pipeline", "run", str(nightly), "--wait", timeout_s=900)
    assert (first["state"], first["outcome"]) == ("succeeded", "answers"), first
    v1 = box.ask("model", "show", "fraud")["active_version"]
    assert box.ask("pipeline", "run", "fraud-nightly", "--wait")["outcome"] == "nothing_new"
    print(f"the first version answers after {time.monotonic() - began_s:.0f} s")

    # The second: found by the box itself, and better. The controller dies while it trains, and while it is judged.
    when = {"schedule.cron": "'0 2 * * *'", "schedule.tz": '"Europe/Berlin"'}
    text = ten_lines(folder, made["id"], **when)
    text = text.replace("schedule.cron = '0 2 * * *'", "schedule.on_new_data = true\nschedule.every_s = 5")
    nightly.write_text(text)
    assert "when there is new data" in box.run("pipeline", "schedule", str(nightly))
    day(folder, "2.jsonl", "red")
    newest = "pipelines/fraud-nightly/runs?limit=1"

    def run() -> dict[str, Any]:
        answer = box._get(f"v1/{newest}", timeout=60)
        return answer.json()["data"][0] if answer.status_code == 200 else {"steps": [], "trigger": ""}

    def at(step: str, part: str) -> bool:
        now = run()
        return now["trigger"] == "data" and now["state"] == "running" and part in step_of(now, step)["says"]

    wait_for(lambda: at("train", "step "), "a run that trains", 300)
    box.kill_controller()
    wait_for(lambda: at("evaluate", "is asked"), "a version that is judged", 600)
    box.kill_controller()
    second = wait_for(lambda: (now := run())["steps"] and now["state"] != "running" and now, "its end", 900)
    assert (second["trigger"], second["state"], second["outcome"]) == ("data", "succeeded", "answers"), second
    assert step_of(second, "canary")["says"] == "promoted"
    gate = box.ask("gate", "show", second["gate_id"])
    (told,) = gate["suites"]
    assert told["rules"][0]["rule"] == "better_by" and told["rules"][0]["p"] < 0.05
    v2 = box.ask("model", "show", "fraud")["active_version"]
    assert v2 == gate["version"] != v1 == gate["before"]
    answer = box.client(max_retries=5).chat.completions.create(
        model="fraud@champion", messages=[asked("door")], max_tokens=8, temperature=0
    )
    assert "red" in answer.choices[0].message.content.lower()
    print(f"the second version answers after {time.monotonic() - began_s:.0f} s: {gate['reason']}")

    # The third is no better: it is kept, and does not answer.
    box.run("pipeline", "schedule", "fraud-nightly", "--off")
    day(folder, "3.jsonl", "green")
    third = box.ask("pipeline", "run", "fraud-nightly", "--wait", timeout_s=900)
    assert (third["state"], third["outcome"]) == ("succeeded", "left"), third
    assert "not shown to be better" in third["reason"]
    shown = box.ask("model", "show", "fraud")
    assert shown["active_version"] == v2 and shown["gates"][0]["verdict"] == "refused"
    assert len(box.ask("job", "list")["data"]) == 3, "each run made one job"
    assert versions_by_job(shown) == [3, 3, 3], "each job made a version, and keeps those of its last three epochs"
    assert shown["aliases"] == {"champion": v2, "challenger": shown["gates"][0]["version"]}
    left = [one["filename"] for one in box.ask("file", "list")["data"]]
    assert not [name for name in left if name.startswith("piperun_")], "what was joined goes with its run"
    print(f"the third does not after {time.monotonic() - began_s:.0f} s: {third['reason']}")
