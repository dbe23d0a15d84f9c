"""Evaluations, their runs, and the items of each run. viewer: the owner who asks and sees only their own; None for an
admin or the box itself."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import EVAL_RUNS, EVALS, UNFINISHED, EvalRunRow

insert, update, find, page = EVALS.insert, EVALS.update, EVALS.find_visible, EVALS.page_visible
insert_run, find_run, update_run = EVAL_RUNS.insert, EVAL_RUNS.find, EVAL_RUNS.update


def unfinished_ids(db: Database, object_id: str) -> list[str]:
    """Ids of unfinished runs: of this eval, or this run. Their rows may hold megabytes each."""
    return db.column(
        f"SELECT id FROM eval_runs INDEXED BY eval_runs_open WHERE {UNFINISHED['eval_runs']}"
        " AND ?1 IN (eval_id, id) ORDER BY seq",
        [object_id],
    )


def delete(db: Database, deleted: str) -> None:
    """Delete an eval with its runs, or a run."""
    for run_id in db.column("SELECT id FROM eval_runs WHERE id = ?1 OR eval_id = ?1", [deleted]):
        db.delete("eval_items", "run_id = ?", [run_id])
    with db.transaction():
        db.execute("DELETE FROM eval_runs WHERE id = ?", [deleted])
        db.execute("DELETE FROM evals WHERE id = ?", [deleted])


def passed(db: Database, run_id: str) -> dict[int, bool | None]:
    """Whether each item passed, by its place in the data; None: it could not be judged."""
    judged = db.execute("SELECT place, status FROM eval_items WHERE run_id = ?", [run_id])
    return {place: {"pass": True, "fail": False}.get(status) for place, status in judged}


def newest_sampled(db: Database, eval_id: str, *, viewer: str | None) -> EvalRunRow | None:
    """The newest run in which a model answered items of a file."""
    sampled = "model <> '' AND data_source ->> '$.source.type' = 'file_id'"
    where = f"eval_id = ?1 AND (?2 IS NULL OR owner = ?2) AND {sampled}"
    return EVAL_RUNS.first(db, where, eval_id, viewer, last=True)
