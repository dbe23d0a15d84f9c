"""Facts about the box itself, by name: its mode, cordoned devices, when it started. Values are JSON."""

from __future__ import annotations

import json
from typing import Any

from appliance.store.database import Database


def get(db: Database, name: str, default: Any = None) -> Any:
    found = db.value("SELECT value FROM box WHERE name = ?", [name])
    return default if found is None else json.loads(found)


def put(db: Database, name: str, value: Any) -> None:
    db.execute(
        "INSERT INTO box (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        [name, json.dumps(value, separators=(",", ":"))],
    )


def increment(db: Database, name: str) -> int:
    """Add one to a counter that starts at 0 and return it. No number comes twice."""
    with db.transaction():
        number = int(get(db, name, 0)) + 1
        put(db, name, number)
    return number
