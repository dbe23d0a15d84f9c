"""Fine-tuning jobs. The API writes the wanted state, the scheduler the phase; a finished job never changes phase."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from statistics import median
from typing import Any

from appliance.store.database import Database, IllegalTransition, sql_list
from appliance.store.models import CHECKPOINT_MARK, VERSION_MARK
from appliance.store.rows import (
    FINISHED_PHASES,
    JOB_EVENTS,
    JOB_JUDGES,
    JOB_METRICS,
    JOBS,
    UNFINISHED,
    JobMetricRow,
    JobPhase,
    JobRow,
    JobWanted,
)

MOST_GROWN = 1.5
"""Largest factor on the estimate of memory; growth beyond it is particular to one job."""

insert, find, find_visible, get, page = JOBS.insert, JOBS.find, JOBS.find_visible, JOBS.get, JOBS.page_visible


def find_unfinished(db: Database, job_id: str | None) -> JobRow | None:
    """Return the job; None if it has ended or does not exist."""
    return JOBS.first(db, f"id = ? AND {UNFINISHED['jobs']}", job_id)


def list_unfinished(db: Database, also: str = "", *parameters: Any) -> list[JobRow]:
    """List unfinished jobs, oldest first: the queue's order before priorities. also: SQL condition " AND …"."""
    return JOBS.list_all(db, UNFINISHED["jobs"] + also, *parameters)


def list_unfinished_with(db: Database, trained: Collection[str], made: str) -> list[JobRow]:
    """List unfinished jobs with a base in `trained` or the output model `made`, oldest first."""
    marks = ", ".join("?" * len(trained))
    return list_unfinished(db, f" AND (model IN ({marks}) OR output_model = ?)", *trained, made)


def list_unfinished_judged_by(db: Database, model: str, names: Collection[str], whole: bool) -> list[JobRow]:
    """List unfinished jobs with a teacher or grader in `names`; if `whole`, also those with a version of `model`."""
    quoted = [f'"{key}":"{name}"' for key in ("model", "teacher") for name in names]
    if whole:
        versions = f"{model}{VERSION_MARK}", f"{model}{CHECKPOINT_MARK}"
        quoted += [f'"{key}":"{version}' for key in ("model", "teacher") for version in versions]
    named = " OR ".join(["instr(judge, ?)"] * len(quoted))
    return list_unfinished(db, f" AND EXISTS (SELECT 1 FROM job_judges WHERE job_id = jobs.id AND ({named}))", *quoted)


# Leaves out ended jobs whose model does not exist, so that cancelled jobs do not lengthen the gateways' table.
# UNION ALL lets SQLite find one name by index.
_MADE = f"""
    SELECT output_model AS name FROM jobs WHERE owner = ?1 AND ({UNFINISHED["jobs"]}
        OR EXISTS (SELECT 1 FROM models WHERE id = output_model AND models.owner = jobs.owner))
    UNION ALL SELECT v.checkpoint FROM versions AS v JOIN jobs ON jobs.id = v.job_id WHERE jobs.owner = ?1
"""


def names_made_by(db: Database, owner: str) -> list[str]:
    """Return public names of models and checkpoints that this owner's jobs have made or may still make."""
    return db.column(f"SELECT DISTINCT name FROM ({_MADE})", [owner])


def has_made(db: Database, owner: str, name: str) -> bool:
    """Return whether `names_made_by` has this name. Reads only indexes: an owner may have ten thousand names."""
    return db.value(f"SELECT 1 FROM ({_MADE}) WHERE name = ?2", [owner, name]) is not None


def failed_by_code(db: Database) -> dict[str, int]:
    """Return {error code: number of stored jobs that failed with it}."""
    query = "SELECT error ->> '$.code' AS code, count(*) AS count FROM jobs WHERE phase = 'failed' GROUP BY code"
    return {str(code or ""): int(count) for code, count in db.execute(query)}


def list_left_snapshots(db: Database) -> list[JobRow]:
    """List finished jobs with an unreleased snapshot. After releasing it, the caller sets `snapshot` to None."""
    # "+" keeps SQLite from using the index of phases, which holds all ended jobs.
    return JOBS.list_all(db, f"+phase IN ({sql_list(FINISHED_PHASES)}) AND snapshot IS NOT NULL")


def update(db: Database, job_id: str, **changes: Any) -> None:
    """Change a job's columns other than the phase. Raises RowNotFound."""
    assert "phase" not in changes, "set_phase guards the phase"
    JOBS.update(db, job_id, **changes)


def add_energy(db: Database, job_id: str, joules: float, metered_s: float) -> None:
    """Add energy to a job. metered_s: device-seconds in which the joules were counted."""
    drawn = "joules = coalesce(joules, 0) + ?, metered_s = metered_s + ?"
    db.execute(f"UPDATE jobs SET {drawn} WHERE id = ?", [joules, metered_s, job_id])


def list_metered(db: Database, since_s: float) -> list[JobRow]:
    """List jobs with counted energy that were running after `since_s`, largest energy first."""
    recent = "joules IS NOT NULL AND coalesce(finished_s, ?1) >= ?1"
    return db.all(JobRow, f"SELECT * FROM jobs WHERE {recent} ORDER BY joules DESC LIMIT 1000", [since_s])


def gated(db: Database) -> list[str]:
    """Return ids of ended jobs with an open gate, oldest first."""
    return db.column(
        "SELECT id FROM jobs WHERE gate IS NOT NULL AND gate ->> '$.activated' IS NULL"
        f" AND phase IN ({sql_list(FINISHED_PHASES)}) ORDER BY seq"
    )


def set_phase(db: Database, job_id: str, phase: JobPhase, **changes: Any) -> None:
    """Move a job to a phase, which implies its times of start and end, its devices and its estimate.

    Raises RowNotFound, and IllegalTransition if the job is already finished.
    """
    with db.transaction():
        row = get(db, job_id)
        if row.finished and phase != row.phase:
            raise IllegalTransition("jobs", job_id, row.phase, phase)
        now_s = time.time()
        implied: dict[str, Any] = {"phase": phase}
        if phase == "running" and row.started_s is None:
            implied["started_s"] = now_s
        if phase != "running":
            implied |= {"devices": [], "eta_s": None, "tokens_per_s": None}
        if phase in FINISHED_PHASES and row.finished_s is None:
            implied["finished_s"] = now_s
        JOBS.update(db, job_id, **implied | changes)


def set_wanted(db: Database, job_id: str, wanted: JobWanted) -> JobRow:
    """Store the state that a person wants. Raises RowNotFound; IllegalTransition after the job's end or
    cancellation."""
    with db.transaction():
        row = get(db, job_id)
        if row.finished and not (wanted == "cancel" and row.phase == "cancelled"):
            raise IllegalTransition("jobs", job_id, row.phase, wanted)
        if row.wanted == "cancel" and wanted != "cancel":
            raise IllegalTransition("jobs", job_id, "cancelled", wanted)
        if not row.finished:
            JOBS.update(db, job_id, wanted=wanted)
        return get(db, job_id)


insert_judge, find_judge, insert_event = JOB_JUDGES.insert, JOB_JUDGES.find, JOB_EVENTS.insert
find_metric, upsert_metric = JOB_METRICS.find, JOB_METRICS.insert_or_merge
"""A step that ran again replaces its row, but keeps a validation loss already measured at it."""


def teachers_of_running(db: Database) -> list[str]:
    """Return the models that teach running jobs."""
    # Select the few running jobs first, then read their teachers: a grader's JSON may have megabytes.
    return db.column(
        "SELECT judge ->> '$.teacher' AS teacher FROM jobs CROSS JOIN job_judges ON job_id = jobs.id "
        "WHERE phase = 'running' AND method = 'distillation' GROUP BY teacher ORDER BY min(seq)"
    )


def list_metrics(db: Database, job_id: str, *, after_step: int = -1, limit: int = 10_000) -> list[JobMetricRow]:
    """List metrics of the steps after `after_step`, in ascending order."""
    return JOB_METRICS.list_all(db, "job_id = ? AND step > ?", job_id, after_step, limit=limit)


def factors(db: Database, model: str, method: str, full: bool) -> tuple[float | None, float]:
    """Return (speed, memory): measured values of the newest similar ended jobs, divided by their uncorrected estimates.
    Speed is the median, None without such jobs. Memory is only corrected upwards: fewer trained tokens take less."""
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
    """Yield a job's metrics by ascending step, in batches: there may be 100,000."""
    after = -1
    while rows := list_metrics(db, job_id, after_step=after, limit=5000):
        yield from rows
        after = rows[-1].step


def last_step(db: Database, job_id: str) -> int:
    """Return the highest reported step, 0 before the first report."""
    return db.value("SELECT max(step) FROM job_metrics WHERE job_id = ?", [job_id]) or 0


def last_metrics(db: Database, job_id: str, count: int) -> list[JobMetricRow]:
    """Return metrics of the newest `count` steps, in ascending order."""
    return JOB_METRICS.list_all(db, "job_id = ?", job_id, limit=count, last=True)[::-1]
