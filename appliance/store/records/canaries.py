"""Versions that take a share of their model's requests. A model has at most one that runs, and its last one is kept."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import CanaryRow
from appliance.store.table import Table

_TABLE = Table("canaries", CanaryRow, "model", order="created_s, model")
put, find, update, list_all = _TABLE.put, _TABLE.find, _TABLE.update, _TABLE.list_all
"""`find`: the model's last one, running or ended."""


def find_running(db: Database, model: str) -> CanaryRow | None:
    row = find(db, model)
    return row if row is not None and row.state == "running" else None


def list_running(db: Database) -> list[CanaryRow]:
    return _TABLE.list_all(db, "state = 'running'")
