"""Versions that take a share of their model's requests. A model has at most one that runs, and its last one is kept."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import CANARIES, CanaryRow

put, find, update, list_all = CANARIES.put, CANARIES.find, CANARIES.update, CANARIES.list_all
"""`find`: the model's last one, running or ended."""


def find_running(db: Database, model: str) -> CanaryRow | None:
    return CANARIES.first(db, "model = ? AND state = 'running'", model)


def list_running(db: Database) -> list[CanaryRow]:
    return CANARIES.list_all(db, "state = 'running'")
