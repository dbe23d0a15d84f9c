"""Deletes what is older than it has to be kept, in short transactions."""

from __future__ import annotations

from appliance.store.database import Database, sql_list
from appliance.store.rows import FINISHED_PHASES, UNFINISHED_BATCH, UNFINISHED_EVAL_RUN

_FINISHED = sql_list(sorted(FINISHED_PHASES))
_LIVE = sql_list(UNFINISHED_BATCH)
_OF_ENDED_JOB = "job_id IN (SELECT id FROM jobs WHERE finished_s < ?1)"
_AGED = {
    "audit": "created_s < ?1",
    # The newest stays however old: hand-overs are numbered on from it.
    "handovers": "ended_s < ?1 AND seq < (SELECT max(seq) FROM handovers)",
    "operations": "ended_s < ?1 AND state != 'running'",
    "device_time": "to_s < ?1",
    "batches": f"created_s < ?1 AND status NOT IN ({_LIVE})",
    "usage": "hour_s < ?1 - 3600",
    "job_events": _OF_ENDED_JOB,
    "job_metrics": _OF_ENDED_JOB,
}
_KEYS = {"job_metrics": "job_id, step"}  # of tables without rowid
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
_EVAL_RUN_GOES = f"status NOT IN ({sql_list(UNFINISHED_EVAL_RUN)})"


def delete_aged(db: Database, table: str, before_s: float) -> None:
    db.delete(table, _AGED[table], [before_s], _KEYS.get(table, "rowid"))


def eval_runs_before(db: Database, before_s: float) -> list[str]:
    return db.column(f"SELECT id FROM eval_runs WHERE ended_s < ? AND {_EVAL_RUN_GOES}", [before_s])


def jobs_before(db: Database, before_s: float) -> list[str]:
    return db.column(f"SELECT id FROM jobs WHERE finished_s < ? AND {_JOB_GOES}", [before_s])


def delete_job(db: Database, job_id: str) -> None:
    """Delete an ended job with what belongs to it: up to 100,000 events, steps and checkpoints each."""
    delete_texts_of_job(db, job_id)
    db.delete("job_metrics", "job_id = ?", [job_id], _KEYS["job_metrics"])
    db.delete("checkpoints", "job_id = ?", [job_id])
    db.execute("DELETE FROM jobs WHERE id = ?", [job_id])


def delete_texts_of_job(db: Database, job_id: str) -> None:
    """Delete a job's events and its judge."""
    db.delete("job_events", "job_id = ?", [job_id])
    db.execute("DELETE FROM job_judges WHERE job_id = ?", [job_id])


_NEEDED = (
    f"(id IN (SELECT input_file_id FROM batches WHERE status IN ({_LIVE}))"
    f" OR id IN (SELECT training_file FROM jobs WHERE phase NOT IN ({_FINISHED}))"
    f" OR id IN (SELECT validation_file FROM jobs WHERE phase NOT IN ({_FINISHED})))"
)


def old_files(db: Database, before_s: float) -> list[str]:
    """Ids of files made before this moment that nothing needs which has not ended."""
    return db.column(f"SELECT id FROM files WHERE created_s < ? AND NOT coalesce({_NEEDED}, 0)", [before_s])


def is_needed(db: Database, file_id: str) -> bool:
    """Whether a batch or a job that has not ended uses it."""
    return db.value(f"SELECT 1 FROM files WHERE id = ? AND {_NEEDED}", [file_id]) is not None
