"""What `auto` has learned of each model's traffic; a row goes with its deployment."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import StandbyRow


def find(db: Database, model: str) -> StandbyRow | None:
    return db.one(StandbyRow, "SELECT * FROM standby WHERE model = ?", [model])


def save(db: Database, row: StandbyRow) -> None:
    """Replaces what is there. A model that is not deployed, or no longer, has nothing to keep."""
    with db.transaction():
        db.execute("DELETE FROM standby WHERE model = ?", [row.model])
        if db.execute("SELECT 1 FROM deployments WHERE model = ?", [row.model]).fetchone():
            db.insert("standby", row, name=row.model)
