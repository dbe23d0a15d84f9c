"""`appliance simulate`: the JSON that scripts rely on, from a short run of the real scheduler in virtual time."""

from __future__ import annotations

import json

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.simulator.effects import VerbTimes
from scheduler.simulator.recorded import recorded
from tests.unit.cli.conftest import run

KEYS = {
    "requests_served",
    "slo_attainment",
    "ttft_p50_s",
    "ttft_p95_s",
    "training_gpu_hours",
    "handovers",
    "oracle_ratio",
    "static",
}


def test_the_keys_are_there_and_static_splits_have_the_same_figures(tmp_path):
    trace, philly = tmp_path / "trace.csv", tmp_path / "jobs.csv"
    rows = "".join(f"2023-11-16 18:{n // 60:02d}:{n % 60:02d}.000,200,20\n" for n in range(0, 120, 4))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    philly.write_text("timestamp,duration,num_gpus\n2017-10-09 00:00:00,600,2\n")
    done = run("simulate", "--trace", str(trace), "--jobs", str(philly), "--gpus-per-node", "2", "-o", "json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result) >= KEYS
    assert result["requests_served"] == 30 and 0 <= result["slo_attainment"] <= 1
    assert [split["train_devices"] for split in result["static"]] == [0, 1, 2]
    assert all(set(split) >= KEYS - {"oracle_ratio", "static"} for split in result["static"])


def test_a_trace_that_is_none_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("nonsense\n")
    refused = run("simulate", "--trace", str(path), "-o", "json")
    assert refused.exit_code == 2 and str(path) in refused.stderr


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_trace_is_read(tmp_path):
    for plot, said in ((tmp_path / "day.gif", ".png or .svg"), (tmp_path / "none" / "day.svg", "does not exist")):
        refused = run("simulate", "--trace", str(tmp_path / "none.csv"), "--plot", str(plot))
        assert refused.exit_code == 2 and said in refused.stderr, "the missing trace must not come first"


def test_what_the_devices_cannot_be_is_refused_before_the_trace_is_read(tmp_path):
    trace = ("simulate", "--trace", str(tmp_path / "none.csv"))
    for options, said in (
        (("--policy", "split"), "needs --train N"),
        (("--train", "3"), "--train belongs to the mode split, not to auto"),
        (("--policy", "split", "--train", "9"), "--train is 9; there are 8 devices"),
        (("--nodes", "2", "--gpus-per-node", "2", "--floor", "5"), "--floor is 5; there are 4 devices"),
    ):
        refused = run(*trace, *options)
        assert refused.exit_code == 2 and said in refused.stderr, refused.stderr


def test_verbs_take_what_they_took_on_the_box(prepared, tmp_path):
    step = {"target": "x", "state": "done"}
    told = [
        {"steps": [{**step, "verb": "wake_replica", "seconds": 4.0}, {**step, "verb": "start_group", "seconds": 9.0}]}
        for _ in range(3)
    ]
    told[0]["steps"] += [
        {**step, "verb": "wake_replica", "seconds": 99.0, "state": "failed"},
        {**step, "verb": "swap_replica", "seconds": 99.0},
        {**step, "verb": "sleep_replica", "seconds": 99.0},
    ]
    prepared.prepare("GET", "/admin/v1/handovers", (200, {"data": told}))
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,200,20\n")
    asked = ("simulate", "--trace", str(trace), "--gpus-per-node", "2", "--no-static", "--from-box")
    result = json.loads(prepared.run(*asked, "-o", "json").stdout)
    assert result["verb_times_from_steps"] == {"start_group_s": 3, "wake_s": 3}
    assert (result["verb_times_s"]["wake_s"], result["verb_times_s"]["start_group_s"]) == (4.0, 9.0)
    assert result["verb_times_s"]["sleep_s"] == VerbTimes().sleep_s, "once is not enough"
    assert "wake 4 s (3 steps)" in prepared.run(*asked).output


def test_what_auto_reckons_with_moves_with_what_verbs_take():
    usual = SchedulerConfig()
    costs = recorded([{"steps": [{"verb": "start_group", "state": "done", "seconds": 12.0}] * 3}]).config(usual)
    assert costs.job_pause_s == pytest.approx(usual.job_pause_s + 10.0) and costs.reaction_s == usual.reaction_s
    assert recorded([]).config(usual) == usual
