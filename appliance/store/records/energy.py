"""Energy by the hour and by who held the devices: a job, a model, nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from appliance.store.database import Database

HOUR_S = 3600
Kind = Literal["job", "model", "idle"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """joules: counted by devices, in so many device-seconds."""

    joules: float
    metered_s: float


@dataclass(frozen=True, slots=True)
class Holding:
    """What one has drawn in a time. name: a job's id, a model's name, "" for nobody. tokens: a job has trained on in
    all its time, or a model's engines have read and written in this time. steps: of a job."""

    kind: Kind
    name: str
    joules: float
    metered_s: float
    tokens: int | None = None
    steps: int | None = None


def add(db: Database, drawn: Mapping[tuple[Kind, str], tuple[float, float]], now_s: float) -> None:
    """drawn: joules, and the device-seconds in which they were counted, by who held the devices."""
    hour_s = int(now_s // HOUR_S) * HOUR_S
    with db.transaction():
        for (kind, name), (joules, metered_s) in drawn.items():
            db.execute(
                "INSERT INTO energy VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " joules = joules + excluded.joules, metered_s = metered_s + excluded.metered_s",
                [kind, name, hour_s, joules, metered_s],
            )


def of_job(db: Database, job_id: str) -> Drawn | None:
    """None: nothing was counted."""
    joules, metered_s = db.execute(
        "SELECT sum(joules), sum(metered_s) FROM energy WHERE kind = 'job' AND name = ?", [job_id]
    ).fetchone()
    return None if joules is None else Drawn(joules, metered_s)


def watts_of_jobs_like(db: Database, model: str, method: str, full: bool) -> float | None:
    """What a device has drawn on average, in watts, of the 50 newest jobs of this kind; None: nothing was counted."""
    joules, metered_s = db.execute(
        "SELECT sum(e.joules), sum(e.metered_s) FROM energy AS e WHERE e.kind = 'job' AND e.name IN ("
        " SELECT id FROM jobs WHERE model = ? AND method = ? AND json_extract(resolved, '$.full') = ?"
        " AND EXISTS (SELECT 1 FROM energy WHERE kind = 'job' AND name = jobs.id) ORDER BY seq DESC LIMIT 50)",
        [model, method, int(full)],
    ).fetchone()
    return joules / metered_s if metered_s else None


def since(db: Database, since_s: float) -> list[Holding]:
    """Who has drawn energy in the hours from `since_s` on, and how much in these; of jobs, in all their time. Whoever
    has drawn most comes first."""
    hour_s = int(since_s // HOUR_S) * HOUR_S
    rows = db.execute(
        "WITH who AS (SELECT DISTINCT kind, name FROM energy WHERE hour_s >= ?1),"
        " drawn AS (SELECT kind, name, sum(joules) AS joules, sum(metered_s) AS metered_s"
        "  FROM who CROSS JOIN energy USING (kind, name) WHERE hour_s >= ?1 OR kind = 'job' GROUP BY kind, name),"
        " spoken AS (SELECT model, sum(prompt_tokens + completion_tokens) AS tokens FROM usage"
        "  WHERE hour_s >= ?1 GROUP BY model)"
        " SELECT kind, drawn.name, joules, metered_s,"
        " CASE kind WHEN 'job' THEN jobs.trained_tokens WHEN 'model' THEN spoken.tokens END, jobs.step"
        " FROM drawn LEFT JOIN jobs ON kind = 'job' AND jobs.id = drawn.name"
        " LEFT JOIN spoken ON kind = 'model' AND spoken.model = drawn.name ORDER BY joules DESC LIMIT 1000",
        [hour_s],
    )
    return [Holding(*row) for row in rows]
