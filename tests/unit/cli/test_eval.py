"""`appliance eval`: comparison of models on a suite of prompts."""

import json
from pathlib import Path

import pytest

from appliance.cli.commands.evals import interval
from appliance.controller.bus.asking import EngineAnswer
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import CHECK


def written(tmp_path: Path, *answers: str) -> list[str]:
    suite, grader = tmp_path / "sums.jsonl", tmp_path / "grader.json"
    rows = [{"messages": [{"role": "user", "content": "2 and 2?"}], "answer": answer} for answer in answers]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader.write_text(json.dumps(CHECK))
    return ["--suite", str(suite), "--grader", str(grader)]


def test_eval_run_shows_models_side_by_side(box: ControlledBox, tmp_path: Path):
    async def four(body):
        choice = {"index": 0, "message": {"role": "assistant", "content": "4"}}
        return EngineAnswer(200, {"choices": [choice], "usage": {}})

    box.context.asking.rule = four
    made = box.json("eval", "run", "starter", *written(tmp_path, "4", "4", "5", "4"), "--wait")
    (run,) = made["runs"]
    assert run["status"] == "completed" and run["model"] == "starter"
    assert run["result_counts"] == {"total": 4, "passed": 3, "failed": 1, "errored": 0}
    again = written(tmp_path, "4")[:2]
    assert len(box.json("eval", "run", "starter", *again, "--eval", made["id"], "--wait")["runs"]) == 2
    told = box.run("eval", "show", made["id"]).stdout
    assert "75.0% (30.1% to 95.4%) 0.75" in " ".join(told.split()), "the mean reward of the one grader"
    items = box.run("eval", "show", made["id"], "--items", run["id"]).stdout.splitlines()
    assert items[0].split() == ["ITEM", "STATUS", "PROMPT", "ANSWER", "GRADERS"]
    assert [line.split() for line in items[3:5]] == [
        "3 fail 2 and 2? 4 name same, type string_check, passed no, score 0".split(),
        "4 pass 2 and 2? 4 name same, type string_check, passed yes, score 1".split(),
    ]
    assert box.json("eval", "show", made["id"], "--items", run["id"])["data"][2]["datasource_item"]["answer"] == "5"
    assert "sums" in box.run("eval", "list").stdout


def test_run_wait_follows_only_its_own_runs(prepared, tmp_path: Path):
    counts = {"total": 1, "passed": 0, "failed": 1, "errored": 0}
    run = {"id": "r", "model": "m", "status": "failed", "error": {"message": "no engine"}, "result_counts": counts}
    prepared.prepare("POST", "/v1/files", (200, {"id": "file-1"}))
    prepared.prepare("POST", "/v1/evals", (200, {"id": "e"}))
    prepared.prepare("POST", "/v1/evals/e/runs", (200, run))
    prepared.prepare("GET", "/v1/evals/e/runs/r", (200, run))
    prepared.prepare("GET", "/v1/evals/e/runs", (200, {"data": [], "has_more": False}))
    done = prepared.run("eval", "run", "m", *written(tmp_path, "4"), "--wait")
    assert done.exit_code == 1 and "r of m is failed: no engine" in done.stderr


def test_eval_show_prints_why_a_run_waits(box: ControlledBox, tmp_path: Path):
    box.context.asking.rows.places = 0
    made = box.json("eval", "run", "starter", *written(tmp_path, "4"))
    evals_shown = ("eval", "show", made["id"])
    found = next(run for run in (box.json(*evals_shown)["runs"][0] for _ in range(3000)) if run["status"] != "queued")
    assert found["status"] == "in_progress", found
    assert "no engine of the model is awake" in box.run(*evals_shown).stdout


def test_eval_run_names_bad_suite_or_grader(box: ControlledBox, tmp_path: Path):
    suite, path, *grader = written(tmp_path, "4")
    Path(path).write_text('{"messages": []}\n{"question": "x"}\n')
    refused = box.run("eval", "run", "starter", suite, path, *grader)
    assert refused.exit_code == 2 and "line 2: expected an object with 'messages'" in refused.output
    Path(path).write_bytes(b'{"messages": []}\n"\xff"\n')
    refused = box.run("eval", "run", "starter", suite, path, *grader)
    assert refused.exit_code == 2 and "cannot be read: 'utf-8'" in refused.output
    Path(path).write_text('{"messages": []}\n')
    assert "give either --grader" in box.run("eval", "run", "starter", suite, path).output
    Path(grader[1]).write_text("{")
    assert "is not JSON" in box.run("eval", "run", "starter", suite, path, *grader).output
    unknown = box.run("eval", "run", "absent", *written(tmp_path, "4"))
    assert unknown.exit_code == 3 and "absent" in unknown.output


@pytest.mark.parametrize(
    "passed, judged, low, high", [(0, 0, 0, 1), (0, 10, 0, 0.2775), (75, 100, 0.6569, 0.8246), (10, 10, 0.7225, 1)]
)
def test_interval_of_pass_rate_is_wilson_interval(passed, judged, low, high):
    assert interval(passed, judged) == pytest.approx((low, high), abs=1e-4)
