"""Jobs and gates as they are when some of them have ended: rows for the page to show."""

from __future__ import annotations

import time
from typing import Any

from appliance.store.database import Database
from appliance.store.objects import gates, jobs
from appliance.store.rows import GateRow, JobRow

REFUSED = "prompts: pass rate -8 points on 100 items: shown to be worse by more than 2 points (p 0.004)"


def insert(db: Database, key_id: str, owner: str) -> None:
    _gates(db, key_id, owner, time.time())


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
