"""Why a paused job waits: by request, or because its key was revoked."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.rows import JobRow

KEY_REVOKED = (
    "Its API key was revoked; its owner with another key, or an operator, can resume it (`appliance job resume`)."
)


def reason(db: Database, row: JobRow) -> str | None:
    """Overrides the planner's reason; None: the planner's applies."""
    revoked = row.wanted == "pause" and row.key_id is not None and keys.is_revoked(db, row.key_id)
    return KEY_REVOKED if revoked else None
