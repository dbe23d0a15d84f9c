"""What `auto` has learned of each model's traffic; a row goes with its deployment."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.rows import StandbyRow
from appliance.store.table import Table

_TABLE = Table("standby", StandbyRow, "model")
find = _TABLE.find


def save(db: Database, row: StandbyRow) -> None:
    """Replaces what is there. A model that is not deployed, or no longer, has nothing to keep."""
    with db.transaction():
        db.execute("DELETE FROM standby WHERE model = ?", [row.model])
        if db.execute("SELECT 1 FROM deployments WHERE model = ?", [row.model]).fetchone():
            _TABLE.insert(db, row)
