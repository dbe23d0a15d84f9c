"""Tasks: work of the controller that outlives its request (appliance.controller.context.tasks)."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import TASKS, TaskRow

find = TASKS.find


def insert(db: Database, row: TaskRow) -> None:
    """Does nothing if the task is there."""
    with db.transaction():
        if find(db, row.kind, row.id) is None:
            TASKS.insert(db, row)


def list_all(db: Database, *, key_id: str | None = None) -> list[TaskRow]:
    """Oldest first. key_id: only those of this key."""
    return db.all(TaskRow, "SELECT * FROM tasks WHERE ?1 IS NULL OR key_id = ?1 ORDER BY created_s", [key_id])


def delete(db: Database, kind: str, object_id: str) -> None:
    db.execute("DELETE FROM tasks WHERE kind = ? AND id = ?", [kind, object_id])
