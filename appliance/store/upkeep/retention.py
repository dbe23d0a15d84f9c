"""Deletes what is older than it has to be kept, in bounded chunks, so that no write waits long for one.

What is beyond a number is found by counting up to it, on a thread of the store's, and deleted by its own number.

Each deletion finds the oldest rows by an index on their time and costs the same however many there are. Their order in
the table says nothing: rows written while the clock was ahead, or long unfinished ones, come before older ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.store import chunks
from appliance.store.database import Database, sql_list
from appliance.store.rows import FINISHED_PHASES, UNFINISHED_BATCH, UNFINISHED_EVAL_RUN

# (db, before_s, limit) -> how many went. Fewer than `limit` means that nothing more is that old.
Drop = Callable[[Database, float, int], int]
# (db, whose, keep, limit) -> what is beyond the newest `keep`.
Past = Callable[[Database, str, int, int], list[Any]]

_FINISHED = sql_list(sorted(FINISHED_PHASES))
_LIVE = sql_list(UNFINISHED_BATCH)


def _oldest(table: str, time: str, condition: str = "1") -> Drop:
    """Deletes the rows of a table that meet the condition, those with the earliest `time` first."""

    def drop(db: Database, before_s: float, limit: int) -> int:
        return db.execute(
            f"DELETE FROM {table} WHERE seq IN (SELECT seq FROM {table} WHERE {time} < ?2 AND {condition}"
            f" ORDER BY {time} LIMIT ?1)",
            [limit, before_s],
        ).rowcount

    return drop


def _past(query: str) -> Past:
    """Finds what the query has, the newest first, beyond the newest `keep` rows. ?1: whose they are."""

    def past(db: Database, whose: str, keep: int, limit: int) -> list[Any]:
        return db.column(f"{query} DESC LIMIT ?3 OFFSET ?2", [whose, keep, limit])

    return past


audit = _oldest("audit", "created_s")
# The newest stays however old: hand-overs are numbered on from it.
handovers = _oldest("handovers", "ended_s", "seq < (SELECT max(seq) FROM handovers)")
operations = _oldest("operations", "ended_s", "state != 'running'")
device_time = _oldest("device_time", "to_s")
batches = _oldest("batches", "created_s", f"status NOT IN ({_LIVE})")

# Ended ones beyond a number, of an owner (of the audit log: of a key): numbers of rows, or ids.
batches_past = _past(f"SELECT seq FROM batches WHERE owner = ?1 AND status NOT IN ({_LIVE}) ORDER BY seq")
eval_runs_past = _past(
    f"SELECT id FROM eval_runs WHERE owner = ?1 AND status NOT IN ({sql_list(UNFINISHED_EVAL_RUN)})"
    " AND id NOT IN (SELECT id FROM eval_deletions) ORDER BY seq"
)
audit_past = _past("SELECT seq FROM audit WHERE key_id = ?1 ORDER BY seq")
# Not jobs whose snapshot is still to be given back, or of whose models one is left (a version, under a name that jobs
# share). What their devices cost stays without them.
_JOB_GOES = (
    f"phase IN ({_FINISHED}) AND snapshot IS NULL"
    " AND NOT EXISTS (SELECT 1 FROM models WHERE models.id = jobs.output_model AND (NOT jobs.stable_name"
    "  OR models.job_id = jobs.id OR EXISTS"
    "  (SELECT 1 FROM versions WHERE model = output_model AND meta ->> '$.job_id' = jobs.id)))"
    " AND NOT EXISTS (SELECT 1 FROM checkpoints JOIN models ON models.id = checkpoints.model"
    " WHERE checkpoints.job_id = jobs.id)"
)
jobs_past = _past(f"SELECT id FROM jobs WHERE owner = ?1 AND {_JOB_GOES} ORDER BY seq")
# Jobs whose graders go: the jobs themselves may stay, with a model or what they cost.
graders_past = _past(
    "SELECT jobs.id FROM job_judges CROSS JOIN jobs ON jobs.id = job_id"
    f" WHERE owner = ?1 AND phase IN ({_FINISHED}) ORDER BY jobs.seq"
)


def jobs_before(db: Database, before_s: float, limit: int) -> list[str]:
    """Jobs that ended before this moment and may go, the earliest first."""
    return db.column(
        f"SELECT id FROM jobs WHERE finished_s < ?1 AND {_JOB_GOES} ORDER BY finished_s LIMIT ?2", [before_s, limit]
    )


def owners(db: Database, table: str) -> list[str]:
    return db.column(f"SELECT DISTINCT owner FROM {table}")


def delete_rows(db: Database, table: str, numbers: list[int]) -> None:
    """What was found beyond a number: it has ended, and stays so."""
    db.many(f"DELETE FROM {table} WHERE seq = ?", [[number] for number in numbers])


def eval_runs(db: Database, before_s: float, limit: int) -> int:
    """Runs of evaluations; their rows and items go by `objects.evals.delete_some`."""
    return db.execute(
        "INSERT INTO eval_deletions SELECT id FROM eval_runs WHERE ended_s < ? AND id NOT IN (SELECT id FROM"
        " eval_deletions) ORDER BY ended_s LIMIT ?",
        [before_s, limit],
    ).rowcount


def delete_graders(db: Database, job_ids: list[str]) -> None:
    db.many("DELETE FROM job_judges WHERE job_id = ?", [[job_id] for job_id in job_ids])


def delete_some_of_job(db: Database, job_id: str) -> bool:
    """Delete a few of what belongs to an ended job (events, steps, checkpoints, who may use these), then the job; False
    when it is gone. A job may have 100,000 of each, which one statement would take along by their references."""
    permitted = "checkpoint IN (SELECT name FROM checkpoints WHERE job_id = ?)"
    return (
        delete_some_texts_of_job(db, job_id)
        or _delete_some_steps(db, job_id)
        or chunks.delete_few(db, "permissions", permitted, [job_id])
        or chunks.delete_some(db, "checkpoints", "job_id = ?", [job_id], "length(metrics)")
        or db.execute("DELETE FROM jobs WHERE id = ?", [job_id]).rowcount > 0
    )


def delete_some_texts_of_job(db: Database, job_id: str) -> bool:
    """Delete a few of a job's events, then its judge; False when it has neither."""
    return (
        chunks.delete_some(db, "job_events", "job_id = ?", [job_id], "length(message) + coalesce(length(data), 0)")
        or db.execute("DELETE FROM job_judges WHERE job_id = ?", [job_id]).rowcount > 0
    )


def _delete_some_steps(db: Database, job_id: str) -> bool:
    steps = f"SELECT step FROM job_metrics WHERE job_id = ?1 LIMIT {chunks.CHUNK_ROWS}"
    return db.execute(f"DELETE FROM job_metrics WHERE job_id = ?1 AND step IN ({steps})", [job_id]).rowcount > 0


def usage(db: Database, before_s: float, limit: int) -> int:
    """Whole hours."""
    return db.execute(
        "DELETE FROM usage WHERE rowid IN (SELECT rowid FROM usage WHERE hour_s < ? ORDER BY hour_s LIMIT ?)",
        [before_s - 3600, limit],
    ).rowcount


def energy(db: Database, before_s: float, limit: int) -> int:
    """Whole hours."""
    return db.execute(
        "DELETE FROM energy WHERE (kind, name, hour_s) IN"
        " (SELECT kind, name, hour_s FROM energy WHERE hour_s < ? ORDER BY hour_s LIMIT ?)",
        [before_s - 3600, limit],
    ).rowcount


def jobs_with_records(db: Database, table: str, before_s: float, limit: int) -> list[str]:
    """Ids of jobs that ended before this moment and have events (`job_events`) or steps (`job_metrics`)."""
    return db.column(
        f"SELECT id FROM jobs WHERE finished_s < ? AND EXISTS (SELECT 1 FROM {table} WHERE job_id = jobs.id) LIMIT ?",
        [before_s, limit],
    )


def delete_records(db: Database, table: str, job_id: str, limit: int) -> int:
    """The oldest events or steps of a job; how many went. The job itself stays."""
    number = {"job_events": "seq", "job_metrics": "step"}[table]
    return db.execute(
        f"DELETE FROM {table} WHERE job_id = ?1 AND {number} IN"
        f" (SELECT {number} FROM {table} WHERE job_id = ?1 ORDER BY {number} LIMIT ?2)",
        [job_id, limit],
    ).rowcount


def events_past(db: Database, job_id: str, keep: int, limit: int) -> list[int]:
    """Numbers of one job's events beyond the newest `keep`, the oldest first."""
    return db.column(
        "SELECT seq FROM job_events WHERE job_id = ?1 AND seq <="
        " (SELECT seq FROM job_events WHERE job_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2) ORDER BY seq LIMIT ?3",
        [job_id, keep, limit],
    )


_NEEDED = (
    f"(id IN (SELECT input_file_id FROM batches WHERE status IN ({_LIVE}))"
    f" OR id IN (SELECT training_file FROM jobs WHERE phase NOT IN ({_FINISHED}))"
    f" OR id IN (SELECT validation_file FROM jobs WHERE phase NOT IN ({_FINISHED})))"
)


def old_files(db: Database, before_s: float, limit: int) -> list[str]:
    """Ids of files made before this moment that nothing needs which has not ended."""
    return db.column(
        f"SELECT id FROM files WHERE created_s < ? AND NOT coalesce({_NEEDED}, 0) ORDER BY seq LIMIT ?",
        [before_s, limit],
    )


def is_needed(db: Database, file_id: str) -> bool:
    """Whether a batch or a job that has not ended uses it."""
    return db.value(f"SELECT 1 FROM files WHERE id = ? AND {_NEEDED}", [file_id]) is not None
