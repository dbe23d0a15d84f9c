"""Evaluations, their runs, and the items of each run.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from appliance.store.database import Database, Page, owned_by, sql_list
from appliance.store.rows import UNFINISHED_EVAL_RUN, EvalItemRow, EvalRow, EvalRunRow

_UNFINISHED = sql_list(UNFINISHED_EVAL_RUN)
_MINE = "(?2 IS NULL OR owner = ?2)"


def insert(db: Database, row: EvalRow) -> None:
    db.insert("evals", row, name=row.id)


def find(db: Database, eval_id: str, *, viewer: str | None) -> EvalRow | None:
    return db.one(EvalRow, f"SELECT * FROM evals WHERE id = ?1 AND {_MINE}", [eval_id, viewer])


def update(db: Database, eval_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("evals", EvalRow, {"id": eval_id}, changes)


def page(db: Database, *, viewer: str | None, after: str | None, limit: int, descending: bool) -> Page[EvalRow]:
    return db.page(EvalRow, "evals", scope=owned_by(viewer), after=after, limit=limit, descending=descending)


def delete(db: Database, eval_id: str) -> None:
    """With its runs."""
    db.execute("DELETE FROM evals WHERE id = ?", [eval_id])


def insert_run(db: Database, row: EvalRunRow) -> None:
    db.insert("eval_runs", row, name=row.id)


def find_run(db: Database, run_id: str, *, viewer: str | None = None, eval_id: str | None = None) -> EvalRunRow | None:
    return db.one(
        EvalRunRow,
        f"SELECT * FROM eval_runs WHERE id = ?1 AND {_MINE} AND (?3 IS NULL OR eval_id = ?3)",
        [run_id, viewer, eval_id],
    )


def update_run(db: Database, run_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("eval_runs", EvalRunRow, {"id": run_id}, changes)


def page_runs(
    db: Database, eval_id: str, *, status: str | None, after: str | None, limit: int, descending: bool
) -> Page[EvalRunRow]:
    return db.page(
        EvalRunRow,
        "eval_runs",
        scope={"eval_id": eval_id},
        where="? IS NULL OR status = ?",
        parameters=[status, status],
        after=after,
        limit=limit,
        descending=descending,
    )


def unfinished_ids(db: Database, *, eval_id: str | None = None, owner: str | None = None) -> list[str]:
    """Of runs, oldest first. Their rows may hold megabytes each."""
    rows = db.execute(
        f"SELECT id FROM eval_runs WHERE status IN ({_UNFINISHED}) AND (?1 IS NULL OR eval_id = ?1) "
        "AND (?2 IS NULL OR owner = ?2) ORDER BY seq",
        [eval_id, owner],
    )
    return [row["id"] for row in rows]


def unfinished_owner(db: Database, run_id: str) -> str | None:
    """None if there is no such run, or it has ended. Its row is not read: it may hold megabytes."""
    rows = list(db.execute(f"SELECT owner FROM eval_runs WHERE id = ? AND status IN ({_UNFINISHED})", [run_id]))
    return str(rows[0]["owner"]) if rows else None


def delete_run(db: Database, run_id: str) -> None:
    """With its items."""
    db.execute("DELETE FROM eval_runs WHERE id = ?", [run_id])


def insert_items(db: Database, rows: Iterable[EvalItemRow]) -> None:
    with db.transaction():
        for row in rows:
            db.insert("eval_items", row, name=row.id)


def find_item(db: Database, run_id: str, item_id: str) -> EvalItemRow | None:
    return db.one(EvalItemRow, "SELECT * FROM eval_items WHERE id = ? AND run_id = ?", [item_id, run_id])


def update_item(db: Database, item_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("eval_items", EvalItemRow, {"id": item_id}, changes)


def queued_items(db: Database, run_id: str, limit: int) -> list[EvalItemRow]:
    return db.all(
        EvalItemRow,
        "SELECT * FROM eval_items WHERE run_id = ? AND status = 'queued' ORDER BY seq LIMIT ?",
        [run_id, limit],
    )


def page_items(
    db: Database, run_id: str, *, status: str | None, after: str | None, limit: int, descending: bool
) -> Page[EvalItemRow]:
    """Of those that are judged."""
    return db.page(
        EvalItemRow,
        "eval_items",
        scope={"run_id": run_id},
        where="status <> 'queued' AND (? IS NULL OR status = ?)",
        parameters=[status, status],
        after=after,
        limit=limit,
        descending=descending,
    )


def counts(db: Database, run_id: str) -> dict[str, int]:
    """Number of items by status."""
    rows = db.execute("SELECT status, count(*) AS number FROM eval_items WHERE run_id = ? GROUP BY status", [run_id])
    return {row["status"]: row["number"] for row in rows}


def clear_items(db: Database, run_id: str) -> None:
    """What a preparation that was cut short has left."""
    db.execute("DELETE FROM eval_items WHERE run_id = ?", [run_id])
