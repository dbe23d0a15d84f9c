"""How each model is to be served; a model without a row here is not served."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database
from appliance.store.rows import DeploymentRow


def insert(db: Database, row: DeploymentRow) -> None:
    db.insert("deployments", row, name=row.model)


def find(db: Database, model: str) -> DeploymentRow | None:
    return db.one(DeploymentRow, "SELECT * FROM deployments WHERE model = ?", [model])


def list_all(db: Database) -> list[DeploymentRow]:
    return db.all(DeploymentRow, "SELECT * FROM deployments ORDER BY created_s, model")


def update(db: Database, model: str, **changes: Any) -> None:
    """Raises RowNotFound, UnknownColumn."""
    db.update("deployments", DeploymentRow, {"model": model}, changes)


def delete(db: Database, model: str) -> None:
    db.execute("DELETE FROM deployments WHERE model = ?", [model])
