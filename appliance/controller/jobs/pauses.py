"""Why a job that is paused waits: somebody asked for it, or its key was revoked."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.rows import JobRow

KEY_REVOKED = (
    "The API key that it was made with was revoked; its owner with another key, or an operator, can resume it "
    "(`appliance job resume`)."
)


def reason(db: Database, row: JobRow) -> str | None:
    """Instead of what the planner says; None: that is right."""
    revoked = row.wanted == "pause" and row.key_id is not None and keys.is_revoked(db, row.key_id)
    return KEY_REVOKED if revoked else None
