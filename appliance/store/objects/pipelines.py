"""Pipelines by name, and their runs.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database, Page, owned_by
from appliance.store.rows import PipelineRow, PipelineRunRow

RUNS_KEPT = 200
"""Of one pipeline that have ended."""


def insert(db: Database, row: PipelineRow) -> None:
    db.insert("pipelines", row, name=row.name)


def find(db: Database, id_or_name: str, *, viewer: str | None = None) -> PipelineRow | None:
    """An admin who gives a name that several owners have gets the newest."""
    return db.one(
        PipelineRow,
        "SELECT * FROM pipelines WHERE (id = ?1 OR name = ?1) AND (?2 IS NULL OR owner = ?2)"
        " ORDER BY id = ?1 DESC, seq DESC LIMIT 1",
        [id_or_name, viewer],
    )


def of_owner(db: Database, owner: str, name: str) -> PipelineRow | None:
    return db.one(PipelineRow, "SELECT * FROM pipelines WHERE owner = ? AND name = ?", [owner, name])


def number_of(db: Database, owner: str) -> int:
    return int(db.execute("SELECT count(*) FROM pipelines WHERE owner = ?", [owner]).fetchone()[0])


def update(db: Database, pipeline_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("pipelines", PipelineRow, {"id": pipeline_id}, changes)


def delete(db: Database, pipeline_id: str) -> None:
    """With its runs."""
    db.execute("DELETE FROM pipelines WHERE id = ?", [pipeline_id])


def page(db: Database, *, viewer: str | None, after: str | None, limit: int) -> Page[PipelineRow]:
    """Newest first."""
    return db.page(PipelineRow, "pipelines", scope=owned_by(viewer), after=after, limit=limit)


def due(db: Database, now_s: float) -> list[PipelineRow]:
    return db.all(PipelineRow, "SELECT * FROM pipelines WHERE scheduled AND next_s <= ? ORDER BY next_s", [now_s])


def insert_run(db: Database, row: PipelineRunRow) -> None:
    db.insert("pipeline_runs", row, name=row.id)


def find_run(db: Database, run_id: str, *, viewer: str | None = None) -> PipelineRunRow | None:
    return db.one(
        PipelineRunRow,
        "SELECT * FROM pipeline_runs WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)",
        [run_id, viewer],
    )


def update_run(db: Database, run_id: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("pipeline_runs", PipelineRunRow, {"id": run_id}, changes)


def running(db: Database) -> list[PipelineRunRow]:
    """Oldest first."""
    return db.all(PipelineRunRow, "SELECT * FROM pipeline_runs WHERE state = 'running' ORDER BY seq")


def running_of(db: Database, pipeline_id: str) -> PipelineRunRow | None:
    return db.one(
        PipelineRunRow, "SELECT * FROM pipeline_runs WHERE pipeline_id = ? AND state = 'running'", [pipeline_id]
    )


def last_of(db: Database, pipeline_id: str) -> PipelineRunRow | None:
    return db.one(
        PipelineRunRow, "SELECT * FROM pipeline_runs WHERE pipeline_id = ? ORDER BY seq DESC LIMIT 1", [pipeline_id]
    )


def page_runs(
    db: Database, pipeline_id: str, *, viewer: str | None, after: str | None, limit: int
) -> Page[PipelineRunRow]:
    """Newest first."""
    scope = {"pipeline_id": pipeline_id, **owned_by(viewer)}
    return db.page(PipelineRunRow, "pipeline_runs", scope=scope, after=after, limit=limit)


def forget_old_runs(db: Database, pipeline_id: str) -> None:
    db.execute(
        "DELETE FROM pipeline_runs WHERE pipeline_id = ?1 AND state != 'running' AND seq <= coalesce((SELECT seq FROM"
        " pipeline_runs WHERE pipeline_id = ?1 AND state != 'running' ORDER BY seq DESC LIMIT 1 OFFSET ?2), 0)",
        [pipeline_id, RUNS_KEPT],
    )
