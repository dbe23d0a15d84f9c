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


def give_up(db: Database, model: str, version: str, reason: str) -> None:
    """Its replicas failed too often with this version. Raises RowNotFound."""
    update(db, model, failed_reason=f"{version}: {reason}")


def given_up(row: DeploymentRow, version: str | None) -> str:
    """Why nothing is started for this version any more; empty for any other version than the one that failed."""
    failed, _, reason = row.failed_reason.partition(": ")
    return reason if failed == version else ""


def forgive_all(db: Database) -> None:
    """Try everything again, after a restart."""
    db.execute("UPDATE deployments SET failed_reason = ''")


def delete(db: Database, model: str) -> None:
    db.execute("DELETE FROM deployments WHERE model = ?", [model])
