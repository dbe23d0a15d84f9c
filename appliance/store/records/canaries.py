"""Versions that take a share of their model's requests. A model has at most one that runs, and its last one is kept."""

from __future__ import annotations

from typing import Any, Literal

from appliance.store.database import Database
from appliance.store.rows import CanaryRow
from appliance.store.table import Table

_TABLE = Table("canaries", CanaryRow, "model")
find = _TABLE.find
"""The model's last one, running or ended."""


def put(db: Database, row: CanaryRow) -> None:
    """Begin a canary in place of the one that ended before."""
    with db.transaction():
        db.execute("DELETE FROM canaries WHERE model = ?", [row.model])
        _TABLE.insert(db, row)


def find_running(db: Database, model: str) -> CanaryRow | None:
    return db.one(CanaryRow, "SELECT * FROM canaries WHERE model = ? AND state = 'running'", [model])


def list_running(db: Database) -> list[CanaryRow]:
    return db.all(CanaryRow, "SELECT * FROM canaries WHERE state = 'running' ORDER BY created_s, model")


def end(
    db: Database,
    model: str,
    state: Literal["promoted", "rolled_back"],
    reason: str,
    *,
    now_s: float,
    compared: dict[str, Any] | None,
) -> None:
    """Raises RowNotFound."""
    _TABLE.update(db, model, state=state, reason=reason, ended_s=now_s, compared=compared)
