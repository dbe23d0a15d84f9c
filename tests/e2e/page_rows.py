"""Pipelines, a sweep and gates as they are when some of it has ended: rows for the page to show."""

from __future__ import annotations

import time
from typing import Any

from appliance.store.database import Database
from appliance.store.objects import gates, jobs, pipelines, sweeps
from appliance.store.rows import GateRow, JobRow, PipelineRow, PipelineRunRow, SweepRow

REFUSED = "prompts: pass rate -8 points on 100 items: shown to be worse by more than 2 points (p 0.004)"


def insert(db: Database, key_id: str, owner: str) -> None:
    now_s = time.time()
    _gates(db, key_id, owner, now_s)
    _pipeline(db, key_id, owner, now_s)
    insert_sweep(db, key_id, owner, "sweep_1", "rates")


def insert_jobs(db: Database, count: int, first: int = 0) -> None:
    """Ended ones, `ft:starter:local:nNNN:job`, the last made the newest."""
    for number in range(first, first + count):
        jobs.insert(
            db,
            JobRow(
                id=f"ftjob-{number:03}",
                model="starter",
                method="supervised",
                training_file="file-1",
                seed=1,
                output_model=f"ft:starter:local:n{number:03}:job",
                created_s=1e9 + number,
                phase="cancelled",
                finished_s=1e9 + number,
                resolved={"publish": "end"},
            ),
        )


def _gates(db: Database, key_id: str, owner: str, now_s: float) -> None:
    rule = {"rule": "not_worse_by", "wanted": 0.02, "found": -0.08, "ok": False, "says": REFUSED.partition(": ")[2]}
    suite: dict[str, Any] = {
        "name": "prompts",
        "items": 100,
        "rules": [rule],
        "candidate": {"judged": 100, "pass_rate": 0.61, "mean_reward": 0.61},
        "incumbent": {"judged": 99, "pass_rate": 0.69, "mean_reward": 0.69},
        "compared": {
            "measure": "pass_rate",
            "pairs": 99,
            "difference": -0.08,
            "low": -0.13,
            "high": -0.03,
            "gained": 2,
            "lost": 10,
        },
        "ok": False,
        "verdict": "refused",
    }
    gates.insert(
        db,
        GateRow(
            "gate_refused",
            now_s,
            "ftjob-gone",
            "starter",
            key_id,
            owner,
            terms={"then": "activate", "suites": []},
            version="v2",
            before="v1",
            state="ended",
            verdict="refused",
            reason=REFUSED,
            told=[suite],
            decided_s=now_s,
            ended_s=now_s,
        ),
    )


def _pipeline(db: Database, key_id: str, owner: str, now_s: float) -> None:
    spec = {"name": "nightly", "train": {"model": "starter"}, "schedule": {"cron": "0 2 * * *"}}
    pipelines.insert(db, PipelineRow("pipe_1", "nightly", now_s, key_id, owner, spec))
    says = {
        "data": ("done", "2 files, 4,096 bytes"),
        "check": ("done", "24 examples, 3 duplicates"),
        "prepare": ("skipped", ""),
        "train": ("done", "ftjob-gone: 4 steps, loss 1.2345"),
        "evaluate": ("done", "prompts: 61.0% of 100 passed, 69.0% before"),
        "gate": ("done", "gate_refused refused"),
        "canary": ("skipped", ""),
        "promote": ("skipped", "v1 goes on answering"),
    }
    steps = [
        {
            "name": name,
            "state": state,
            "says": said,
            "began_s": None if state == "skipped" else now_s - 90,
            "ended_s": None if state == "skipped" else now_s - 30,
        }
        for name, (state, said) in says.items()
    ]
    pipelines.insert_run(
        db,
        PipelineRunRow(
            "run_1",
            "pipe_1",
            now_s,
            "request",
            key_id,
            owner,
            spec={"name": "nightly"},
            state="succeeded",
            outcome="left",
            reason=REFUSED,
            steps=steps,
            data_files=2,
            data_bytes=4096,
            ended_s=now_s,
        ),
    )


def insert_sweep(db: Database, key_id: str, owner: str, sweep_id: str, name: str) -> None:
    """One of three rounds that has ended."""
    now_s = time.time()
    # Which rates go on, and their losses by round; the largest one diverged.
    losses: dict[float, list[float | None]] = {
        0.1: [2.62],
        0.2: [2.41],
        0.3: [2.22],
        0.5: [2.06, 1.83],
        1: [1.94, 1.62, 1.41],
        2: [2.01, 1.71],
        3: [2.29],
        5: [9.7],
        10: [None],
    }
    trials = [
        {
            "parameters": {"learning_rate_multiplier": rate},
            "jobs": [
                {"job_id": f"ftjob-{place}{at}", "state": "failed" if loss is None else "succeeded", "loss": loss}
                for at, loss in enumerate(of)
            ],
        }
        for place, (rate, of) in enumerate(losses.items())
    ]
    sweeps.insert(
        db,
        SweepRow(
            sweep_id,
            name,
            now_s,
            key_id,
            owner,
            spec={"name": name, "first": 0.1, "keep_one_in": 3},
            state="succeeded",
            round=2,
            trials=trials,
            spent_s=900.0,
            best=4,
            ended_s=now_s,
        ),
    )
