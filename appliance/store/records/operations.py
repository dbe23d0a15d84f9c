"""Long operations (import, verify) and how far they are."""

from __future__ import annotations

import time
from typing import Any, Unpack

from appliance.store.database import Database, Page, Part
from appliance.store.errors import RowNotFound
from appliance.store.rows import OperationRow
from appliance.store.table import Table

_TABLE = Table("operations", OperationRow)
insert, find = _TABLE.insert, _TABLE.find


def find_running(db: Database, kind: str, target: str) -> OperationRow | None:
    query = "SELECT * FROM operations WHERE state = 'running' AND kind = ? AND target = ?"
    return db.one(OperationRow, query, [kind, target])


def page(db: Database, **part: Unpack[Part]) -> Page[OperationRow]:
    """Newest first. Raises UnknownCursor."""
    return db.page(OperationRow, "operations", **part)


def set_progress(db: Database, operation_id: str, progress: dict[str, Any]) -> None:
    _TABLE.update(db, operation_id, progress=progress)


def succeed(db: Database, operation_id: str, result: dict[str, Any]) -> None:
    """Raises RowNotFound when it is not running."""
    _end(db, operation_id, {"state": "succeeded", "result": result})


def fail(db: Database, operation_id: str, error: dict[str, Any]) -> None:
    """Raises RowNotFound when it is not running."""
    _end(db, operation_id, {"state": "failed", "error": error})


def _end(db: Database, operation_id: str, changes: dict[str, Any]) -> None:
    row = find(db, operation_id)
    if row is None or row.state != "running":
        raise RowNotFound("running operations", operation_id)
    _TABLE.update(db, operation_id, **changes, ended_s=time.time())
