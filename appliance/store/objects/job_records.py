"""What belongs to a job: its judge, events and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Unpack

from appliance.store.database import Database, Page, Part
from appliance.store.rows import JOB_EVENTS, JOB_JUDGES, JOB_METRICS, JobEventRow, JobMetricRow

MOST_GROWN = 1.5
"""Times the estimate of memory, beyond which a job tells of itself alone."""

insert_judge, find_judge, insert_event = JOB_JUDGES.insert, JOB_JUDGES.find, JOB_EVENTS.insert
find_metric, upsert_metric = JOB_METRICS.find, JOB_METRICS.insert_or_merge
"""A step that ran again replaces its row, but keeps a validation loss already measured at it."""


def teachers_of_running(db: Database) -> list[str]:
    """Models that teach running jobs."""
    # The few jobs that run come first, and of these the ones with a teacher: graders may have megabytes.
    return db.column(
        "SELECT judge ->> '$.teacher' AS teacher FROM jobs CROSS JOIN job_judges ON job_id = jobs.id "
        "WHERE phase = 'running' AND method = 'distillation' GROUP BY teacher ORDER BY min(seq)"
    )


def page_events(db: Database, job_id: str, **part: Unpack[Part]) -> Page[JobEventRow]:
    """Newest first."""
    return JOB_EVENTS.page(db, {"job_id": job_id}, **part)


def list_metrics(db: Database, job_id: str, *, after_step: int = -1, limit: int = 10_000) -> list[JobMetricRow]:
    """Metrics by ascending step, from the one behind `after_step`."""
    return JOB_METRICS.list_all(db, "job_id = ? AND step > ?", job_id, after_step, limit=limit)


def factors(db: Database, model: str, method: str, full: bool) -> tuple[float | None, float]:
    """(speed, memory) of the newest ended jobs like this one over what arithmetic alone had estimated for them: the
    median speed, None without any. Memory is only corrected upwards: a job with fewer trained tokens takes less."""
    rows = db.column(
        "SELECT estimate FROM jobs WHERE model = ? AND method = ? AND resolved ->> '$.full' = ? "
        "AND estimate ->> '$.measured' IS NOT NULL ORDER BY seq DESC LIMIT 20",
        [model, method, int(full)],
    )
    pairs = [(row, row["measured"]) for row in map(json.loads, rows)]
    speeds = [measured["tokens_per_s"] / row["devices"] / row["modelled_tokens_per_s"] for row, measured in pairs]
    grown = [(measured["device_bytes"] or 0) * row["memory_factor"] / row["device_bytes"] for row, measured in pairs]
    return (median(speeds) if speeds else None), min(MOST_GROWN, max([1.0, *grown]))


def all_metrics(db: Database, job_id: str) -> Iterator[JobMetricRow]:
    """By ascending step, read in parts: there may be 100,000."""
    after = -1
    while rows := list_metrics(db, job_id, after_step=after, limit=5000):
        yield from rows
        after = rows[-1].step


def last_step(db: Database, job_id: str) -> int:
    """The highest that was reported, 0 before the first."""
    return db.value("SELECT max(step) FROM job_metrics WHERE job_id = ?", [job_id]) or 0


def last_metrics(db: Database, job_id: str, count: int) -> list[JobMetricRow]:
    """The newest `count` steps, ascending."""
    return JOB_METRICS.list_all(db, "job_id = ?", job_id, limit=count, last=True)[::-1]
