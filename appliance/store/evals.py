"""Evaluations, their runs, and the items of each run. viewer: the requesting owner, who sees only their own
evaluations; None: an admin or the box itself, who see all."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import EVAL_RUNS, EVALS, UNFINISHED, EvalRunRow

insert, update, find, page = EVALS.insert, EVALS.update, EVALS.find_visible, EVALS.page_visible
insert_run, find_run, update_run = EVAL_RUNS.insert, EVAL_RUNS.find, EVAL_RUNS.update


def unfinished_ids(db: Database, object_id: str) -> list[str]:
    """Return ids of this evaluation's unfinished runs, or this run's id if unfinished. Rows may hold megabytes each."""
    return db.column(
        f"SELECT id FROM eval_runs INDEXED BY eval_runs_open WHERE {UNFINISHED['eval_runs']}"
        " AND ?1 IN (eval_id, id) ORDER BY seq",
        [object_id],
    )


def delete(db: Database, deleted: str) -> None:
    """Delete an evaluation with its runs, or one run."""
    for run_id in db.column("SELECT id FROM eval_runs WHERE id = ?1 OR eval_id = ?1", [deleted]):
        db.delete("eval_items", "run_id = ?", [run_id])
    with db.transaction():
        db.execute("DELETE FROM eval_runs WHERE id = ?", [deleted])
        db.execute("DELETE FROM evals WHERE id = ?", [deleted])


def passed(db: Database, run_id: str) -> dict[int, bool | None]:
    """Return whether each item passed, by its index in the data; None: the item could not be judged."""
    judged = db.execute("SELECT place, status FROM eval_items WHERE run_id = ?", [run_id])
    return {place: {"pass": True, "fail": False}.get(status) for place, status in judged}


def newest_sampled(db: Database, eval_id: str, *, viewer: str | None) -> EvalRunRow | None:
    """Return the newest run in which a model answered items from a file."""
    sampled = "model <> '' AND data_source ->> '$.source.type' = 'file_id'"
    where = f"eval_id = ?1 AND (?2 IS NULL OR owner = ?2) AND {sampled}"
    return EVAL_RUNS.first(db, where, eval_id, viewer, last=True)
