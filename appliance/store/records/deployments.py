"""How each model is to be served; a model without a row here is not served."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import DeploymentRow
from appliance.store.table import Table

_TABLE = Table("deployments", DeploymentRow, "model")
insert, find, update = _TABLE.insert, _TABLE.find, _TABLE.update


def list_all(db: Database) -> list[DeploymentRow]:
    return db.all(DeploymentRow, "SELECT * FROM deployments ORDER BY created_s, model")
