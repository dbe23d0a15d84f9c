"""Gates as the API shows them."""

from __future__ import annotations

from typing import Any

from appliance.controller.http.views import whose
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.objects import gates
from appliance.store.rows import GateRow, columns


def gate_object(row: GateRow, caller: Principal) -> dict[str, Any]:
    """`suites`: for each what was found (`told` of gates.verdict), and the runs by which; before the verdict, what is
    asked of it. `answers`: whether the version got all requests by it."""
    return {
        "id": row.id,
        "object": "gate",
        "created_at": int(row.created_s),
        "job_id": row.job_id,
        "model": row.model,
        "version": row.version or None,
        "before": row.before or None,
        **columns(row, "state verdict reason"),
        "activated": bool(row.activated),
        **columns(row, "terms runs"),
        "suites": row.told,
        "decided_at": None if row.decided_s is None else int(row.decided_s),
        "ended_at": None if row.ended_s is None else int(row.ended_s),
    } | whose(row, caller)


def in_short(row: GateRow | None) -> dict[str, Any] | None:
    """Beside a job."""
    if row is None:
        return None
    return columns(row, "id state verdict reason version before") | {"activated": bool(row.activated)}


def of_model(db: Database, model: str, most: int = 10) -> list[dict[str, Any]]:
    """Beside a model, the newest first."""
    return [
        {"job_id": row.job_id, "decided_s": row.decided_s, **(in_short(row) or {})}
        for row in gates.of_model(db, model, most)
    ]
